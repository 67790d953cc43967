"""reference.py: quantisers bit for bit, inputs, the official rule, and that the exact gates tell right from wrong."""

import ml_dtypes
import numpy as np
import pytest
import torch

import reference
from reference import (
    PRECISIONS,
    check_exact,
    check_implementation,
    dequantize_mxfp4,
    exact_attention,
    generate_input,
    official_verdict,
    quantize_fp8,
    quantize_mxfp4,
    ref_kernel,
)
from task import BENCHMARKS, TESTS, TestSpec
from tests import oracle
from tests.cases import mxfp4_top_of_range
from tests.conftest import on_portable

# ---- Cases and inputs ----


def test_official_cases():
    assert [(c["batchsize"], c["kvseqlen"]) for c in TESTS] == [(4, 1024), (32, 1024), (64, 8192), (256, 8192)]
    assert [c["seed"] for c in BENCHMARKS] == [4217, 4220, 5412, 5415, 1357, 1360, 9823, 9826]
    assert all(set(c) == set(TestSpec.__annotations__) and c["qseqlen"] == 1 for c in TESTS + BENCHMARKS)


def test_inputs_have_the_task_s_shapes(device):
    q, kv_data, qo_indptr, kv_indptr, config = generate_input(3, 1, 70, 5)
    assert q.shape == (3, 16, 576)
    assert q.dtype == torch.bfloat16
    assert q.device.type == device.type
    assert kv_data["bf16"].shape == (210, 1, 576)
    fp8, scale = kv_data["fp8"]
    assert (fp8.shape, fp8.dtype, scale.shape, scale.dtype) == (
        (210, 1, 576),
        torch.float8_e4m3fn,
        (1,),
        torch.float32,
    )
    codes, scales = kv_data["mxfp4"]
    assert codes.shape == (210, 1, 288)
    assert scales.shape[0] >= 210
    assert scales.shape[1] >= 18
    assert qo_indptr.tolist() == [0, 1, 2, 3]
    assert kv_indptr.tolist() == [0, 70, 140, 210]
    assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
    assert config["sm_scale"] == pytest.approx(1 / 24)
    assert abs(kv_data["bf16"].float().std().item() - 1) < 0.02


def test_inputs_follow_the_seed_alone():
    first, again, other = (generate_input(2, 1, 64, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1]["bf16"], again[1]["bf16"])
    assert not torch.equal(first[1]["bf16"], other[1]["bf16"])


@pytest.mark.parametrize("name", ["batchsize", "qseqlen", "kvseqlen"])
def test_an_empty_case_is_refused(name):
    case = {"batchsize": 1, "qseqlen": 1, "kvseqlen": 1, "seed": 0, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, got 0"):
        generate_input(**case)


def test_progress_is_reported_and_stops_with_the_block():
    seen = []
    with reference.progress_to(lambda what, share: seen.append((what, share))):
        generate_input(1, 1, 16, 0)
    count = len(seen)
    generate_input(1, 1, 16, 0)
    assert ("quantising to mxfp4", 1.0) in seen
    assert len(seen) == count


# ---- fp8 ----


def test_e4m3_cast_agrees_with_ml_dtypes_on_every_bfloat16():
    bits = np.arange(65536, dtype=np.uint16)
    values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    clamped = np.clip(values, -448, 448)
    ours = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).clamp(-448, 448).to(torch.float8_e4m3fn)
    with np.errstate(invalid="ignore"):
        theirs = clamped.astype(ml_dtypes.float8_e4m3fn)
    nan = np.isnan(values)
    assert np.array_equal(ours.view(torch.uint8).numpy()[~nan], theirs.view(np.uint8)[~nan])
    assert torch.isnan(ours.float()).numpy()[nan].all()


@pytest.mark.parametrize("spread", [1.0, 1e-3, 300.0])
def test_fp8_quantiser_runs_in_bfloat16(spread):
    x = (torch.randn(2000, 1, 576, generator=torch.Generator().manual_seed(3)) * spread).bfloat16()
    values, scale = quantize_fp8(x)
    exact = oracle.numpy_of(x).astype(np.float32)
    top = np.abs(exact).max().astype(ml_dtypes.bfloat16)
    expected_scale = (top.astype(np.float32) / np.float32(448)).astype(ml_dtypes.bfloat16).astype(np.float32)
    quotient = (exact / expected_scale).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert scale.item() == expected_scale
    assert np.array_equal(oracle.numpy_of(values.view(torch.uint8)), expected)
    in_float32 = np.clip(exact / expected_scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (in_float32 != expected).mean() > 0.01, "the two arithmetics must differ, else this test shows nothing"


def test_fp8_of_zeros_has_the_smallest_scale():
    values, scale = quantize_fp8(torch.zeros(4, 1, 576, dtype=torch.bfloat16))
    assert not values.float().any()
    assert scale.item() == (torch.tensor(1e-12).bfloat16() / 448).item()


# ---- mxfp4 ----


def _blocks(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(512, 1, 576, generator=generator)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-60, 60, (512, 1, 18), generator=generator).float()).repeat_interleave(32, -1)
    if kind == "tied":
        halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0])
        x = halves[torch.randint(0, 9, x.shape, generator=generator)] * torch.sign(x)
    if kind == "zero":
        x = torch.zeros_like(x)
    return x.bfloat16()


@on_portable
@pytest.mark.parametrize("kind", ["normal", "wide", "tied", "zero"])
def test_mxfp4_agrees_with_torchao(kind):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = _blocks(kind)
    codes, scales = quantize_mxfp4(x)
    their_scales, their_codes = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.EVEN)
    assert torch.equal(scales.view(torch.uint8), their_scales.view(torch.uint8).reshape(512, 18))
    ours, theirs = (_without_negative_zero(c.view(torch.uint8)) for c in (codes, their_codes))
    assert torch.equal(ours, theirs)


def _without_negative_zero(packed: torch.Tensor) -> torch.Tensor:
    low, high = packed & 15, packed >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


@on_portable
@pytest.mark.parametrize("kind", ["normal", "wide", "tied", "zero", "denormal", "huge", "float32"])
def test_mxfp4_agrees_with_the_rule(kind):
    x = _blocks(kind)
    if kind == "denormal":
        x = x.float().mul(2.0**-128).bfloat16()
    if kind == "huge":
        x = x.float().mul(2.0**125).clamp(-3.38e38, 3.38e38).bfloat16()
    if kind == "float32":
        x = torch.randn(512, 1, 576)
    codes, scales = quantize_mxfp4(x)
    nibbles, scale_bytes = oracle.mxfp4_quantise(x.float().numpy().reshape(512, 576))
    packed = oracle.numpy_of(codes.view(torch.uint8)).reshape(512, 288)
    assert np.array_equal(oracle.numpy_of(scales.view(torch.uint8)), scale_bytes)
    assert np.array_equal(np.stack([packed & 15, packed >> 4], -1).reshape(512, 576), nibbles)


def test_mxfp4_at_the_top_of_the_range():
    _, scales = quantize_mxfp4(mxfp4_top_of_range.build())
    assert scales.view(torch.uint8)[0, 0] == mxfp4_top_of_range.SCALE_BYTE


def test_dequantise_reads_both_scale_layouts():
    x = _blocks("wide")
    codes, scales = quantize_mxfp4(x)
    plain = scales.view(torch.uint8)[:512, :18]
    padded = torch.full((768, 24), 255, dtype=torch.uint8, device=plain.device)
    padded[:512, :18] = plain
    expected = oracle.mxfp4_values(
        oracle.numpy_of(codes.view(torch.uint8)).reshape(512, 288), oracle.numpy_of(plain.contiguous())
    )
    for layout in (plain, padded.view(torch.float8_e8m0fnu)):
        got = dequantize_mxfp4(codes, layout, (512, 1, 576), torch.float32)
        assert np.array_equal(got.numpy().reshape(512, 576), expected)


# ---- The official rule ----


@pytest.fixture(scope="module")
def long_case():
    return generate_input(4, 1, 8192, 77)


def test_the_official_rule_is_as_loose_as_it_is(long_case):
    """The faults that facts and README speak of: the official check passes them, the exact one does not."""
    expected = ref_kernel(long_case)
    zeros = torch.zeros_like(expected)
    half = _attention_over(long_case, step=2)
    for wrong in (zeros, half):
        assert official_verdict(wrong, expected).ok
        assert not check_exact(long_case, wrong, "a16w16").ok


def test_nan_counts_as_a_miss_only():
    expected = torch.zeros(100, 16, 512, dtype=torch.bfloat16)
    few, many = expected.clone(), expected.clone()
    few.view(-1)[: int(0.049 * few.numel())] = torch.nan
    many.view(-1)[: int(0.051 * many.numel())] = torch.nan
    assert official_verdict(few, expected).ok
    assert official_verdict(few, expected).mismatch_ratio == pytest.approx(0.049, abs=1e-5)
    assert not official_verdict(many, expected).ok


def test_tolerance_is_a_tenth_absolute_and_relative():
    expected = torch.tensor([0.0, 10.0], dtype=torch.bfloat16)
    assert official_verdict(expected + torch.tensor([0.0996, 1.06]), expected.float()).ok
    assert not official_verdict(expected + torch.tensor([0.11, 0.0]), expected.float()).ok
    assert not official_verdict(expected + torch.tensor([0.0, 1.2]), expected.float()).ok


def test_another_shape_or_dtype_fails_the_official_check():
    data = generate_input(2, 1, 256, 3)
    good = exact_attention(data).bfloat16()
    assert check_implementation(data, good)[0]
    ok, message = check_implementation(data, good[:1])
    assert not ok
    assert "(1, 16, 512), expected (2, 16, 512)" in message
    assert not check_implementation(data, good.float())[0]


@pytest.mark.parametrize("length", [1, 64, 195, 196])
def test_the_reference_has_an_answer_at_any_length(length):
    data = generate_input(3, 1, length, 4)
    assert check_exact(data, ref_kernel(data), "a8w8_tensor").ok


# ---- The exact oracle ----


def _read_as(data, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """q (total_q, 16, 576) and the cache (total_kv, 576) in float64, as that precision reads them."""
    q, kv_data, *_ = data
    queries = oracle.numpy_of(q)
    wanted = PRECISIONS[precision]
    if wanted.q_cast == "unit":
        queries = oracle.numpy_of(q.to(torch.float8_e4m3fn))
    if wanted.q_cast == "tensor":
        values, scale = quantize_fp8(q)
        queries = oracle.numpy_of(values) * scale.item()
    if wanted.cache == "bf16":
        return queries, oracle.numpy_of(kv_data["bf16"])[:, 0]
    if wanted.cache == "fp8":
        return queries, oracle.numpy_of(kv_data["fp8"][0])[:, 0] * kv_data["fp8"][1].item()
    codes, scales = (oracle.numpy_of(t.view(torch.uint8)) for t in kv_data["mxfp4"])
    return queries, oracle.mxfp4_values(codes[:, 0], scales)


@pytest.mark.parametrize("chunk", [7, 64, 8192])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_exact_attention_agrees_with_float64(precision, chunk, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_ROWS", chunk)
    data = generate_input(3, 1, 130, 21)
    queries, cache = _read_as(data, precision)
    got = exact_attention(data, precision)
    for b in range(3):
        expected = oracle.attention(queries[b], cache[b * 130 : (b + 1) * 130], data[4]["sm_scale"])
        assert oracle.error(got[b], expected) < 1e-5


def test_exact_attention_takes_ragged_and_empty_sequences():
    q, kv_data, qo_indptr, _, config = generate_input(4, 1, 100, 8)
    bounds = [0, 1, 1, 250, 400]
    ragged = (q, kv_data, qo_indptr, torch.tensor(bounds, dtype=torch.int32, device=q.device), config)
    got = exact_attention(ragged)
    assert not got[1].any()
    for b in (0, 2, 3):
        cache = oracle.numpy_of(kv_data["bf16"])[bounds[b] : bounds[b + 1], 0]
        assert oracle.error(got[b], oracle.attention(oracle.numpy_of(q[b]), cache, config["sm_scale"])) < 1e-5


def test_unknown_precision_and_shape_are_refused():
    data = generate_input(1, 1, 16, 0)
    with pytest.raises(ValueError, match="unknown precision 'a4w4', expected one of a16w16"):
        exact_attention(data, "a4w4")
    with pytest.raises(ValueError, match=r"output must be \(1, 16, 512\), got \(2, 16, 512\)"):
        check_exact(data, torch.zeros(2, 16, 512), "a16w16")


# ---- The gates ----


@pytest.fixture(scope="module")
def case():
    return generate_input(4, 1, 1024, 5)


def _attention_over(data, *, step: int = 1, drop: slice | None = None) -> torch.Tensor:
    """bfloat16 attention over every `step`-th token, or over all but `drop`, of each sequence's bf16 cache."""
    q, kv_data, *_, config = data
    kv = kv_data["bf16"].float().view(config["batch_size"], config["kv_seq_len"], 576)
    scores = q.float() @ kv.transpose(1, 2) * config["sm_scale"]
    if drop is not None:
        scores[..., drop] = -torch.inf
    return (torch.softmax(scores[..., ::step], -1) @ kv[:, ::step, :512]).bfloat16()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_right_answer_passes_and_its_format_is_found(case, precision):
    output = exact_attention(case, precision).bfloat16()
    verdict = check_exact(case, output, precision)
    assert verdict.ok, verdict.message
    assert check_exact(case, output).precision == precision


def test_the_official_reference_is_itself_exact(case):
    verdict = check_exact(case, ref_kernel(case))
    assert verdict.ok
    assert verdict.precision == "a8w8_tensor"


@pytest.mark.parametrize("count", [1, 4, 64])
def test_dropped_tokens_show(long_case, count):
    right, wrong = _attention_over(long_case), _attention_over(long_case, drop=slice(-count, None))
    assert check_exact(long_case, right, "a16w16").ok
    assert not check_exact(long_case, wrong, "a16w16").ok


WRONG = {
    "zeros": lambda right: torch.zeros_like(right),
    "another sequence's": lambda right: right.roll(1, 0),
    "another head's": lambda right: right.roll(1, 1),
    "values shifted a column": lambda right: right.roll(1, 2),
    "scale forgotten": lambda right: right * 100,
    "negated": lambda right: -right,
    "one sequence NaN": lambda right: torch.cat([right[:-1], torch.full_like(right[-1:], torch.nan)]),
    "one element infinite": lambda right: right.index_put((torch.tensor(0),) * 3, torch.tensor(torch.inf).to(right)),
}


@pytest.mark.parametrize("precision", [None, "a16w16", "a8w8"])
@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_fail_both_gates(case, mistake, precision):
    output = WRONG[mistake](exact_attention(case).bfloat16())
    verdict = check_exact(case, output, precision)
    assert not verdict.ok
    assert "gate A" in verdict.message
    assert "gate B" in verdict.message


def test_the_worst_sequence_is_named(case):
    output = exact_attention(case).bfloat16()
    output[2] = output[1]
    assert check_exact(case, output, "a16w16").worst_sequence == 2


def test_gate_b_tells_a_coarser_cache_from_the_one_named(case):
    verdict = check_exact(case, exact_attention(case, "a16w4").bfloat16(), "a16w8")
    assert not verdict.ok
    assert verdict.format_error > PRECISIONS["a16w8"].format_budget


def test_gate_b_can_be_left_out():
    data = generate_input(2, 1, 64, 9)
    data = (data[0] * 40, *data[1:])
    output = exact_attention(data, "a16w8").bfloat16()
    assert check_exact(data, output, "a16w8", standard_normal=False).ok
    assert check_exact(data, output, "a16w8", standard_normal=False).format_error is None
