"""What comes back, and what is left unwritten."""

import numpy as np
import torch

from tests import oracle
from tests.portable.calls import Call, aiter


def test_one_split_fp8_returns_a_view_of_the_output_and_an_unwritten_lse():
    call = Call([300, 200], "fp8", splits=1)
    out, lse = call.run()
    assert out.data_ptr() == call.output.data_ptr()
    assert lse.shape == (2, 1, 16, 1)
    assert torch.isnan(lse).all()


def test_bf16_returns_partials_and_an_unwritten_lse():
    call = Call([300, 20], "bf16", splits=4)
    partial, lse = call.run()
    assert partial.shape == (2, 4, 16, 512)
    assert partial.dtype == torch.float32
    assert torch.isnan(lse).all()
    assert torch.isfinite(partial[0]).all()
    assert torch.isnan(partial[1, 1:]).all(), "20 tokens are one tile: the other splits stay unwritten"


def test_persistent_returns_partials_and_the_lse_on_request():
    call = Call([1000, 1000], "a16w8", splits=2)
    partial, lse = call.run()
    assert lse is None
    assert partial.shape == (4, 1, 16, 512)
    _, lse = call.run(return_lse=True)
    q, kv = call.read()
    scores = q[0] @ kv[call.kv_indices[:1000].numpy()].T / 24
    assert np.allclose(lse[0], np.log(np.exp(scores).sum(-1)), atol=1e-4)


def test_an_empty_sequence_gives_nan_as_the_real_reduce_does():
    call = Call([5, 0, 3], "bf16")
    call.run()
    assert torch.isnan(call.output[1]).all()
    assert torch.isfinite(call.output[[0, 2]]).all()


def test_without_a_reduce_an_empty_sequence_leaves_its_row_alone():
    call = Call([5, 0, 3], "fp8", splits=1)
    call.output.fill_(7.0)
    call.run()
    assert (call.output[1] == 7).all()
    assert torch.isfinite(call.output).all()


def test_padded_rows_are_left_alone():
    for kernel, lengths in (("bf16", [50, 60]), ("fp8", [50, 60]), ("a16w8", [200, 500])):
        call = Call(lengths, kernel, splits=2, spare_rows=2)
        call.output.fill_(7.0)
        call.run()
        assert (call.output[2:] == 7).all()
        assert oracle.error(call.output[:2], call.expected()) < call.kind.budget


def test_sequences_without_a_query_row_are_left_alone_at_the_end():
    """As a batch padded for a graph has them: qo_indptr and kv_indptr repeat their last values."""
    call = Call([50, 60, 0, 0], "bf16", unqueried=2)
    call.run()
    assert call.qo_indptr.tolist() == [0, 1, 2, 2, 2]
    assert call.output.shape == (2, 16, 512)
    assert call.error() < call.kind.budget


def test_a_works_part_that_nobody_merges_stays_a_partial():
    call = Call([1000, 1000], "a16w8", splits=2)
    call.options["reduce_indptr"][1:] = 2
    partial, _ = call.run()
    assert torch.isnan(call.output[1]).all()
    assert torch.isfinite(partial).all()
    assert oracle.error(call.output[0], call.expected()[0]) < 0.004


def test_split_counts_come_from_aiters_rule():
    """By hand from get_meta_param's rule: batch 4 and 64 × 1024, bf16 and fp8."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    cases = [(4, 1024, bf16, 16), (64, 1024, bf16, 4), (256, 1024, bf16, 1), (4, 130, fp8, 2), (4, 128, fp8, 1)]
    for batch, length, dtype, splits in cases:
        assert aiter.mla._choose_splits(None, batch, batch * length, dtype) == splits
