"""portable/aiter: right attention, and the real library's behaviour around it."""

import itertools
import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference  # noqa: F401 (chooses the aiter)
from bench.basics import PROJECT_ROOT
from tests import oracle

if torch.version.hip is not None:
    pytest.skip("AMD's own aiter is in use, not the portable one", allow_module_level=True)

import aiter
from aiter.metadata import _plan_works

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LISTS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


def _cast(values, dtype, scale):
    """To fp8 by its scale, clamped: torch casts above 464 to NaN up to 2.11 and saturates in 2.13."""
    return (values / scale).clamp(-448, 448).to(dtype) if dtype == FP8 else values.to(dtype)


class Call:
    """One mla_decode_fwd call over ragged lengths, with everything in reach."""

    def __init__(self, lengths, q_dtype, kv_dtype, *, persistent=False, splits=None, page_size=1, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        batch, self.lengths, self.page_size = len(lengths), lengths, page_size
        pages = [-(-n // page_size) for n in lengths]
        self.q_values = torch.randn(batch, 16, 576, generator=generator).to(device)
        kv = torch.randn(sum(pages) * page_size, 576, generator=generator).to(device)
        self.kv_scale = torch.tensor([0.0123], device=device) if kv_dtype == FP8 else None
        self.q_scale = torch.tensor([0.0081], device=device) if q_dtype == FP8 else None
        self.q = _cast(self.q_values, q_dtype, self.q_scale)
        self.kv = _cast(kv, kv_dtype, self.kv_scale)
        # Pages in random order, so that kv_indices matters.
        order = torch.randperm(sum(pages), generator=generator)
        self.kv_indices = order.to(torch.int32).to(device)
        self.kv_indptr = torch.tensor([0, *np.cumsum(pages)], dtype=torch.int32, device=device)
        self.qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.last_page_lens = torch.tensor(
            [n - (p - 1) * page_size for n, p in zip(lengths, pages, strict=True)], dtype=torch.int32, device=device
        )
        self.output = torch.full((batch, 16, 512), torch.nan, dtype=BF16, device=device)
        self.options = {"num_kv_splits": splits, "q_scale": self.q_scale, "kv_scale": self.kv_scale}
        if persistent:
            self.options |= {"intra_batch_mode": True, **self.make_lists(splits)}

    def make_lists(self, splits, **changes):
        batch = len(self.lengths)
        info = aiter.get_mla_metadata_info_v1(
            batch, 1, 16, self.q.dtype, self.kv.dtype, is_sparse=False, fast_mode=False, num_kv_splits=splits,
            intra_batch_mode=True,
        )  # fmt: skip
        buffers = dict(zip(LISTS, (torch.empty(s, dtype=t, device=self.q.device) for s, t in info), strict=True))
        arguments = {
            "page_size": self.page_size, "kv_granularity": 16, "max_seqlen_qo": 1, "uni_seqlen_qo": 1,
            "fast_mode": False, "max_split_per_batch": splits, "intra_batch_mode": True, **changes,
        }  # fmt: skip
        aiter.get_mla_metadata_v1(
            self.qo_indptr, self.kv_indptr, self.last_page_lens, 16, 1, True, buffers["work_meta_data"],
            buffers["work_info_set"], buffers["work_indptr"], *(buffers[name] for name in LISTS[3:]), **arguments,
        )  # fmt: skip
        return buffers

    def run(self, **changes):
        return aiter.mla.mla_decode_fwd(
            self.q, self.kv.view(-1, self.page_size, 1, 576), self.output, self.qo_indptr, self.kv_indptr,
            self.kv_indices, self.last_page_lens, 1, **{"page_size": self.page_size, **self.options, **changes},
        )  # fmt: skip

    def expected(self, tokens=slice(None)):
        """float64 attention of each sequence over its tokens[…], in the order of its pages."""
        q = oracle.numpy_of(self.q) * (self.q_scale.item() if self.q_scale is not None else 1)
        kv = oracle.numpy_of(self.kv) * (self.kv_scale.item() if self.kv_scale is not None else 1)
        pages = kv.reshape(-1, self.page_size, 576)[self.kv_indices.cpu().numpy()]
        bounds = self.kv_indptr.tolist()
        return np.stack(
            [
                oracle.attention(q[b], pages[bounds[b] : bounds[b + 1]].reshape(-1, 576)[:n][tokens], 1 / 24)
                for b, n in enumerate(self.lengths)
            ]
        )


# ---- Attention comes out right ----

KERNELS = {
    "bf16": (BF16, BF16, False, 0.004),
    "fp8": (FP8, FP8, False, 0.03),
    "a16w16": (BF16, BF16, True, 0.004),
    "a16w8": (BF16, FP8, True, 0.004),
    "a8w8": (FP8, FP8, True, 0.03),
}


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_ragged_lengths_and_shuffled_pages(kernel, splits, device):
    q_dtype, kv_dtype, persistent, budget = KERNELS[kernel]
    lengths = [1000, 196, 777, 3000] if persistent else [1, 63, 64, 65, 1000, 17]
    call = Call(lengths, q_dtype, kv_dtype, persistent=persistent, splits=splits, device=device)
    call.run()
    assert oracle.error(call.output, call.expected()) < budget


@pytest.mark.parametrize("kernel", ["bf16", "fp8"])
def test_aiter_picks_the_splits(kernel, device):
    q_dtype, kv_dtype, persistent, budget = KERNELS[kernel]
    call = Call([500, 900, 4], q_dtype, kv_dtype, persistent=persistent, device=device)
    call.run()
    assert oracle.error(call.output, call.expected()) < budget


def test_more_tokens_than_one_chunk(monkeypatch):
    monkeypatch.setattr(aiter.mla, "_CHUNK", 128)
    for kernel in ("bf16", "a8w8"):
        q_dtype, kv_dtype, persistent, budget = KERNELS[kernel]
        call = Call([1000, 300], q_dtype, kv_dtype, persistent=persistent, splits=1)
        call.run()
        assert oracle.error(call.output, call.expected()) < budget


def test_fp8_kernels_round_the_probabilities_to_fp8(device):
    """Their error is that of fp8 probabilities: above what bf16 ones could give, below gate A's budget."""
    for kernel, low, high in (("a8w8", 0.008, 0.03), ("a16w8", 0.0005, 0.004)):
        q_dtype, kv_dtype, persistent, _ = KERNELS[kernel]
        call = Call([1024] * 4, q_dtype, kv_dtype, persistent=persistent, splits=1, device=device)
        call.run()
        assert low < oracle.error(call.output, call.expected()) < high


def test_bf16_probabilities_round_half_down():
    bits = torch.tensor([0x3F808000, 0x3F808001, 0x3F807FFF, 0x3F818000], dtype=torch.int32)
    rounded = aiter.mla._to_bf16(bits.view(torch.float32)).view(torch.int32)
    assert [hex(b) for b in rounded.tolist()] == ["0x3f800000", "0x3f810000", "0x3f800000", "0x3f810000"]


def test_a_needle_is_found_wherever_it_is():
    for kernel, (q_dtype, kv_dtype, persistent, budget) in KERNELS.items():
        for position in (0, 1, 63, 64, 191, 192, 255, 256, 398, 399):
            call = Call([400, 400], q_dtype, kv_dtype, persistent=persistent, splits=2)
            row = call.kv_indices[400 + position].item()
            call.kv[row] = _cast(call.q_values[1, 3] * 1.2, kv_dtype, call.kv_scale)
            call.run()
            assert oracle.error(call.output[1], call.expected()[1]) < budget, (kernel, position)


# ---- What comes back, and what is left unwritten ----


def test_one_split_fp8_returns_a_view_of_the_output():
    call = Call([300, 200], FP8, FP8, splits=1)
    out, lse = call.run()
    assert out.data_ptr() == call.output.data_ptr()
    assert lse.shape == (2, 1, 16, 1)


def test_bf16_returns_partials_and_an_unwritten_lse():
    call = Call([300, 20], BF16, BF16, splits=4)
    partial, lse = call.run()
    assert partial.shape == (2, 4, 16, 512)
    assert partial.dtype == torch.float32
    assert torch.isnan(lse).all()
    assert torch.isfinite(partial[0]).all()
    assert torch.isnan(partial[1, 1:]).all(), "20 tokens are one tile: the other splits stay unwritten"


def test_persistent_returns_partials_and_the_lse_on_request():
    call = Call([1000, 1000], BF16, FP8, persistent=True, splits=2)
    partial, lse = call.run()
    assert lse is None
    assert partial.shape == (4, 1, 16, 512)
    _, lse = call.run(return_lse=True)
    q, kv = oracle.numpy_of(call.q), oracle.numpy_of(call.kv) * call.kv_scale.item()
    scores = q[0] @ kv[call.kv_indices[:1000].numpy()].T / 24
    assert np.allclose(lse[0], np.log(np.exp(scores).sum(-1)), atol=1e-4)


def test_an_empty_sequence_gives_nan_as_the_real_reduce_does():
    call = Call([5, 0, 3], BF16, BF16)
    call.run()
    assert torch.isnan(call.output[1]).all()
    assert torch.isfinite(call.output[[0, 2]]).all()


def test_a_missing_kv_scale_poisons_a16w8():
    call = Call([300], BF16, FP8, persistent=True, splits=1)
    call.run(kv_scale=None)
    assert torch.isnan(call.output).all()


# ---- A persistent call does what its lists say ----


def test_wrong_metadata_gives_a_wrong_answer():
    call = Call([1000, 1000], BF16, FP8, persistent=True, splits=2)
    call.options["work_info_set"][0, 5] -= 100  # the first part ends early
    call.run()
    assert oracle.error(call.output[0], call.expected()[0]) > 0.1
    assert oracle.error(call.output[1], call.expected()[1]) < 0.004


def test_works_that_no_compute_unit_has_are_not_done():
    call = Call([1000, 1000], BF16, FP8, persistent=True, splits=1)
    call.options["work_indptr"][2:] = 1
    call.run()
    assert torch.isnan(call.output[1]).all()
    assert oracle.error(call.output[0], call.expected()[0]) < 0.004


def test_lists_moved_since_they_were_made_are_refused():
    call = Call([1000], BF16, FP8, persistent=True, splits=1)
    with pytest.raises(RuntimeError, match="points at other buffers"):
        call.run(work_info_set=call.options["work_info_set"].clone())
    with pytest.raises(RuntimeError, match="all six lists"):
        call.run(reduce_indptr=None)


# ---- Pages ----


@pytest.mark.parametrize("page_size", [2, 8])
@pytest.mark.parametrize("kernel", ["a16w8", "a8w8", "bf16"])
def test_pages_give_their_first_token_only(kernel, page_size):
    q_dtype, kv_dtype, persistent, budget = KERNELS[kernel]
    call = Call([1600, 3200], q_dtype, kv_dtype, persistent=persistent, splits=1, page_size=page_size)
    with pytest.warns(aiter.mla.PagingWarning, match=f"1/{page_size} of the cache"):
        call.run()
    assert oracle.error(call.output, call.expected(slice(None, None, page_size))) < budget
    assert oracle.error(call.output, call.expected()) > 0.3


@pytest.mark.parametrize("kernel", ["a16w8", "bf16"])
def test_documented_paging_reads_whole_pages(kernel):
    q_dtype, kv_dtype, persistent, budget = KERNELS[kernel]
    call = Call([1601, 3207], q_dtype, kv_dtype, persistent=persistent, splits=2, page_size=8)
    with aiter.settings.using(documented_paging=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        call.run()
    assert oracle.error(call.output, call.expected()) < budget
    assert not aiter.settings.documented_paging


def test_page_size_one_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Call([30], BF16, BF16).run()


# ---- Refusals ----


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "persistent"),
    [(BF16, FP8, False), (FP8, BF16, False), (FP8, BF16, True), (torch.float16, torch.float16, False)],
)
def test_combinations_without_a_kernel(q_dtype, kv_dtype, persistent):
    call = Call([300], q_dtype, kv_dtype, persistent=persistent, splits=1)
    with pytest.raises(RuntimeError, match="no gfx950 kernel"):
        call.run()
    assert torch.isnan(call.output).all()


def test_malformed_calls():
    call = Call([300], FP8, FP8, splits=1)
    for scale in ("q_scale", "kv_scale"):
        with pytest.raises(RuntimeError, match="needs both q_scale and kv_scale"):
            call.run(**{scale: None})
    with pytest.raises(AssertionError, match="logit_cap"):
        call.run(logit_cap=1.0)
    with pytest.raises(RuntimeError, match="nhead_kv"):
        call.run(nhead_kv=2)
    with pytest.raises(RuntimeError, match="kv_buffer must be"):
        call.run(page_size=2)
    call.q = torch.empty(1, 576, 16, dtype=torch.uint8).view(FP8).transpose(1, 2)
    with pytest.raises(RuntimeError, match="contiguous"):
        call.run()
    call = Call([300], BF16, BF16)
    call.q = call.q[:, :8].contiguous()
    with pytest.raises(NotImplementedError, match="16 heads"):
        call.run()


# ---- Metadata ----


def _work_lists(lengths, splits, **changes):
    call = Call(lengths, BF16, FP8)
    lists = call.make_lists(splits, **changes)
    works = lists["work_info_set"][: lists["work_indptr"][-1]].tolist()
    return works, {name: lists[name].tolist() for name in LISTS[1:]}


@pytest.mark.parametrize(
    ("batch", "length", "splits"),
    [
        (4, 1024, 5),
        (4, 8192, 32),
        (32, 1024, 5),
        (32, 8192, 8),
        (64, 1024, 4),
        (64, 8192, 4),
        (256, 1024, 1),
        (256, 8192, 1),
    ],
)
def test_benchmark_shapes_get_the_real_splits(batch, length, splits):
    indptr = [i * length for i in range(batch + 1)]
    works, parts = _plan_works(indptr, 16, 32)
    assert set(parts) == {splits}
    assert len(works) == batch * splits


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(196, 5000), min_size=1, max_size=40),
    max_splits=st.integers(1, 40),
    num_cus=st.sampled_from([7, 64, 256, 304]),
)
def test_works_tile_each_sequence_once_and_load_evenly(lengths, max_splits, num_cus):
    with aiter.settings.using(num_cus=num_cus):
        works, lists = _work_lists_without_data(lengths, max_splits)
    bounds = [0, *np.cumsum(lengths)]
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        mine = [w for w in works if w[0] == b]
        assert [w[4] for w in mine] == [begin, *[w[5] for w in mine[:-1]]]
        assert mine[-1][5] == end
        assert all(w[5] > w[4] and w[6] == end - w[5] and (w[2], w[3]) == (b, b + 1) for w in mine)
        assert len(mine) <= max_splits
        places = lists["reduce_partial_map"][lists["reduce_indptr"][b] : lists["reduce_indptr"][b + 1]]
        assert places == [w[1] for w in mine]
        assert lists["reduce_final_map"][b] == [b, b + 1]
        assert (places == [-1]) == (len(mine) == 1)
    written = [w[1] for w in works if w[1] >= 0]
    assert len(set(written)) == len(written)
    loads = np.diff(lists["work_indptr"])
    assert loads.sum() == len(works)
    assert loads.max() - loads.min() <= 1
    assert list(loads) == sorted(loads, reverse=True)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(196, 9000), min_size=1, max_size=30),
    max_splits=st.integers(1, 40),
    num_cus=st.sampled_from([7, 64, 256, 304]),
)
def test_work_lists_agree_with_a_second_implementation(lengths, max_splits, num_cus):
    with aiter.settings.using(num_cus=num_cus):
        works, lists = _work_lists_without_data(lengths, max_splits)
    assert (works, lists["work_indptr"]) == oracle.work_lists(lengths, max_splits, num_cus)


def _work_lists_without_data(lengths, splits):
    batch = len(lengths)
    info = aiter.get_mla_metadata_info_v1(
        batch, 1, 16, BF16, FP8, is_sparse=False, fast_mode=False, num_kv_splits=splits, intra_batch_mode=True
    )
    buffers = [torch.empty(s, dtype=t) for s, t in info]
    meta, indptr, works, *reduce = buffers
    kv_indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    aiter.get_mla_metadata_v1(
        torch.arange(batch + 1, dtype=torch.int32), kv_indptr, torch.ones(batch, dtype=torch.int32), 16, 1, True, meta,
        works, indptr, *reduce, kv_granularity=16, uni_seqlen_qo=1, fast_mode=False, max_split_per_batch=splits,
        intra_batch_mode=True,
    )  # fmt: skip
    return works[: indptr[-1]].tolist(), dict(zip(LISTS[1:], [b.tolist() for b in buffers[1:]], strict=True))


def test_a_short_tail_joins_the_part_before():
    # 980 tokens, 5 splits: 62 blocks of 16, 13 a split, 208 tokens; 4 × 208 = 832, the rest is 148: a split of its own.
    works, _ = _work_lists([980], 32)
    assert [w[5] - w[4] for w in works] == [208, 208, 208, 208, 148]
    # 2914 tokens, 14 splits: 183 blocks, 14 a split, 224 tokens; 13 × 224 = 2912, and the last 2 join the 13th.
    works, _ = _work_lists([2914], 32)
    assert [w[5] - w[4] for w in works] == [224] * 12 + [226]
    works, _ = _work_lists([2916], 32)
    assert [w[5] - w[4] for w in works] == [224] * 12 + [228]
    works, _ = _work_lists([2917], 32)
    assert [w[5] - w[4] for w in works] == [224] * 13 + [5]


@pytest.mark.parametrize(
    ("lengths", "splits", "changes", "message"),
    [
        ([195], 4, {}, "sequence 0 has 195 entries"),
        ([1000, 3], 4, {}, "sequence 1 has 3 entries"),
        ([1000], 4, {"max_split_per_batch": -1}, "must be 1 or more"),
        ([1000], 2, {"max_split_per_batch": 5}, "work_info_set needs 5 rows"),
        ([1000], 4, {"kv_granularity": 12}, "kv_granularity must be a power of 2"),
        ([1000], 4, {"page_size": 3}, "page_size must be a power of 2"),
    ],
)
def test_metadata_refusals(lengths, splits, changes, message):
    with pytest.raises(RuntimeError, match=message):
        _work_lists(lengths, splits, **changes)


@pytest.mark.parametrize(
    "change", [{"fast_mode": True}, {"intra_batch_mode": False}, {"uni_seqlen_qo": 2}, {"topk": 8}]
)
def test_other_modes_are_named_as_missing(change):
    with pytest.raises(NotImplementedError, match="the portable aiter makes metadata for"):
        _work_lists([1000], 4, **change)


def test_info_sizes():
    shapes = aiter.get_mla_metadata_info_v1(
        4, 1, 16, BF16, FP8, is_sparse=False, fast_mode=False, num_kv_splits=8, intra_batch_mode=True
    )
    assert shapes == (
        (2, torch.uint64),
        (257, torch.int32),
        ((32, 8), torch.int32),
        (5, torch.int32),
        ((4, 2), torch.int32),
        (32, torch.int32),
    )


@pytest.mark.parametrize(
    ("batch", "length", "dtype", "splits"),
    # By hand from the rule in facts/aiter.md: batch 4 and 64 × 1024, bf16 and fp8.
    [(4, 1024, BF16, 16), (64, 1024, BF16, 4), (256, 1024, BF16, 1), (4, 130, FP8, 2), (4, 128, FP8, 1)],
)
def test_non_persistent_splits(batch, length, dtype, splits):
    assert aiter.mla._choose_splits(None, batch, batch * length, dtype) == splits


# ---- mxfp4 helpers, exhaustively ----


def test_all_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    values = aiter.fp4_utils.mxfp4_to_f32(codes[:, None]).numpy()
    expected = oracle.mxfp4_values(np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, 1), np.full((256, 1), 127))
    assert np.array_equal(values, expected[:, :2])
    assert np.array_equal(np.signbit(values), np.stack([np.arange(256) & 8, np.arange(256) >> 4 & 8], -1) > 0)


def test_all_scales():
    scales = (
        aiter.fp4_utils.e8m0_to_f32(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)).double().numpy()
    )
    assert np.isnan(scales[255])
    assert np.array_equal(scales[:255], 2.0 ** (np.arange(255) - 127.0))


def test_quantiser_refusals():
    with pytest.raises(ValueError, match="columns a multiple of 32"):
        aiter.fp4_utils.dynamic_mxfp4_quant(torch.zeros(2, 48))
    with pytest.raises(NotImplementedError, match="shuffle=False"):
        aiter.fp4_utils.dynamic_mxfp4_quant(torch.zeros(2, 64), shuffle=True)


# ---- Which aiter, and the settings ----


def _python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=PROJECT_ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_an_unrelated_aiter_does_not_win(tmp_path):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("from . import mla\n")
    (tmp_path / "aiter" / "mla.py").write_text("marker = 'unrelated'\n")
    done = _python(
        """
        import aiter, aiter.mla
        assert aiter.mla.marker == "unrelated"
        import reference, aiter
        print(aiter.__file__, hasattr(aiter.mla, "mla_decode_fwd"))
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert done.stdout.split() == [str(PROJECT_ROOT / "portable/aiter/__init__.py"), "True"], done.stderr


def test_portable_on_the_path_serves_other_programs():
    done = _python("from aiter.mla import mla_decode_fwd; import aiter; print(aiter.__file__)", PYTHONPATH="portable")
    assert done.stdout.strip() == str(PROJECT_ROOT / "portable/aiter/__init__.py"), done.stderr


def test_settings_from_the_environment():
    done = _python(
        "import aiter; print(aiter.settings)",
        PYTHONPATH="portable",
        PORTABLE_AITER_NUM_CUS="304",
        PORTABLE_AITER_DOCUMENTED_PAGING="1",
    )
    assert "num_cus=304, documented_paging=True" in done.stdout, done.stderr


def test_settings_end_with_their_block():
    with aiter.settings.using(num_cus=8):
        assert aiter.settings.num_cus == 8
    assert aiter.settings.num_cus == 256
    with pytest.raises(AttributeError), aiter.settings.using(cus=8):
        pass
