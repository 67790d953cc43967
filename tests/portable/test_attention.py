"""Attention comes out right: ragged lengths, shuffled and padded layouts, needles, and the kernels' rounding points."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.portable.calls import KERNELS, Call, aiter, cast


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_ragged_lengths_and_shuffled_pages(kernel, splits, device):
    kind = KERNELS[kernel]
    lengths = [1000, 196, 777, 3000] if kind.persistent else [1, 63, 64, 65, 1000, 17]
    call = Call(lengths, kernel, splits=splits, device=device)
    call.run()
    assert call.error() < kind.budget


@pytest.mark.parametrize("kernel", ["bf16", "fp8"])
def test_aiter_picks_the_splits(kernel, device):
    call = Call([500, 900, 4], kernel, device=device)
    call.run()
    assert call.error() < KERNELS[kernel].budget


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.sampled_from(["bf16", "fp8"]),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    splits=st.sampled_from([None, 1, 2, 3, 7]),
    unqueried=st.integers(0, 2),
    spare_rows=st.integers(0, 2),
    lead=st.integers(0, 3),
    spare=st.integers(0, 3),
)
@example(kernel="bf16", lengths=[5, 0, 3], splits=None, unqueried=0, spare_rows=0, lead=0, spare=0)
@example(kernel="fp8", lengths=[5, 0, 3], splits=1, unqueried=0, spare_rows=0, lead=0, spare=0)
@example(kernel="bf16", lengths=[5, 0, 0], splits=2, unqueried=2, spare_rows=1, lead=2, spare=2)
@example(kernel="fp8", lengths=[5, 70], splits=1, unqueried=1, spare_rows=1, lead=0, spare=0)
def test_any_ragged_and_padded_layout(kernel, lengths, splits, unqueried, spare_rows, lead, spare):
    """Each row is its sequence's attention, NaN or left alone, as the real kernel and reduce leave it."""
    unqueried = min(unqueried, len(lengths) - 1)
    call = Call(
        lengths, kernel, splits=splits, unqueried=unqueried, spare_rows=spare_rows, lead=lead, spare=spare, seed=1
    )
    call.output.fill_(7.0)
    if splits:
        call.options["num_kv_splits_indptr"] = torch.arange(len(lengths) + 1, dtype=torch.int32) * splits
    busy = max(b + 1 for b, n in enumerate(lengths) if n or b < call.queried)
    picks_none = kernel == "fp8" and splits is None and len(call.kv_indices) < len(lengths)
    if busy > call.queried + spare_rows or picks_none:
        with pytest.raises(ValueError, match=r"run past the end of q|num_kv_splits is 0"):
            call.run()
        assert (call.output == 7).all()
        return
    partial, _ = call.run()
    direct = partial.dtype != torch.float32
    q, kv = call.read()
    bounds = call.kv_indptr.tolist()
    for row, got in enumerate(call.output):
        length = lengths[row] if row < len(lengths) else 0
        if length and (direct or row < call.queried):
            tokens = kv[call.kv_indices[bounds[row] : bounds[row + 1]].numpy()]
            assert oracle.error(got, oracle.attention(q[row], tokens, 1 / 24)) < KERNELS[kernel].budget
        elif row < call.queried and not direct:
            assert torch.isnan(got).all()
        else:
            assert (got == 7).all()


@settings(max_examples=25, deadline=None)
@given(
    kernel=st.sampled_from(["a16w16", "a16w8", "a8w8"]),
    lengths=st.lists(st.integers(196, 700), min_size=1, max_size=3),
    splits=st.integers(1, 5),
    spare_rows=st.integers(0, 2),
    spare=st.integers(0, 3),
)
def test_any_persistent_layout(kernel, lengths, splits, spare_rows, spare):
    call = Call(lengths, kernel, splits=splits, spare_rows=spare_rows, spare=spare, seed=2)
    call.output.fill_(7.0)
    call.run()
    assert all(
        oracle.error(got, expected) < KERNELS[kernel].budget
        for got, expected in zip(call.output, call.expected(), strict=False)
    )
    assert (call.output[len(lengths) :] == 7).all()


def test_more_tokens_than_one_chunk(monkeypatch):
    monkeypatch.setattr(aiter.kernels, "_CHUNK", 128)
    for kernel in ("bf16", "a8w8"):
        call = Call([1000, 300], kernel, splits=1)
        call.run()
        assert call.error() < KERNELS[kernel].budget


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_needle_is_found_wherever_it_is(kernel):
    call = Call([400, 400], kernel, splits=2)
    haystack = call.kv
    needle = cast(call.q_values[1, 3] * 1.2, call.kind.kv, call.kv_scale)
    for position in (0, 1, 63, 64, 191, 192, 255, 256, 398, 399):
        call.kv = haystack.clone()
        call.kv[call.kv_indices[400 + position].item()] = needle
        call.run()
        q, kv = call.read()
        expected = oracle.attention(q[1], kv[call.kv_indices[400:].numpy()], 1 / 24)
        assert oracle.error(call.output[1], expected) < call.kind.budget, position


def test_views_are_read_by_their_strides():
    """A cache whose rows are part of wider ones, and an output of another layout and dtype where a reduce writes it."""
    call = Call([300, 70], "bf16", splits=2)
    expected = call.expected()
    wide = torch.full((370, 1, 1, 640), torch.nan, dtype=torch.bfloat16)
    wide[..., :576] = call.kv[:, None, None]
    call.kv = wide[..., :576]
    call.output = torch.full((16, 2, 512), torch.nan).transpose(0, 1)
    call.run()
    assert oracle.error(call.output, expected) < KERNELS["bf16"].budget


def test_scales_may_have_any_shape_of_one_number():
    call = Call([300], "a16w8", splits=1)
    call.run(kv_scale=call.kv_scale.reshape(1, 1))
    assert call.error() < KERNELS["a16w8"].budget


# ---- Rounding points ----


def test_fp8_kernels_round_the_probabilities_to_fp8(device):
    """Their error is that of fp8 probabilities: above what bf16 ones could give, below gate A's budget."""
    for kernel, low, high in (("a8w8", 0.008, 0.03), ("a16w8", 0.0005, 0.004)):
        call = Call([1024] * 4, kernel, splits=1, device=device)
        call.run()
        assert low < call.error() < high


def test_bf16_probabilities_round_halves_up():
    bits = torch.tensor([0x3F808000, 0x3F808001, 0x3F807FFF, 0x3F818000], dtype=torch.int32)
    rounded = aiter.kernels._to_bf16(bits.view(torch.float32)).view(torch.int32)
    assert [hex(b) for b in rounded.tolist()] == ["0x3f810000", "0x3f810000", "0x3f800000", "0x3f820000"]


def _by_tiles(q: np.ndarray, kv: np.ndarray, tile: int, rounded: np.dtype) -> np.ndarray:
    """Attention (16, 512) in float64 with a maximum that moves once per tile and probabilities rounded to a dtype."""
    top, total, out = np.full((16, 1), -np.inf), np.zeros((16, 1)), np.zeros((16, 512))
    for start in range(0, len(kv), tile):
        part = kv[start : start + tile]
        scores = q @ part.T / 24
        new_top = np.maximum(top, scores.max(-1, keepdims=True))
        p, keep = np.exp(scores - new_top), np.exp(top - new_top)
        total = total * keep + p.sum(-1, keepdims=True)
        out = out * keep + p.astype(np.float32).astype(rounded).astype(np.float64) @ part[:, :512]
        top = new_top
    return out / total


@pytest.mark.parametrize(("kernel", "tile"), [("bf16", 64), ("fp8", 64), ("a8w8", 128), ("a16w8", 16), ("a16w16", 16)])
def test_the_running_maximum_moves_once_per_tile(kernel, tile):
    """The tile of each shipped kernel, seen by running its code: no other one gives the same rounding."""
    kind = KERNELS[kernel]
    call = Call([900], kernel, splits=1)
    (q,), kv = call.read()
    rows = torch.from_numpy(kv).float().view(-1, 1, 1, 576)
    cache = aiter.kernels.Cache(rows, torch.arange(900, dtype=torch.int32), [900], [1], None)
    got, _ = aiter.kernels.attend(
        torch.from_numpy(q).float(),
        cache,
        torch.arange(900),
        1 / 24,
        aiter.kernels.KERNELS[kind.q, kind.kv, kind.persistent],
    )
    rounded = ml_dtypes.float8_e4m3fn if kind.q == torch.float8_e4m3fn else ml_dtypes.bfloat16
    errors = {t: oracle.error(got, _by_tiles(q, kv, t, rounded)) for t in (8, 16, 32, 64, 128, 256)}
    assert errors.pop(tile) < 0.1 * min(errors.values())
