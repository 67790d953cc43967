"""What is right: the task's inputs, the official check, and the exact one.

The first half has the official names and rules (gpu-mode/reference-kernels, amd-mixed-mla), so that the official
eval.py runs with this file; the inputs for a seed are the server's. The second half is ours: attention over every token
in float32, and two gates that an output must pass. It does not know how a submission works.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from portable import choose_aiter

choose_aiter()

from aiter import dtypes as aiter_dtypes  # noqa: E402 (the choice above comes first)
from aiter import get_mla_metadata_info_v1, get_mla_metadata_v1  # noqa: E402
from aiter.mla import mla_decode_fwd  # noqa: E402
from aiter.utility.fp4_utils import dynamic_mxfp4_quant, e8m0_to_f32, mxfp4_to_f32  # noqa: E402

from task import input_t, output_t  # noqa: E402

NUM_HEADS = 16
NUM_KV_HEADS = 1
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_HEAD_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
V_HEAD_DIM = KV_LORA_RANK
SM_SCALE = QK_HEAD_DIM**-0.5

OFFICIAL_TOLERANCE = 0.1  # both absolute and relative
OFFICIAL_MISSES = 0.05  # the share of elements that may lie outside it
REFERENCE_SPLITS = 32
_TOKENS_PER_SPLIT = 196  # get_mla_metadata_v1 makes len // 196 splits at the most

FP8 = aiter_dtypes.fp8
_FP8_MAX = torch.finfo(FP8).max
_MXFP4_BLOCK = 32
_CHUNK_ROWS = 8192  # cache rows handled at a time: 19 MB of float32

_listener: Callable[[str, float], None] | None = None


@contextlib.contextmanager
def progress_to(listener: Callable[[str, float], None]) -> Iterator[None]:
    """Within the block, long steps report (what is being done, share done so far) to `listener`."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def _steps(what: str, total: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover 0 … total, reporting progress."""
    for start in range(0, total, size):
        _report(what, start / total)
        yield slice(start, min(start + size, total))
    _report(what, 1.0)


def _report(what: str, share: float) -> None:
    if _listener:
        _listener(what, share)


def default_device() -> torch.device:
    """The GPU if torch sees one (CUDA or ROCm), else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- The official half: quantisers, inputs, reference, check ----


def quantize_fp8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to fp8 with one scale, in the tensor's own arithmetic (bfloat16 on the server).

    Returns the values in aiter's fp8, same shape, and the scale as (1,) float32; value × scale restores.
    scale = max(|x|, 1e-12).max() / 448, values are x / scale clamped to ±448.
    """
    flat = tensor.reshape(-1, tensor.shape[-1])
    low, high = torch.aminmax(flat)
    scale = torch.maximum(-low, high).clamp(min=1e-12) / _FP8_MAX
    values = torch.empty(flat.shape, dtype=FP8, device=flat.device)
    for rows in _steps("quantising to fp8", flat.shape[0], _CHUNK_ROWS):
        values[rows] = (flat[rows] / scale).clamp(-_FP8_MAX, _FP8_MAX).to(FP8)
    return values.view(tensor.shape), scale.to(torch.float32).reshape(1)


def quantize_mxfp4(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise (B, M, N), N a multiple of 32, to mxfp4 with aiter's quantiser.

    Returns (B, M, N / 2) fp4x2 (low nibble = even index) and the E8M0 scales, one per block of 32: (B × M, N / 32),
    or padded in both dimensions where aiter's version does so.
    """
    rows = tensor.flatten(0, 1)
    # Whole multiples of 256 rows, so that an aiter that pads the scales' rows pads the last part only.
    parts = [dynamic_mxfp4_quant(rows[part]) for part in _steps("quantising to mxfp4", rows.shape[0], 16 * _CHUNK_ROWS)]
    codes, scales = (torch.cat([t.view(torch.uint8) for t in ts]) for ts in zip(*parts, strict=True))
    return codes.view(aiter_dtypes.fp4x2).view(*tensor.shape[:2], -1), scales.view(aiter_dtypes.fp8_e8m0)


def dequantize_mxfp4(
    fp4_data: torch.Tensor,
    scale_e8m0: torch.Tensor,
    orig_shape: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Undo quantize_mxfp4: codes (B, M, N / 2) and their scales, padded or not, to `orig_shape` (B, M, N)."""
    rows, blocks = orig_shape[0] * orig_shape[1], orig_shape[2] // _MXFP4_BLOCK
    values = mxfp4_to_f32(fp4_data.reshape(rows, -1)).unflatten(1, (blocks, _MXFP4_BLOCK))
    return (values * e8m0_to_f32(scale_e8m0[:rows, :blocks])[..., None]).view(orig_shape).to(dtype)


def generate_input(
    batchsize: int, qseqlen: int, kvseqlen: int, seed: int, device: torch.device | str | None = None
) -> input_t:
    """Draw one case: (q, kv_data, qo_indptr, kv_indptr, config), standard normal, the same for a seed on one kind of
    device.

    q (batchsize × qseqlen, 16, 576) bfloat16; kv_data: "bf16" (total_kv, 1, 576), "fp8" (same shape, scale (1,)
    float32), "mxfp4" ((total_kv, 1, 288) fp4x2, scales (rows, blocks) fp8_e8m0), with total_kv = batchsize × kvseqlen;
    the indptrs (batchsize + 1,) int32, uniform; config the constants of the task. On `device`, by default
    `default_device()`.
    """
    for name, value in {"batchsize": batchsize, "qseqlen": qseqlen, "kvseqlen": kvseqlen}.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    device = torch.device(device) if device is not None else default_device()
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn((rows, heads, QK_HEAD_DIM), dtype=torch.bfloat16, device=device, generator=generator)

    _report("drawing q and the cache", 0.0)
    q = normal(batchsize * qseqlen, NUM_HEADS)
    return pack_input(q, normal(batchsize * kvseqlen, NUM_KV_HEADS), batchsize)


def pack_input(q: torch.Tensor, kv: torch.Tensor, batchsize: int) -> input_t:
    """The task's input for given values: q (total_q, 16, 576) and cache (total_kv, 1, 576), both bfloat16.

    Quantises the cache to fp8 and mxfp4; the lengths are uniform, total_q / batchsize and total_kv / batchsize.
    """
    q_len, kv_len = q.shape[0] // batchsize, kv.shape[0] // batchsize
    boundaries = torch.arange(batchsize + 1, dtype=torch.int32, device=q.device)
    kv_data = {"bf16": kv, "fp8": quantize_fp8(kv), "mxfp4": quantize_mxfp4(kv)}
    config = {
        "batch_size": batchsize,
        "num_heads": NUM_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "qk_head_dim": QK_HEAD_DIM,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "q_seq_len": q_len,
        "kv_seq_len": kv_len,
        "sm_scale": SM_SCALE,
    }
    return q, kv_data, boundaries * q_len, boundaries * kv_len, config


def ref_kernel(data: input_t) -> output_t:
    """The official reference: aiter's a8w8 persistent kernel, q quantised per tensor. (total_q, 16, 512) bfloat16.

    Below 196 tokens, where get_mla_metadata_v1 divides by zero and the official one has no answer, the non-persistent
    a8w8 kernel in one split takes its place.
    """
    q, kv_data, qo_indptr, kv_indptr, config = data
    q_fp8, q_scale = quantize_fp8(q)
    kv, kv_scale = kv_data["fp8"]
    lengths = (kv_indptr[1:] - kv_indptr[:-1]).to(torch.int32)
    output = torch.empty((q.shape[0], NUM_HEADS, V_HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    if config["kv_seq_len"] >= _TOKENS_PER_SPLIT:
        splits = _reference_work(data, q_fp8.dtype, lengths)
    else:
        splits = {"num_kv_splits": 1, "num_kv_splits_indptr": qo_indptr}
    _report("running the official reference", 0.0)
    mla_decode_fwd(
        q_fp8, kv.view(-1, 1, NUM_KV_HEADS, QK_HEAD_DIM), output, qo_indptr, kv_indptr,
        torch.arange(kv.shape[0], dtype=torch.int32, device=q.device), lengths, config["q_seq_len"],
        page_size=1, nhead_kv=NUM_KV_HEADS, sm_scale=SM_SCALE, q_scale=q_scale, kv_scale=kv_scale, **splits,
    )  # fmt: skip
    return output


def _reference_work(data: input_t, q_dtype: torch.dtype, lengths: torch.Tensor) -> dict[str, torch.Tensor | int | bool]:
    """What makes the reference's call persistent: work lists for 32 splits at the most."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    q_len, kv_dtype = config["q_seq_len"], kv_data["fp8"][0].dtype
    info = get_mla_metadata_info_v1(
        config["batch_size"], q_len, NUM_HEADS, q_dtype, kv_dtype,
        is_sparse=False, fast_mode=False, num_kv_splits=REFERENCE_SPLITS, intra_batch_mode=True,
    )  # fmt: skip
    meta, work_indptr, work_info, *reduce = (torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in info)
    get_mla_metadata_v1(
        qo_indptr, kv_indptr, lengths, NUM_HEADS // NUM_KV_HEADS, NUM_KV_HEADS, True, meta, work_info, work_indptr,
        *reduce, page_size=1, kv_granularity=16, max_seqlen_qo=q_len, uni_seqlen_qo=q_len, fast_mode=False,
        max_split_per_batch=REFERENCE_SPLITS, intra_batch_mode=True, dtype_q=q_dtype, dtype_kv=kv_dtype,
    )  # fmt: skip
    return {
        "num_kv_splits": REFERENCE_SPLITS,
        "work_meta_data": meta,
        "work_indptr": work_indptr,
        "work_info_set": work_info,
        "reduce_indptr": reduce[0],
        "reduce_final_map": reduce[1],
        "reduce_partial_map": reduce[2],
        "intra_batch_mode": True,
    }


@dataclass(frozen=True)
class OfficialVerdict:
    """What the leaderboard would say: `ok`, the share of elements out of tolerance, and a sentence."""

    ok: bool
    mismatch_ratio: float
    message: str


def official_verdict(output: output_t, expected: output_t) -> OfficialVerdict:
    """Apply the official rule: |output − expected| ≤ 0.1 + 0.1·|expected|, for at least 95 % of the elements."""
    if output.shape != expected.shape:
        return OfficialVerdict(False, 1.0, f"shape is {tuple(output.shape)}, expected {tuple(expected.shape)}")
    if output.dtype != expected.dtype:
        return OfficialVerdict(False, 1.0, f"dtype is {output.dtype}, expected {expected.dtype}")
    close = torch.isclose(output, expected, rtol=OFFICIAL_TOLERANCE, atol=OFFICIAL_TOLERANCE)
    ratio = (~close).sum().item() / close.numel()
    if ratio == 0.0:
        worst = (output.float() - expected.float()).abs().max().item()
        return OfficialVerdict(True, 0.0, f"largest error {worst:.4g}")
    message = f"mismatch_ratio={ratio:.6f} is out of tolerance, {OFFICIAL_MISSES:.0%} may be"
    return OfficialVerdict(ratio <= OFFICIAL_MISSES, ratio, message)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """The official check of `output` against ref_kernel(data): (passed, message). See official_verdict for the rule."""
    verdict = official_verdict(output, ref_kernel(data))
    return verdict.ok, verdict.message


# ---- The exact half: attention over every token, and two gates ----


@dataclass(frozen=True)
class Precision:
    """A way to read the inputs, and how far an exact kernel that reads them so may be off (relative L2 per sequence).

    cache: the kv_data entry that is read. q_cast: how q is rounded, "none", "unit" (fp8 with scale 1) or "tensor" (fp8
    with one scale for the tensor). kernel_budget: gate A. format_budget: gate B. The budgets come from simulation over
    lengths 1 … 8192 (worst seen, A: 0.0023, and 0.024 with fp8 probabilities; B: 0.002, 0.042, 0.058, 0.174, all at
    17 … 300 tokens).
    """

    cache: str
    q_cast: str
    kernel_budget: float
    format_budget: float


PRECISIONS = {
    "a16w16": Precision("bf16", "none", 0.004, 0.005),
    "a16w8": Precision("fp8", "none", 0.004, 0.045),
    "a8w8": Precision("fp8", "unit", 0.03, 0.065),
    "a8w8_tensor": Precision("fp8", "tensor", 0.03, 0.065),
    "a16w4": Precision("mxfp4", "none", 0.004, 0.20),
}


def cast_q(q: torch.Tensor, q_cast: str) -> torch.Tensor:
    """q as a plan with that `Precision.q_cast` sees it, in float32."""
    if q_cast == "none":
        return q.float()
    if q_cast == "unit":
        return q.to(FP8).float()
    values, scale = quantize_fp8(q)
    return values.float() * scale


def dequantize_rows(kv_data: dict, cache: str, rows: slice) -> torch.Tensor:
    """Cache rows in float32, (n, 576), from the format named `cache` ("bf16", "fp8" or "mxfp4")."""
    if cache == "bf16":
        return kv_data["bf16"][rows, 0].float()
    if cache == "fp8":
        values, scale = kv_data["fp8"]
        return values[rows, 0].float() * scale
    codes, scales = kv_data["mxfp4"]
    part = codes.view(torch.uint8)[rows]
    return dequantize_mxfp4(part, scales.view(torch.uint8)[rows], (part.shape[0], 1, QK_HEAD_DIM), torch.float32)[:, 0]


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Keep TensorFloat-32 out of float32 products, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def exact_attention(data: input_t, precision: str = "a16w16") -> torch.Tensor:
    """Attention over every token in float32: (total_q, 16, 512) float32.

    `precision` names the cache format and the rounding of q (PRECISIONS); all arithmetic after that is float32. Lengths
    come from kv_indptr and may be ragged; a sequence without tokens gives zeros. Extra memory: the scores of one
    sequence and _CHUNK_ROWS rows of cache, besides the output.

    Raises ValueError for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}, expected one of {', '.join(PRECISIONS)}")
    q, kv_data, qo_indptr, kv_indptr, config = data
    wanted = PRECISIONS[precision]
    queries = cast_q(q, wanted.q_cast)
    output = torch.zeros((q.shape[0], NUM_HEADS, V_HEAD_DIM), dtype=torch.float32, device=q.device)
    q_bounds, kv_bounds = qo_indptr.tolist(), kv_indptr.tolist()
    with _full_float32():
        for part in _steps(f"exact attention, {precision}", len(kv_bounds) - 1, 1):
            b = part.start
            mine = slice(q_bounds[b], q_bounds[b + 1])
            if kv_bounds[b + 1] > kv_bounds[b]:
                keys = slice(kv_bounds[b], kv_bounds[b + 1])
                output[mine] = _attend(queries[mine], kv_data, wanted.cache, keys, config["sm_scale"])
    return output


def _attend(q: torch.Tensor, kv_data: dict, cache: str, keys: slice, sm_scale: float) -> torch.Tensor:
    """(n, 16, 512): softmax over one sequence's scores, taken whole, then the value product; the cache a chunk at a
    time."""
    chunks = [slice(i, min(i + _CHUNK_ROWS, keys.stop)) for i in range(keys.start, keys.stop, _CHUNK_ROWS)]
    only = dequantize_rows(kv_data, cache, chunks[0]) if len(chunks) == 1 else None

    def rows(chunk: slice) -> torch.Tensor:
        return only if only is not None else dequantize_rows(kv_data, cache, chunk)

    scores = torch.cat([q @ rows(chunk).T for chunk in chunks], dim=-1).mul_(sm_scale)
    weights = torch.softmax(scores, dim=-1).split([chunk.stop - chunk.start for chunk in chunks], dim=-1)
    return sum(w @ rows(chunk)[:, :V_HEAD_DIM] for w, chunk in zip(weights, chunks, strict=True))


@dataclass(frozen=True)
class ExactVerdict:
    """What the gates say of an output.

    precision: the format it was judged as. kernel_error: gate A, the worst sequence's relative L2 against attention
    over what is read. format_error: gate B, the same against the bfloat16 cache and q, None where gate B does not
    apply. cosine: the smallest cosine of a sequence with the bfloat16 answer. worst_sequence: the one gate A speaks of.
    """

    ok: bool
    precision: str
    kernel_error: float
    format_error: float | None
    cosine: float
    worst_sequence: int
    message: str


def check_exact(
    data: input_t, output: output_t, precision: str | None = None, *, standard_normal: bool = True
) -> ExactVerdict:
    """Hold `output` (total_q, 16, 512) to both gates, a sequence at a time.

    precision: one of PRECISIONS; None compares with each and takes the first that passes gate A (else the nearest).
    standard_normal: whether the inputs are standard normal, as generate_input's are; gate B's budgets hold only for
    those, so False leaves it out.

    Raises ValueError for an unknown precision or an output of another shape.
    """
    expected_shape = (data[0].shape[0], NUM_HEADS, V_HEAD_DIM)
    if output.shape != expected_shape:
        raise ValueError(f"output must be {expected_shape}, got {tuple(output.shape)}")
    truth = exact_attention(data, "a16w16")
    candidates = [precision] if precision else list(PRECISIONS)
    judged = []
    for name in candidates:
        read = truth if name == "a16w16" else exact_attention(data, name)
        judged.append((name, relative_l2(output, read)))
        if judged[-1][1].max() <= PRECISIONS[name].kernel_budget:
            break
    name, errors = min(judged, key=lambda item: worst_of(item[1]) / PRECISIONS[item[0]].kernel_budget)
    kernel_error = worst_of(errors)
    format_error = worst_of(relative_l2(output, truth)) if standard_normal else None
    budgets = PRECISIONS[name]
    failures = []
    if not kernel_error <= budgets.kernel_budget:
        read = f"all that {name} reads" + ("" if precision else ", the nearest format")
        failures.append(f"gate A: off by {kernel_error:.4g} from attention over {read}, budget {budgets.kernel_budget}")
    if format_error is not None and not format_error <= budgets.format_budget:
        failures.append(f"gate B: off by {format_error:.4g} from the bf16 cache, budget {budgets.format_budget}")
    cosine = torch.nn.functional.cosine_similarity(output.float().flatten(1), truth.flatten(1)).nan_to_num(-1.0).min()
    return ExactVerdict(
        ok=not failures,
        precision=name,
        kernel_error=kernel_error,
        format_error=format_error,
        cosine=cosine.item(),
        worst_sequence=int(errors.nan_to_num(torch.inf).argmax()),
        message="; ".join(failures) or f"exact as {name}",
    )


def relative_l2(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """‖output − expected‖ / ‖expected‖ per sequence: (total_q,) float32; 0 where both are zero, infinite where only the
    latter is."""
    distance = torch.linalg.vector_norm((output.float() - expected.float()).flatten(1), dim=1)
    norm = torch.linalg.vector_norm(expected.float().flatten(1), dim=1)
    return torch.where(distance == 0, 0.0, distance / norm)


def worst_of(errors: torch.Tensor) -> float:
    """The largest error, infinite when any is NaN."""
    return errors.nan_to_num(torch.inf, posinf=torch.inf).max().item()
