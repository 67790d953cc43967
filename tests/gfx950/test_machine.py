"""gfx950/: what Triton compiles for an MI355X, run an instruction at a time, against torch; and mutants to find out.

Every kernel of gfx950_kernels.py is compiled for gfx950 and run on fresh random data. Unless a test is about a fault,
the run has to be free of findings.
"""

import io
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import reference

NEEDS = "needs the gfx950 extra: pip install -e '.[gfx950]'"
triton = pytest.importorskip("triton", reason=NEEDS)
gfx950 = pytest.importorskip("gfx950", reason=NEEDS)

from tests.gfx950 import kernels  # noqa: E402 (after the skips)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ORDERS = [None, "reversed", "shuffled"]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(seed))


def _integers(low: int, high: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator(seed))


def _run(kernel, grid, args: tuple, **options):
    """Run a kernel that is right, and say so."""
    result = gfx950.run(kernel, grid, args, **options)
    assert result.ok, "\n".join(map(str, result.findings))
    return result


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(INTEGER_OF_SIZE[x.element_size()])


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor, source: torch.Tensor) -> None:
    """Bit for bit, but for which NaN a NaN is."""
    wrong = (_bits(ours) != _bits(theirs)) & ~(torch.isnan(ours.float()) & torch.isnan(theirs.float()))
    examples = [f"{source[i].item()!r} → {ours[i].item()!r}, not {theirs[i].item()!r}" for i in wrong.nonzero()[:5, 0]]
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}: {'; '.join(examples)}"


# ---- Products ----


def _assert_product(ours: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """ours = a @ b up to float32 sums in any order: each of the K additions rounds by 2⁻²⁴ of at most Σ|a||b|."""
    a, b = a.double(), b.double()
    bound = (a.shape[1] + 1) * 2.0**-24 * (a.abs() @ b.abs())
    error = (ours.double() - a @ b).abs()
    assert (error <= bound).all(), f"worst error {(error / bound).nan_to_num(math.inf).max():.3g} of the bound"


def _codes(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    """fp8: all finite codes alike. Others: normal, but for every eighth, which is often subnormal in f16."""
    if dtype.itemsize > 1:
        x = _random(*shape, seed=seed)
        return torch.where(_integers(0, 8, *shape, seed=seed + 1) > 0, x, x * 2.0**-14).to(dtype)
    x = _integers(0, 256, *shape, seed=seed).to(torch.uint8).view(dtype)
    return torch.where(torch.isfinite(x.float()), x.float(), 1.0).to(dtype)


@dataclass(frozen=True)
class Product:
    """c (m, n) = a (m, k) @ b (k, n) in steps of `step`; `transposed` names the operands that lie so in memory."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    step: int
    transposed: str = ""
    num_warps: int = 4
    num_stages: int = 2

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}-{self.m}x{self.n}x{self.k}by{self.step}{self.transposed}-w{self.num_warps}s{self.num_stages}"


PRODUCTS = [
    Product(BF16, 16, 64, 32, 32),
    Product(BF16, 16, 64, 512, 32, "b"),
    Product(BF16, 64, 64, 64, 64, "a"),
    Product(BF16, 64, 64, 256, 64, "ab"),
    Product(BF16, 32, 128, 512, 128, "", 8),
    Product(BF16, 32, 128, 128, 128, "ab", 8),
    Product(F16, 16, 64, 64, 32, "a"),
    Product(F16, 64, 64, 256, 64, ""),
    Product(F16, 32, 128, 256, 128, "b", 8),
    Product(E4M3, 16, 64, 64, 32, "b"),
    Product(E4M3, 64, 64, 128, 64, ""),
    Product(E4M3, 32, 128, 512, 128, "a", 8),
    Product(E4M3, 16, 64, 512, 128, "ab"),
    Product(E5M2, 16, 64, 64, 32, ""),
    Product(E5M2, 64, 64, 128, 128, "b", 8),
    Product(F32, 16, 64, 64, 32, "b"),
    Product(F32, 64, 64, 32, 32, ""),
]
STAGED = [
    Product(BF16, 32, 64, 256, 64, num_stages=2),
    Product(BF16, 32, 64, 256, 64, "b", num_stages=3),
    Product(E4M3, 32, 64, 512, 128, "b", num_stages=2),
    Product(E4M3, 32, 64, 512, 128, num_stages=3),
]


def _product_arguments(case: Product) -> tuple[tuple, dict]:
    a, b = _codes(case.dtype, case.m, case.k, seed=1), _codes(case.dtype, case.k, case.n, seed=3)
    a_memory = a.T.contiguous() if "a" in case.transposed else a
    b_memory = b.T.contiguous() if "b" in case.transposed else b
    args = (a_memory, b_memory, torch.empty(case.m, case.n), case.k)
    constexprs = {"M": case.m, "N": case.n, "K": case.step}
    constexprs |= {"A_T": "a" in case.transposed, "B_T": "b" in case.transposed}
    options = {"constexprs": constexprs, "num_warps": case.num_warps, "num_stages": case.num_stages}
    return args, options


def _assert_product_of(case: Product, args: tuple) -> None:
    a, b, c, _ = args
    _assert_product(c, a.T if "a" in case.transposed else a, b.T if "b" in case.transposed else b)


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products(case):
    args, options = _product_arguments(case)
    result = _run(kernels.product, (1,), args, **options)
    _assert_product_of(case, args)
    assert sum(result.counters.mfma.values()) > 0


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("case", STAGED, ids=str)
def test_loops_that_load_through_lds(case, direct):
    """TRITON_HIP_USE_ASYNC_COPY has Triton load to LDS directly; 3.9 does so on gfx950 unless told otherwise."""
    args, options = _product_arguments(case)
    with triton.knobs.amd.scope():
        triton.knobs.amd.use_async_copy = direct
        code = gfx950.compile(kernels.product, args, **options)
    assert any(line.rstrip().endswith(" lds") or "load_lds" in line for line in code.assembly.splitlines()) == direct
    result = _run(code, (1,), args)
    _assert_product_of(case, args)
    a, b = (result.counters.buffers[i] for i in (0, 1))
    assert (a.distinct_bytes_read, b.distinct_bytes_read) == tuple(x.numel() * x.element_size() for x in args[:2])


@pytest.mark.parametrize("num_warps", [4, 8])
def test_a_product_of_a_product(num_warps):
    q, k = _codes(BF16, 16, 128, seed=5), _codes(BF16, 32, 128, seed=7)
    c = torch.empty(16, 128)
    _run(kernels.chained_products, (1,), (q, k, c), constexprs={"M": 16, "N": 32, "D": 128}, num_warps=num_warps)
    q, k = q.double(), k.double()
    scores = q @ k.T
    # bf16 rounds a score by 2⁻⁸ of itself at most, and the float32 sums differ by far less.
    bound = (2.0**-8 * scores.abs() + 2.0**-16 * (q.abs() @ k.T.abs())) @ k.abs()
    assert ((c - scores @ k).abs() <= bound).all()


@dataclass(frozen=True)
class ScaledProduct:
    """As Product, steps of `step`, with an E8M0 scale of 2^±spread for every 32 of k; bf16 goes without."""

    a: str
    b: str
    m: int
    n: int
    k: int
    step: int
    b_transposed: bool = True
    num_warps: int = 4
    spread: int = 3

    def __str__(self) -> str:
        transposed = "t" if self.b_transposed else ""
        sizes = f"{self.m}x{self.n}x{self.k}by{self.step}{transposed}"
        return f"{self.a}-{self.b}-{sizes}-w{self.num_warps}-2^{self.spread}"


SCALED_PRODUCTS = [
    ScaledProduct("e4m3", "e2m1", 16, 64, 128, 128),
    ScaledProduct("e4m3", "e2m1", 16, 64, 512, 128, spread=38),
    ScaledProduct("e4m3", "e2m1", 32, 128, 512, 256, num_warps=8),
    ScaledProduct("e4m3", "e2m1", 64, 64, 64, 64, b_transposed=False),
    ScaledProduct("e4m3", "e2m1", 16, 64, 256, 128, b_transposed=False, num_warps=8),
    ScaledProduct("e5m2", "e2m1", 16, 64, 128, 128),
    ScaledProduct("bf16", "e2m1", 16, 64, 64, 64),
    ScaledProduct("bf16", "e2m1", 16, 64, 512, 128, spread=38),
    ScaledProduct("bf16", "e2m1", 32, 128, 256, 128, b_transposed=False, num_warps=8),
    ScaledProduct("e2m1", "e2m1", 16, 64, 128, 128),
    ScaledProduct("e2m1", "e2m1", 32, 128, 512, 128, num_warps=8),
    ScaledProduct("e2m1", "e2m1", 64, 64, 256, 256, b_transposed=False),
    ScaledProduct("e2m1", "e4m3", 32, 64, 256, 128),
    ScaledProduct("e4m3", "e4m3", 32, 64, 128, 64, b_transposed=False),
]
TORCH_FORMAT = {"e4m3": E4M3, "e5m2": E5M2, "bf16": BF16}


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes, two a byte along the last dimension, the low half first."""
    return E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


def _scaled_operand(name: str, rows: int, k: int, spread: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(codes (rows, k), or (rows, k / 2) in e2m1), E8M0 scales (rows, k / 32), and the values they stand for."""
    scales = _integers(127 - spread, 128 + spread, rows, k // 32, seed=seed).to(torch.uint8)
    if name == "e2m1":
        codes = _integers(0, 256, rows, k // 2, seed=seed + 1).to(torch.uint8)
        values = _unpacked(codes)
    else:
        codes = _codes(TORCH_FORMAT[name], rows, k, seed=seed + 1)
        values = codes.float()
    if name != "bf16":
        values = values * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    return codes, scales, values


@pytest.mark.parametrize("case", SCALED_PRODUCTS, ids=str)
def test_scaled_products(case):
    a, a_scales, a_values = _scaled_operand(case.a, case.m, case.k, case.spread, seed=11)
    b, b_scales, b_values = _scaled_operand(case.b, case.n, case.k, case.spread, seed=13)
    c = torch.empty(case.m, case.n)
    constexprs = {"M": case.m, "N": case.n, "K": case.step, "STEPS": case.k // case.step}
    constexprs |= {"A_FORMAT": case.a, "B_FORMAT": case.b, "B_T": case.b_transposed}
    args = (a, a_scales, b if case.b_transposed else b.T.contiguous(), b_scales, c)
    result = _run(kernels.scaled_product, (1,), args, constexprs=constexprs, num_warps=case.num_warps)
    _assert_product(c, a_values, b_values.T)
    assert any("mfma_scale" in name for name in result.counters.mfma) == (case.a != "bf16")


def test_a_scaled_product_of_codes_packed_along_n():
    m, n, k = 32, 64, 128
    a, a_scales, a_values = _scaled_operand("e4m3", m, k, 3, seed=17)
    b = _integers(0, 256, k, n // 2, seed=18).to(torch.uint8)
    b_scales = _integers(124, 131, n, k // 32, seed=19).to(torch.uint8)
    c = torch.empty(m, n)
    args = (a, a_scales, b, b_scales, c)
    _run(kernels.scaled_product_packed_along_n, (1,), args, constexprs={"M": m, "N": n, "K": k})
    _assert_product(c, a_values, _unpacked(b) * torch.exp2(b_scales.float() - 127).T.repeat_interleave(32, 0))


@pytest.mark.parametrize("a_format", ["bf16", "e4m3"])
def test_every_e2m1_code_under_nearly_every_scale(a_format):
    """The identity times b. Scales run over 2^(±123): beyond, a product with 0.5 or 6 leaves float32's normal range."""
    k, scales = 128, torch.arange(4, 251, dtype=torch.uint8)
    n = 256
    b = _integers(0, 256, n, k // 2, seed=23).to(torch.uint8)
    b_scales = scales[_integers(0, len(scales), n, k // 32, seed=24)]
    b_scales.view(-1)[: len(scales)] = scales
    a, a_scales = torch.eye(k).to(TORCH_FORMAT[a_format]), torch.full((k, k // 32), 127, dtype=torch.uint8)
    c = torch.empty(k, n)
    constexprs = {"M": k, "N": n, "K": k, "A_FORMAT": a_format, "B_FORMAT": "e2m1", "B_T": True, "STEPS": 1}
    _run(kernels.scaled_product, (1,), (a, a_scales, b, b_scales, c), constexprs=constexprs, num_warps=8)
    assert torch.equal(c, (_unpacked(b) * torch.exp2(b_scales.float() - 127).repeat_interleave(32, 1)).T)


# ---- Casts ----


def _all_codes(dtype: torch.dtype) -> torch.Tensor:
    """All values of an 8- or 16-bit format, NaN too; in float32 ties among the smaller formats, and much else."""
    if dtype.itemsize < 4:
        bits = torch.arange(256**dtype.itemsize) - (2**15 if dtype.itemsize == 2 else 0)
        return bits.to(INTEGER_OF_SIZE[dtype.itemsize]).view(dtype)
    halves = [_all_codes(small).float() for small in (E4M3, E5M2, F16, BF16)]
    finite = [x[torch.isfinite(x)].sort().values for x in halves]
    middle = torch.cat([(x[1:] + x[:-1]) / 2 for x in finite])
    middle = middle[torch.randperm(len(middle), generator=_generator(29))[:12288]]
    bits = middle.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    anything = _integers(-(2**31), 2**31, 28672 - 2, seed=30).to(torch.int32)
    special = torch.tensor([0.0, -0.0]).view(torch.int32)
    return torch.cat([bits.flatten(), anything, special]).view(F32)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To nearest, ties to even; to fp8 the largest stands for what is larger, as Triton's saturating mode has it."""
    if dtype.itemsize == 1:
        x = x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


FLOATS = [F32, F16, BF16, E4M3, E5M2]
CASTS = [(x, y) for x in FLOATS for y in FLOATS if x != y and max(x.itemsize, y.itemsize) > 1]


@pytest.mark.parametrize(("source", "target"), CASTS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_casts(source, target):
    x = _all_codes(source)
    if target.itemsize == 1:
        x = x[~torch.isinf(x.float())]  # what they become hangs on a mode that Triton versions set differently
    x = torch.cat([x, torch.zeros(-len(x) % 256, dtype=source)])
    block = 4096 if len(x) % 4096 == 0 else 256
    y = torch.empty(len(x), dtype=target)
    _run(kernels.cast, (len(x) // block,), (x, y), constexprs={"BLOCK": block})
    _assert_same(y, _cast(x, target), x)


@pytest.mark.parametrize("scale", [1.0, 0.125, 1024.0])
def test_casts_to_fp4(scale):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = (ties.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)).view(F32).flatten()
    special = torch.tensor([0.0, 6.0, 7.0, 1e30, math.inf, 1e-30])
    some = torch.cat([E2M1, near, -near, special, -special, _random(2048, seed=31) * 4])
    x = torch.cat([some, torch.zeros(-len(some) % 512)]) * scale
    codes = torch.empty(len(x) // 2, dtype=torch.uint8)
    _run(kernels.to_fp4, (len(codes) // 256,), (x, codes, scale), constexprs={"BLOCK": 256})
    expected = (x / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert torch.equal(_unpacked(codes), E2M1[torch.from_numpy(expected).long()])


@pytest.mark.parametrize("scale", [1.0, 0.125, 1024.0])
def test_casts_from_fp4(scale):
    codes = torch.arange(256).to(torch.uint8)
    outputs = [torch.empty(512, dtype=dtype) for dtype in (BF16, F16, F32)]
    words = [y.view(torch.int64 if y.dtype == F32 else torch.int32) for y in outputs]
    _run(kernels.from_fp4, (1,), (codes, *words, scale), constexprs={"BLOCK": 256})
    for y in outputs:
        _assert_same(y, (_unpacked(codes) * scale).to(y.dtype), codes.repeat_interleave(2))


def test_number_casts():
    f32 = torch.cat([_random(252, seed=33) * 1e6, torch.tensor([0.9, -0.9, 2147483520.0, -2147483648.0])])
    i32 = _integers(-(2**31), 2**31, 256, seed=34).to(torch.int32)
    i64 = _integers(-(2**62), 2**62, 256, seed=35)
    i8 = torch.arange(-128, 128).to(torch.int8)
    outputs = tuple(torch.empty(256, dtype=dtype) for dtype in (torch.int32, F32, F32, torch.int64))
    _run(kernels.number_casts, (1,), (f32, i32, i64, i8, *outputs), constexprs={"BLOCK": 256})
    expected = f32.to(torch.int32), i32.to(F32), i64.to(F32), i8.to(torch.int64)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


# ---- Reductions, scans, sorting, shapes ----


@pytest.mark.parametrize(
    ("rows", "n", "num_warps"),
    [(4, 16, 4), (16, 5, 1), (8, 64, 4), (4, 200, 4), (4, 256, 8), (2, 1024, 4), (1, 1024, 8)],
)
def test_row_reductions(rows, n, num_warps):
    """Whole numbers from −30 to 30, many of them equal: float32 sums are exact in any order, and argmax meets ties."""
    x = _integers(-30, 31, rows, n, seed=37).float()
    values, indices = torch.empty(3, rows), torch.empty(2, rows, dtype=torch.int32)
    constexprs = {"ROWS": rows, "COLUMNS": triton.next_power_of_2(n)}
    _run(kernels.row_reductions, (1,), (x, values, indices, n), constexprs=constexprs, num_warps=num_warps)
    assert torch.equal(values, torch.stack([x.amax(1), x.amin(1), x.sum(1)]))
    first = [(x == y[:, None]).int().argmax(1) for y in (x.amax(1), x.amin(1))]
    assert torch.equal(indices.long(), torch.stack(first))


@pytest.mark.parametrize("num_warps", [1, 4])
def test_column_reductions(num_warps):
    x = _integers(-1000, 1000, 64, 32, seed=39).float()
    sums, tops = torch.empty(32), torch.empty(32)
    constexprs = {"ROWS": 64, "COLUMNS": 32}
    _run(kernels.column_reductions, (1,), (x, sums, tops), constexprs=constexprs, num_warps=num_warps)
    assert torch.equal(sums, x.sum(0))
    assert torch.equal(tops, x.amax(0))


@pytest.mark.parametrize(("rows", "columns"), [(4, 128), (1, 1024)])
def test_scans(rows, columns):
    x = _integers(-5, 6, rows, columns, seed=41).to(torch.int32)
    outputs = sums, backward, a, b = [torch.empty_like(x) for _ in range(4)]
    _run(kernels.scans, (1,), (x, *outputs), constexprs={"ROWS": rows, "COLUMNS": columns})
    assert torch.equal(sums, x.cumsum(1, dtype=torch.int32))
    assert torch.equal(backward, x.flip(1).cumsum(1, dtype=torch.int32).flip(1))
    factor, constant = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    for i in range(columns):
        factor, constant = factor * (2 * x[:, i] + 1), constant * (2 * x[:, i] + 1) + x[:, i]
        assert torch.equal(a[:, i], factor), i
        assert torch.equal(b[:, i], constant), i


@pytest.mark.parametrize("dtype", [F32, torch.int32, torch.int16], ids=str)
def test_sorting(dtype):
    x = _integers(-300, 300, 4, 64, seed=43).to(dtype)
    outputs = up, down, flipped = [torch.empty_like(x) for _ in range(3)]
    _run(kernels.sort_rows, (1,), (x, *outputs), constexprs={"ROWS": 4, "COLUMNS": 64})
    assert torch.equal(up, x.sort(1).values)
    assert torch.equal(down, x.sort(1, descending=True).values)
    assert torch.equal(flipped, x.flip(1))


def test_histogram():
    x = _integers(0, 64, 1024, seed=45).to(torch.int32)
    counts = torch.empty(64, dtype=torch.int32)
    _run(kernels.histogram, (1,), (x, counts), constexprs={"N": 1024, "BINS": 64})
    assert torch.equal(counts.long(), torch.bincount(x, minlength=64))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8], ids=str)
def test_reshapes(dtype):
    x = _integers(-100, 100, 32, 64, seed=47).to(dtype)
    outputs = transposed, permuted, joined, halves, interleaved = [torch.empty_like(x) for _ in range(5)]
    _run(kernels.reshapes, (1,), (x, *outputs), constexprs={"ROWS": 32, "COLUMNS": 64})
    assert torch.equal(transposed.view(64, 32), x.T)
    assert torch.equal(permuted.view(4, 16, 32), x.view(32, 4, 16).permute(1, 2, 0))
    assert torch.equal(joined, x)
    low, high = x[:, ::2], x[:, 1::2]
    assert torch.equal(halves.view(2, 32, 32), torch.stack([low, high]))
    assert torch.equal(interleaved, torch.stack([high, low], -1).flatten(1))


@pytest.mark.parametrize("axis", [0, 1])
def test_gather(axis):
    x = _random(32, 64, seed=49)
    index = _integers(0, x.shape[axis], 32, 64, seed=50).to(torch.int32)
    y = torch.empty_like(x)
    _run(kernels.gather, (1,), (x, index, y), constexprs={"ROWS": 32, "COLUMNS": 64, "AXIS": axis})
    assert torch.equal(y, x.gather(axis, index.long()))


# ---- Arithmetic ----


def _between(low: float, high: float) -> torch.Tensor:
    return torch.rand(4096, generator=_generator(53)) * (high - low) + low


def _magnitudes(low: int, high: int) -> torch.Tensor:
    """From 2^low to 2^high, evenly in the exponent."""
    return torch.exp2(_between(low, high).double()).float()


@dataclass(frozen=True)
class FloatFunction:
    """An f32 function, right to `relative` of the result (in steps of 2⁻²⁴, half an ulp) plus `absolute`.

    special: arguments whose result must be exact.
    """

    name: str
    exact: object
    x: torch.Tensor
    relative: float | torch.Tensor
    absolute: float = 0.0
    special: tuple[float, ...] = ()


INF, NAN, FLUSHED = math.inf, math.nan, 2.0**-126  # v_exp_f32 may give 0 for a subnormal result
FLOAT_FUNCTIONS = [
    FloatFunction("exp2", torch.exp2, _between(-150, 127.9), 3, FLUSHED, (0, 1, 10, -126, 128, INF, -INF, NAN)),
    # The argument is multiplied by log2(e) in float32 first: its rounding counts |x| times.
    FloatFunction(
        "exp", torch.exp, _between(-100, 88), 3 + 2 * _between(-100, 88).abs(), FLUSHED, (0, 89, -INF, INF, NAN)
    ),
    FloatFunction("log2", torch.log2, _magnitudes(-149, 127), 3, 2**-24, (0, 1, 2, 2.0**-140, INF, -1, NAN)),
    FloatFunction("log", torch.log, _magnitudes(-149, 127), 5, 2**-24, (0, 1, INF, -1, NAN)),
    FloatFunction("sqrt", torch.sqrt, _magnitudes(-126, 127), 2, 0, (0, 1, 4, 2.0**100, INF, -1, NAN)),
    FloatFunction("sqrt_rn", torch.sqrt, _magnitudes(-96, 127), 1, 0, (0, 1, 4, 2.0**100, INF, -1, NAN)),
    FloatFunction("rsqrt", torch.rsqrt, _magnitudes(-126, 127), 3, 0, (0, 1, 4, 2.0**100, INF, -1, NAN)),
    FloatFunction("floor", torch.floor, _between(-100, 100), 0, 0, (-0.5, 2.5, 1e30, INF, NAN)),
    FloatFunction("ceil", torch.ceil, _between(-100, 100), 0, 0, (-0.5, 2.5, -1e30, INF, NAN)),
    FloatFunction("sin", torch.sin, _between(-1e6, 1e6), 0, 2**-22, (0, INF, NAN)),
    FloatFunction("erf", torch.erf, _between(-5, 5), 6, 0, (0, INF, -INF, NAN)),
]


@pytest.mark.parametrize("case", FLOAT_FUNCTIONS, ids=lambda case: case.name)
def test_float_functions(case):
    special = torch.tensor(case.special, dtype=F32)
    x = torch.cat([case.x, special, torch.ones(-len(special) % 256)])
    y = torch.empty_like(x)
    _run(kernels.float_function, (len(x) // 256,), (x, y), constexprs={"OP": case.name, "BLOCK": 256})
    exact = case.exact(x.double())
    error, n = (y.double() - exact).abs(), len(case.x)
    worst = (error[:n] - case.relative * 2.0**-24 * exact[:n].abs() - case.absolute).argmax()
    allowed = case.relative * 2.0**-24 * exact[:n].abs() + case.absolute
    assert (error[:n] <= allowed).all(), f"{case.name}({x[worst]}) = {y[worst]}, not {exact[worst]}"
    _assert_same(y[n:][: len(special)], exact[n:][: len(special)].float(), special)


def _any_floats(seed: int) -> torch.Tensor:
    """Random bits, a quarter of them around 1, and each special value beside many others."""
    bits = _integers(-(2**31), 2**31, 3072, seed=seed).to(torch.int32).view(F32)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.0**-149, 2.0**-126, 3.4e38, 5.0, 3.0])
    bits[:512] = special[_integers(0, len(special), 512, seed=seed + 1)]
    return torch.cat([bits, _random(1024, seed=seed + 2)])[torch.randperm(4096, generator=_generator(seed))]


def test_division_is_correctly_rounded_on_any_bits():
    x, y = _any_floats(57), _any_floats(61)
    fast, exact, fma = (torch.empty_like(x) for _ in range(3))
    _run(kernels.divide, (16,), (x, y, fast, exact, fma), constexprs={"BLOCK": 256})
    _assert_same(exact, x / y, x)
    _assert_same(fast, x / y, x)


def test_fma_rounds_once():
    """|y| within 2^±3: x·y + x then is exact in float64, so that the one rounding is the cast's."""
    x, y = _any_floats(67), _between(0.125, 8.0)
    fast, exact, fma = (torch.empty_like(x) for _ in range(3))
    _run(kernels.divide, (16,), (x, y, fast, exact, fma), constexprs={"BLOCK": 256})
    once, twice = (x.double() * y.double() + x.double()).float(), x * y + x
    _assert_same(fma, once, x)
    assert (once != twice).float().mean() > 0.1, "the two must differ, else this test shows nothing"


def _truncated_quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x - np.fmod(x, y)) // y


INTEGER_FUNCTIONS = [
    ("+", lambda x, y, shift: x + y),
    ("-", lambda x, y, shift: x - y),
    ("*", lambda x, y, shift: x * y),
    ("<<", lambda x, y, shift: x << shift),
    (">>", lambda x, y, shift: x >> shift),
    ("&", lambda x, y, shift: x & y),
    ("| ~", lambda x, y, shift: x | ~y),
    ("^", lambda x, y, shift: x ^ y),
    ("minimum", lambda x, y, shift: np.minimum(x, y)),
    ("maximum", lambda x, y, shift: np.maximum(x, y)),
    ("<", lambda x, y, shift: np.where(x < y, x, -y)),
    ("//", lambda x, y, shift: _truncated_quotient(x, y)),
    ("%", lambda x, y, shift: np.fmod(x, y)),
]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


def _any_integers(dtype: type, count: int, seed: int) -> np.ndarray:
    """Of all sizes, not only near the largest, the two ends among them."""
    info, random = np.iinfo(dtype), np.random.default_rng(seed)
    x = random.integers(info.min, info.max, count, dtype=dtype, endpoint=True) >> random.integers(
        0, info.bits, count, dtype=dtype
    )
    x[:4] = info.min, info.max, 0, 1
    return random.permutation(x)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.__name__)
def test_integer_functions(dtype):
    """Two's complement, wrapping; division as in C. y is neither 0 nor −1: the latter's quotient may overflow."""
    n = 512
    x, y = _any_integers(dtype, n, 71), _any_integers(dtype, n, 73)
    y[(y == 0) | (np.issubdtype(dtype, np.signedinteger) & (y == ~dtype(0)))] = 3
    out = np.empty((len(INTEGER_FUNCTIONS), n), dtype)
    _run(kernels.integer_functions, (n // 256,), (x, y, out, n), constexprs={"BLOCK": 256})
    shift = y & dtype(np.iinfo(dtype).bits - 1)
    for (name, function), ours in zip(INTEGER_FUNCTIONS, out, strict=True):
        with np.errstate(over="ignore"):
            expected = function(x, y, shift)
        wrong = np.flatnonzero(ours != expected)[:3]
        assert wrong.size == 0, [f"{x[i]} {name} {y[i]} = {ours[i]}, not {expected[i]}" for i in wrong]


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64], ids=lambda dtype: dtype.__name__)
def test_high_products(dtype):
    x, y = _any_integers(dtype, 512, 79), _any_integers(dtype, 512, 83)
    out = np.empty_like(x)
    _run(kernels.high_products, (2,), (x, y, out), constexprs={"BLOCK": 256})
    bits = np.iinfo(dtype).bits
    assert out.tolist() == [a * b >> bits for a, b in zip(x.tolist(), y.tolist(), strict=True)]


# ---- Memory ----


COPIES = [
    (dtype, run)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    for run in (1, 2, 4, 8, 16)
    if run * dtype.itemsize <= 16
]


WIDTHS = {1: "byte", 2: "short", 4: "dword", 8: "dwordx2", 16: "dwordx4"}


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("dtype", "run"), COPIES, ids=lambda x: str(x).removeprefix("torch."))
def test_masked_copies(dtype, run, aligned):
    """8 to 128 bits a lane, of which the first and the last lanes stay out; every byte wanted moves once, no other."""
    block = 256 * run
    n, skip = 2 * block - 3 * run, run
    x = _integers(-128, 128, 2 * block, seed=89).to(dtype)
    y = torch.full_like(x, 99)
    args = (*((x, y) if aligned else (gfx950.Unaligned(x), gfx950.Unaligned(y))), n, skip)
    code = gfx950.compile(kernels.copy, args, constexprs={"BLOCK": block, "RUN": run})
    result = _run(code, (2,), args)
    width = WIDTHS[dtype.itemsize * (run if aligned else 1)]
    assert re.search(rf"_load_u?{width} ", code.assembly), "moved at once is what a lane has, if it may be"
    assert re.search(rf"_store_{width} ", code.assembly)
    assert torch.equal(y[skip:n], x[skip:n])
    assert (y[:skip] == 99).all()
    assert (y[n:] == 99).all()
    read, written = result.counters.buffers
    moved = (n - skip) * dtype.itemsize
    assert (read.bytes_read, read.distinct_bytes_read, read.bytes_written) == (moved, moved, 0)
    assert (written.bytes_written, written.distinct_bytes_written, written.bytes_read) == (moved, moved, 0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, BF16], ids=str)
def test_masked_loads_have_a_default(dtype):
    x, y = _integers(-100, 100, 300, seed=97).to(dtype), torch.empty(512, dtype=dtype)
    _run(kernels.copy_with_default, (2,), (x, y, 300), constexprs={"BLOCK": 256})
    assert torch.equal(y, torch.cat([x, torch.full((212,), 7, dtype=dtype)]))


def test_a_loaded_value_in_an_address():
    x, index = _random(50, 96, seed=101), _integers(0, 50, 12, seed=102).to(torch.int32)
    y = torch.empty(12, 64)
    _run(kernels.copy_rows, (12,), (x, index, y, 96, 64), constexprs={"COLUMNS": 64}, num_warps=1)
    assert torch.equal(y, x[index.long(), :64])


@pytest.mark.parametrize("far", [2**31 + 7, 2**36, -(2**40)])
@pytest.mark.parametrize("kernel", [kernels.far_and_back, kernels.far_scalar], ids=lambda k: k.__name__)
def test_64_bit_pointers(kernel, far):
    """Addresses on the way lie far outside the buffer, the one that is read inside."""
    block, stride = 64, 3
    x = _integers(-(2**31), 2**31, 512, seed=103).to(torch.int32)
    steps = _integers(0, 128, block, seed=104)
    programs = 1 if kernel is kernels.far_and_back else 4
    y = torch.empty(programs * block, dtype=torch.int32)
    args = (x, y, steps, far, far - stride)
    _run(kernel, (programs,), args, constexprs={"BLOCK": block}, num_warps=1)
    lanes = torch.arange(block)
    where = steps * stride if programs == 1 else (steps[:programs, None] * stride + lanes).flatten()
    assert torch.equal(y, x[where])


@pytest.mark.parametrize("order", ORDERS)
def test_grids(order):
    grid = (67, 3, 2)
    y = torch.empty(grid[2], grid[1], grid[0], 64, dtype=torch.int32)
    result = _run(kernels.ids, grid, (y,), constexprs={"COUNT": 64}, num_warps=1, order=order)
    z, y_id, x, lane = torch.meshgrid(*(torch.arange(n) for n in y.shape), indexing="ij")
    assert torch.equal(y.long(), x + y_id * 1000 + z * 1000000 + lane * 10000000)
    assert result.counters.waves == math.prod(grid)


def test_registers_spilled_to_scratch():
    tiles, size = 40, 16384
    x, y = _integers(-8, 9, tiles, size, seed=107).float(), torch.empty(size)
    args, options = (x, y, size), {"constexprs": {"TILES": tiles, "SIZE": size}, "num_warps": 16}
    code = gfx950.compile(kernels.spilled, args, **options)
    assert "scratch_store" in code.assembly
    assert "scratch_load" in code.assembly
    _run(code, (1,), args)
    kept = torch.zeros(size, dtype=torch.float64)
    for i in range(tiles):
        kept = kept * 0.5 + (x[i] * x[tiles - 1 - i]).double()
    # 40 steps that round by 2⁻²⁴ of at most 128 each, halved again and again.
    assert ((y - kept).abs() <= 2 * 128 * 2.0**-24).all()


# ---- Loops ----


def _collatz(x: int) -> tuple[int, int]:
    steps, peak = 0, x
    while x != 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        steps, peak = steps + 1, max(peak, x)
    return steps, peak


def test_scalar_loops_that_the_data_ends():
    x = torch.tensor([1, 2, 7, 27, 97, 113383])
    steps, peaks = torch.empty(len(x), dtype=torch.int32), torch.empty_like(x)
    _run(kernels.collatz, (len(x),), (x, steps, peaks), num_warps=1)
    assert list(zip(steps.tolist(), peaks.tolist(), strict=True)) == [_collatz(n) for n in x.tolist()]
    assert peaks.max() > 2**31


@pytest.mark.parametrize("num_warps", [1, 4])
def test_tensor_loops_that_the_data_ends(num_warps):
    x, y = (_integers(0, 20000, 256, seed=seed).to(torch.int32) for seed in (109, 113))
    divisors, rounds = torch.empty_like(x), torch.empty(1, dtype=torch.int32)
    args = (x, y, divisors, rounds)
    _run(kernels.greatest_divisors, (1,), args, constexprs={"BLOCK": 256}, num_warps=num_warps)
    assert torch.equal(divisors, torch.gcd(x, y))
    assert 5 < rounds.item() < 20


def test_loops_with_bounds_from_memory():
    lengths = torch.tensor([0, 1, 17, 300, 256, 0, 513])
    indptr = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    x = _integers(-1000, 1000, int(lengths.sum()), seed=127).float()
    last, sums = torch.empty(len(lengths)), torch.empty(len(lengths))
    _run(kernels.segment_sums, (len(lengths),), (x, indptr, last, sums), constexprs={"BLOCK": 256})
    segments = x.split(lengths.tolist())
    assert sums.tolist() == [segment.sum().item() for segment in segments]
    assert last.tolist() == [segment[-1].item() if len(segment) else -1 for segment in segments]


# ---- Atomics ----

REDUCED = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
SIGNED, UNSIGNED, FLOATING = (np.int32, np.int64), (np.uint32, np.uint64), (np.float32, np.float64, np.float16)
ATOMICS = [
    *[("add", dtype) for dtype in SIGNED + UNSIGNED + FLOATING],
    *[(op, dtype) for op in ("max", "min") for dtype in SIGNED + UNSIGNED + (np.float32,)],
    *[(op, dtype) for op in ("and", "or", "xor") for dtype in SIGNED],
]


def _bins(op: str, dtype: type, count: int) -> tuple[int, torch.Tensor]:
    """How many bins, and a bin for each value.

    Triton 3.6 to 3.9 first reduces the lanes of a wave that share an address, and takes signed max and min for unsigned
    there: those get bins that no two lanes of a wave share.
    """
    if op in ("max", "min") and dtype in SIGNED:
        waves = [torch.randperm(64, generator=_generator(seed)) for seed in range(count // 64)]
        return 64, torch.cat(waves).to(torch.int32)
    return 24, _integers(0, 24, count, seed=133).to(torch.int32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("op", "dtype"), ATOMICS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_atomics_of_several_workgroups(op, dtype, order):
    """Floats are small whole numbers, so that sums are exact in any order, in f16 too."""
    programs, block = 4, 256
    bins, where = _bins(op, dtype, programs * block)
    if dtype in FLOATING:
        x, out = _integers(-9, 10, programs * block, seed=132).numpy().astype(dtype), np.full(bins, 3, dtype)
    else:
        x, out = _any_integers(dtype, programs * block, 131), _any_integers(dtype, bins, 134)
    expected = out.copy()
    with np.errstate(over="ignore"):
        REDUCED[op].at(expected, where.numpy(), x)
    args = (x, where, out)
    _run(kernels.atomic_bins, (programs,), args, constexprs={"OP": op, "BLOCK": block}, order=order, seed=5)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize(("dtype", "mnemonic"), [(F16, "pk_add_f16"), (BF16, "pk_add_bf16"), (F32, "add_f32")], ids=str)
def test_atomic_sums_of_neighbours(dtype, mnemonic):
    """Packed where the format has two a register; sums stay under 256, where bf16 has every whole number."""
    x, out = _integers(-9, 10, 6, 512, seed=137).to(dtype), torch.ones(512, dtype=dtype)
    args, options = (x, out, 512), {"constexprs": {"BLOCK": 512}}
    code = gfx950.compile(kernels.atomic_rows, args, **options)
    assert mnemonic in code.assembly
    _run(code, (6,), args, order="shuffled")
    assert torch.equal(out, 1 + x.sum(0))


@pytest.mark.parametrize("order", ORDERS)
def test_tickets(order):
    programs, block = 5, 128
    counters = torch.tensor([0, 10], dtype=torch.int32)
    lanes, ids = torch.empty(programs * block, dtype=torch.int32), torch.empty(programs, dtype=torch.int32)
    _run(kernels.tickets, (programs,), (counters, lanes, ids), constexprs={"BLOCK": block}, order=order, seed=7)
    assert sorted(lanes.tolist()) == list(range(programs * block))
    assert sorted(ids.tolist()) == list(range(10, 10 + programs))
    assert counters.tolist() == [programs * block, 10 + programs]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_compare_and_swap(dtype, order):
    programs, block = 6, 64
    slots = torch.zeros(block + programs // 2, dtype=dtype)
    owners, seen = torch.empty(programs, dtype=dtype), torch.empty(programs, block, dtype=dtype)
    _run(kernels.claim, (programs,), (slots, owners, seen), constexprs={"BLOCK": block}, order=order, seed=11)
    assert torch.equal(seen, slots[:block].expand(programs, block))
    assert ((slots >= 1) & (slots <= programs)).all()
    assert torch.equal(owners, slots[block:].repeat_interleave(2))
    pairs = torch.arange(programs // 2)
    assert (((slots[block:] - 1) // 2) == pairs).all(), "a pair's slot goes to one of the two"


def _chain(dtype: torch.dtype, **options) -> tuple[int, list[int]]:
    """The number at the head, and the numbers met from there on."""
    programs, block = 5, 64
    head, following = torch.zeros(1, dtype=dtype), torch.empty(programs * block, dtype=dtype)
    _run(kernels.chain, (programs,), (head, following), constexprs={"BLOCK": block}, num_warps=1, **options)
    met, at = [], head.item()
    while at != 0 and len(met) <= programs * block:
        met.append(at)
        at = following[at - 1].item()
    return head.item(), met


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_exchange(dtype, order):
    assert sorted(_chain(dtype, order=order, seed=3)[1]) == list(range(1, 321))


def test_a_shuffled_grid_shows_what_hangs_on_its_order():
    heads = [_chain(torch.int32, order="shuffled", seed=seed)[0] for seed in (0, 0, 1, 2, 3, 4, 5)]
    assert heads[0] == heads[1], "the seed alone decides"
    assert len(set(heads)) > 1


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_program_merges_and_sets_back(order):
    programs, block = 7, 256
    counter, y = torch.zeros(1, dtype=torch.int32), torch.empty(1)
    for seed in (139, 149):
        x = _integers(-100, 100, programs, block, seed=seed).float()
        partial = gfx950.Uninitialised(torch.empty(programs))
        args = (x, partial, counter, y, programs)
        _run(kernels.sum_by_the_last, (programs,), args, constexprs={"BLOCK": block}, order=order, seed=seed)
        assert y.item() == x.sum().item()
        assert counter.item() == 0


# ---- Counters ----


def test_counters_of_a_product():
    """Each of the 4 waves has one tile of 16 × 16 and takes K = 64 in two steps of 32."""
    args, options = _product_arguments(Product(BF16, 16, 64, 64, 32, "b"))
    counters = _run(kernels.product, (1,), args, **options).counters
    assert counters.mfma == {"v_mfma_f32_16x16x32_bf16": 8}
    assert counters.waves == 4
    assert [b.distinct_bytes_read for b in counters.buffers] == [16 * 64 * 2, 64 * 64 * 2, 0]
    assert [b.bytes_written for b in counters.buffers] == [0, 0, 16 * 64 * 4]


def test_counters_of_a_transposition():
    args, options = _transpose()
    counters = _run(kernels.transpose_through_lds, (1,), args, **options).counters
    size = 64 * 64 * 4
    assert torch.equal(args[1], args[0].T)
    assert (counters.lds_bytes_written, counters.lds_bytes_read) == (size, size)
    assert [(b.bytes_read, b.bytes_written) for b in counters.buffers] == [(size, 0), (0, size)]
    assert not counters.mfma


def test_counters_of_arguments_that_overlap():
    """Each argument has its own entry; what memory must move counts once."""
    x = _random(256, seed=193)
    expected = x + x
    counters = _run(kernels.add_in_place, (1,), (x, x, x), constexprs={"BLOCK": 256}).counters
    assert torch.equal(x, expected)
    assert [(b.name, b.bytes_read, b.bytes_written) for b in counters.buffers] == [
        ("x_ptr", 1024, 0),
        ("y_ptr", 1024, 0),
        ("out_ptr", 0, 1024),
    ]
    assert counters.global_bytes == 1024 + 1024
    views = torch.zeros(384)
    counters = _run(kernels.add_in_place, (1,), (views[:256], views[128:], x), constexprs={"BLOCK": 256}).counters
    assert counters.global_bytes == 384 * 4 + 1024
    assert [b.size for b in counters.buffers] == [1024, 1024, 1024]


@pytest.mark.parametrize("place", [0, 1])
def test_a_mark_holds_for_every_argument_over_the_same_bytes(place):
    w, out = torch.ones(256), torch.empty(256)
    args = [w, w, out]
    args[place] = gfx950.Uninitialised(w)
    found = gfx950.run(kernels.add_in_place, (1,), tuple(args), constexprs={"BLOCK": 256}).findings
    assert [f.kind for f in found] == ["uninitialised"] * 2
    assert "x_ptr" in found[0].message
    assert "y_ptr" in found[1].message


# ---- Arguments ----


def test_parameters_have_their_defaults():
    x, addend = _random(64, seed=197), _random(64, seed=199)
    for more, constexprs, expected in (
        ((), {}, x * 2 + 3),
        ((0.5,), {}, x * 0.5 + 3),
        ((0.5, addend), {"SHIFT": 7}, x * 0.5 + 7 + addend),
        ((0.5, None), {"SHIFT": -1}, x * 0.5 - 1),
    ):
        y = torch.empty(64)
        args = (x, y, *more)
        _run(kernels.with_defaults, (1,), args, constexprs=constexprs, num_warps=1, enable_fp_fusion=False)
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
        code = gfx950.compile(kernels.with_defaults, args, constexprs, num_warps=1, enable_fp_fusion=False)
        again = torch.empty(64)
        _run(code, (1,), (x, again, *more))
        assert torch.equal(again, y)


NUMBERS = (1.5, 7, True, 0.1, -2.5, 3.0, -(2**40), 200)
NUMBERS_AS_FLOATS = torch.tensor([1.5, 7, 1, 0.1, -2.5, 3, -(2.0**40), 200])


def test_numbers_arrive_as_the_kernel_takes_them():
    y = torch.empty(8)
    _run(kernels.numbers, (1,), (y, *NUMBERS), num_warps=1)
    assert torch.equal(y, NUMBERS_AS_FLOATS)


def test_compiled_code_converts_numbers_as_the_launcher_does():
    """An int for a float, and an int for an integer of another size; a bfloat16 is cut off."""
    code = gfx950.compile(kernels.numbers, (torch.empty(8), *NUMBERS), num_warps=1)
    y = torch.empty(8)
    _run(code, (1,), (y, 3, 2, False, 5, 6, 1.0 + 2**-8 + 2**-9, 9, 0))
    assert y.tolist() == [3, 2, 0, 5, 6, 1, 9, 0]
    _run(code, (1,), (y, np.float32(0.5), np.int64(-1), np.bool_(True), np.float64(2), 0, 0, 0, np.uint8(255)))
    assert y.tolist() == [0.5, -1, 1, 2, 0, 0, 0, 255]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, 7, "y_ptr was compiled as *fp32, got 7"),
        (0, torch.empty(8, dtype=torch.int32), "y_ptr was compiled as *fp32, got a tensor of torch.int32"),
        (0, None, "y_ptr was compiled as *fp32, got None"),
        (1, torch.empty(8), "f was compiled as fp32, got a tensor"),
        (1, 1e300, "f = 1e+300 does not fit in the kernel's fp32"),
        (1, "1", "f is a str; expected a tensor, an int or a float"),
        (2, 1.5, "i was compiled as i32, got 1.5"),
        (2, 2**31, "i = 2147483648 does not fit in the i32"),
        (2, 2**70, "does not fit in 64 bits"),
        (3, 2, "flag = 2 does not fit in the u1"),
        (5, 1e5, "f16 = 100000.0 does not fit in the kernel's fp16"),
        (8, -1, "u8 = -1 does not fit in the u8"),
        (8, 256, "u8 = 256 does not fit in the u8"),
    ],
)
def test_arguments_that_compiled_code_cannot_take(place, value, says):
    args = [torch.empty(8), *NUMBERS]
    code = gfx950.compile(kernels.numbers, args, num_warps=1)
    args[place] = value
    with pytest.raises(gfx950.CodeObjectError, match=re.escape(says)):
        gfx950.run(code, (1,), args)


def test_an_elf_takes_a_signature():
    """Without one a number's type is that of what is passed."""
    args = [torch.empty(8), *NUMBERS]
    code = gfx950.compile(kernels.numbers, args, num_warps=1)
    bare, typed = gfx950.load(code.elf), gfx950.load(code.elf, signature=code.signature)
    args[1] = 3
    for loaded, first in ((bare, np.uint32(3).view(np.float32)), (typed, 3.0)):
        _run(loaded, (1,), [args[0], *args[1:4], 0.1, *([0, 0] if loaded is bare else [-2.5, 3.0]), *args[7:]])
        assert args[0][0].item() == first
    with pytest.raises(gfx950.CodeObjectError, match="the signature names 20"):
        gfx950.load(code.elf, signature={f"a{i}": "i32" for i in range(20)})
    for wrong in (torch.empty(8), None):
        with pytest.raises(gfx950.CodeObjectError, match="argument 1 is a number of 4 bytes"):
            gfx950.run(bare, (1,), [args[0], wrong, *args[2:]])
    with pytest.raises(gfx950.CodeObjectError, match="argument 0 is a pointer; expected a tensor"):
        gfx950.run(bare, (1,), [0.5, *args[1:]])
    found = gfx950.run(bare, (1,), [None, *args[1:5], 0, 0, *args[7:]]).findings
    assert {f.kind for f in found} == {"out-of-bounds"}


def _wrapped():
    config = triton.Config({"BLOCK": 64})
    return triton.autotune(configs=[config], key=[])(kernels.accumulate)


@pytest.mark.parametrize(
    ("kernel", "options", "says"),
    [
        (lambda: None, {}, "is a function; expected a @triton.jit function"),
        ("accumulate", {}, "is a str; expected a @triton.jit function"),
        (_wrapped(), {}, "accumulate is wrapped in Triton's Autotuner"),
        (kernels.accumulate, {"num_warps": 3}, "num_warps is 3; expected a power of two from 1 to 16"),
        (kernels.accumulate, {"num_warps": 32}, "num_warps is 32"),
        (kernels.accumulate, {"grid": None}, "grid is None; expected one to three positive integers"),
        (kernels.accumulate, {"grid": lambda meta: (1,)}, "expected one to three positive integers"),
        (kernels.accumulate, {"grid": (1, 0)}, "grid is (1, 0)"),
        (kernels.accumulate, {"grid": (1.5,)}, "grid is (1.5,)"),
        (kernels.accumulate, {"grid": ()}, "grid is ()"),
        (kernels.accumulate, {"grid": 2**40}, "expected one to three positive integers"),
        (kernels.accumulate, {"seed": -1}, "seed is -1"),
        (kernels.accumulate, {"args": torch.empty(4)}, "args is a Tensor; expected a list or tuple"),
        (kernels.accumulate, {"args": (torch.empty(64), 1j)}, "total_ptr is a complex"),
    ],
)
def test_wrong_calls_are_refused(kernel, options, says):
    given = {"grid": 1, "args": (torch.empty(64), torch.empty(64)), "constexprs": {"N": 64}} | options
    with pytest.raises(gfx950.CodeObjectError, match=re.escape(says)):
        gfx950.run(kernel, given.pop("grid"), given.pop("args"), **given)


def test_grids_of_numpy_integers():
    _run(kernels.accumulate, np.int64(1), (torch.ones(64), torch.ones(64)), constexprs={"N": 64})
    _run(kernels.accumulate, [np.int32(1), 1], (torch.ones(64), torch.ones(64)), constexprs={"N": 64})


def test_a_file_cut_short_is_refused():
    elf = gfx950.compile(kernels.accumulate, (torch.ones(64), torch.ones(64)), {"N": 64}, num_warps=1).elf
    for length in [0, 3, *range(16, len(elf), len(elf) // 60)]:
        with pytest.raises(gfx950.CodeObjectError, match=r"damaged|not an ELF|no kernel|no metadata|nothing to load"):
            gfx950.load(elf[:length])


def test_kernels_that_call_the_host():
    """An assertion that holds calls nobody. One that does not, and a print, would wait for the host for ever."""
    x, y = torch.zeros(64), torch.empty(64)
    options = {"constexprs": {"BLOCK": 64}, "num_warps": 1}
    _run(kernels.asserting, 1, (x, y), debug=True, **options)
    assert torch.equal(y, x)
    x[5] = 200
    _run(kernels.asserting, 1, (x, y), **options)  # without debug the assertion is not compiled in
    with pytest.raises(gfx950.KernelFaultError, match=r"asserting calls the host.*an assertion failed.*workgroup"):
        gfx950.run(kernels.asserting, 1, (x, y), debug=True, **options)
    with pytest.raises(gfx950.KernelFaultError, match=r"printing calls the host.*it prints.*workgroup"):
        gfx950.run(kernels.printing, 1, (x,), **options)


def test_denormals_as_the_code_object_asks():
    """With allow_flush_denorm, which some versions of Triton heed, they are zeros; a division stays right."""
    x = _magnitudes(-149, 127)[:256]
    for flush in (False, True):
        double, third = torch.empty(256), torch.empty(256)
        options = {"constexprs": {"BLOCK": 256}, "num_warps": 1, "allow_flush_denorm": flush}
        code = gfx950.compile(kernels.double_and_third, (x, double, third), options.pop("constexprs"), **options)
        flushes = code.descriptor.mode & 0x30 == 0
        assert not flushes or flush
        _run(code, 1, (x, double, third))
        zero = x.abs() < 2.0**-126 if flushes else torch.zeros(256, dtype=torch.bool)
        assert torch.equal(double, torch.where(zero, 0, x + x))
        normal = x > 2.0**-123
        assert torch.equal(third[normal], (x / 3)[normal])


# ---- MLA decode ----

SIZES = {"HEADS": 16, "LATENT": 512, "ROPE": 64}


@dataclass
class Decode:
    """Inputs of an MLA decode with ragged lengths, bf16 or fp8 cache, in the form of the task's generate_input."""

    data: tuple
    kv: torch.Tensor
    kv_scale: torch.Tensor
    indptr: torch.Tensor

    @classmethod
    def of(cls, lengths: list[int], cache: str, seed: int) -> "Decode":
        q = _random(len(lengths), 16, 576, seed=seed).bfloat16()
        bf16 = _random(sum(lengths), 1, 576, seed=seed + 1).bfloat16()
        fp8, scale = reference.quantize_fp8(bf16)
        indptr = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
        data = (
            q,
            {"bf16": bf16, "fp8": (fp8, scale)},
            torch.arange(len(lengths) + 1, dtype=torch.int32),
            indptr,
            {"sm_scale": 1 / math.sqrt(576)},
        )
        return cls(data, *((bf16, torch.ones(1)) if cache == "bf16" else (fp8, scale)), indptr)

    def attend(self, splits: int, block_n: int, tail: str = "masked", **options):
        """(batch, 16, 512) float32, and the two runs' results. Both workspaces start as never written."""
        q, sm_scale = self.data[0], self.data[4]["sm_scale"]
        partial, lse = torch.empty(len(q), splits, 16, 512), torch.empty(len(q), splits, 16)
        out = torch.empty(len(q), 16, 512)
        workspaces = (gfx950.Uninitialised(partial), gfx950.Uninitialised(lse))
        constexprs = SIZES | {"BLOCK_N": block_n, "SPLITS": splits, "TAIL": tail}
        args = (q, self.kv, self.kv_scale, self.indptr, *workspaces, sm_scale)
        decode = gfx950.run(kernels.mla_decode, (len(q), splits), args, constexprs=constexprs, **options)
        sizes = {"HEADS": 16, "LATENT": 512, "SPLITS": splits}
        merge = gfx950.run(kernels.mla_merge, (len(q), 16), (partial, lse, out), constexprs=sizes)
        return out, decode, merge


def _worst_relative_l2(ours: torch.Tensor, exact: torch.Tensor) -> float:
    error = (ours - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1).clamp(min=1e-30)
    return error.max().item()


DECODES = [
    # cache, BLOCK_N, splits, stages, lengths
    ("bf16", 32, 1, 1, [17, 0, 1, 90]),
    ("bf16", 32, 3, 2, [300, 0, 17, 1]),
    ("bf16", 64, 2, 1, [100, 64]),
    ("fp8", 32, 3, 1, [1, 300, 0, 17]),
    ("fp8", 64, 1, 2, [65, 17]),
    ("fp8", 32, 2, 2, [64, 33]),
]


@pytest.mark.parametrize(("cache", "block_n", "splits", "stages", "lengths"), DECODES)
def test_mla_decode(cache, block_n, splits, stages, lengths):
    """0.004 is the budget of the plan's own kernels: what rounding the probabilities to bf16 costs, nearly twofold."""
    decode = Decode.of(lengths, cache, seed=151)
    out, *runs = decode.attend(splits, block_n, num_stages=stages, order="shuffled")
    for run in runs:
        assert run.ok, "\n".join(map(str, run.findings))
    exact = reference.exact_attention(decode.data, {"bf16": "a16w16", "fp8": "a16w8"}[cache])
    assert _worst_relative_l2(out, exact) < 0.004
    read = runs[0].counters.buffers[1]
    size = decode.kv.numel() * decode.kv.element_size()
    assert (read.bytes_read, read.distinct_bytes_read) == (size, size), "each byte of the cache is read once"


def test_mla_decode_of_1024_tokens():
    decode = Decode.of([1024], "bf16", seed=157)
    out, *runs = decode.attend(1, 32, num_stages=1)
    assert all(run.ok for run in runs)
    assert _worst_relative_l2(out, reference.exact_attention(decode.data)) < 0.004


# ---- Mutants: each of these is wrong, and has to be found out ----


def _kinds(result) -> set[str]:
    return {finding.kind for finding in result.findings}


def _assert_found(result, kind: str, instruction: str) -> None:
    """A finding of that kind, by an instruction whose name holds `instruction`, with its place in full."""
    assert not result.ok
    found = [f for f in result.findings if f.kind == kind and instruction in f.instruction]
    assert found, "\n".join(map(str, result.findings))
    assert re.fullmatch(r".*(gfx950_kernels|standard)\.py:\d+", found[0].source), "a line of the kernel or of triton"
    assert 0 <= found[0].lane < 64
    assert found[0].wave < result.counters.waves
    assert f"{kind}: " in str(found[0])


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("tail", ["one too many", "unmasked"])
def test_reading_past_the_cache(cache, tail):
    _, result, _ = Decode.of([17], cache, seed=163).attend(1, 32, tail, num_stages=1)
    _assert_found(result, "out-of-bounds", "load")


def test_reading_past_the_cache_names_the_source():
    _, result, _ = Decode.of([17], "bf16", seed=163).attend(1, 32, "one too many", num_stages=1)
    finding = next(f for f in result.findings if f.kind == "out-of-bounds")
    file, line = finding.source.rsplit(":", 1)
    assert file.endswith("gfx950_kernels.py")
    assert "tl.load(row" in Path(kernels.__file__).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("shift", [-1, -5, 2**29 + 3, 2**30 - 3, 600])
@pytest.mark.parametrize("what", ["load", "store", "atomic"])
def test_indices_below_the_buffer_and_far_past_it(what, shift):
    """Triton uses buffer instructions here, whose range check drops what a negative index, or one past 2 GB, hits."""
    x, y = torch.ones(256), torch.zeros(256)
    shifts = dict.fromkeys(("load", "store", "atomic"), 0)
    code = gfx950.compile(kernels.shifted, (x, y, 200, 0, 0, -1), {"BLOCK": 256})
    assert f"buffer_{what}" in code.assembly
    _run(code, 1, (x, y, 200, *shifts.values()))
    result = gfx950.run(code, 1, (x, y, 200, *(shifts | {what: shift}).values()))
    _assert_found(result, "out-of-bounds", f"buffer_{what}")
    assert {f.kind for f in result.findings} == {"out-of-bounds"}


@pytest.mark.parametrize("page", [-1, 9, 2**25 + 1])
def test_a_page_that_is_none(page):
    x, y = _random(8 * 16, seed=163), torch.empty(64)
    pages = torch.tensor([3, 1, page, 7], dtype=torch.int32)
    args, constexprs = (x, pages, y, 30), {"PAGE": 16, "BLOCK": 64}
    _run(kernels.paged, 1, args, constexprs=constexprs, num_warps=1)
    assert torch.equal(y[:30], x.view(8, 16)[[3, 1]].flatten()[:30])
    result = gfx950.run(kernels.paged, 1, (*args[:3], 60), constexprs=constexprs, num_warps=1)
    _assert_found(result, "out-of-bounds", "load")
    assert result.findings[0].lane == 32


@pytest.mark.parametrize("masked", [True, False])
def test_a_wrong_mask_over_what_was_never_written(masked):
    x, kept, total = _random(256, seed=167), torch.empty(256), torch.empty(1)
    constexprs = {"BLOCK": 256, "MASKED": masked}
    args = (x, gfx950.Uninitialised(kept), total, 200)
    result = gfx950.run(kernels.keep_and_sum, (1,), args, constexprs=constexprs)
    if masked:
        assert result.ok
    else:
        _assert_found(result, "uninitialised", "load")


def test_an_accumulator_nobody_set():
    x, total = _random(256, seed=173), torch.zeros(256)
    for argument, kinds in ((total, set()), (gfx950.Uninitialised(total), {"uninitialised"})):
        result = gfx950.run(kernels.accumulate, (1,), (x, argument), constexprs={"N": 256})
        assert _kinds(result) == kinds


def test_a_broken_promise_of_alignment():
    """Compiled for shifts by a multiple of 16 bytes, which Triton takes from the arguments, and run with another."""
    x, y = _integers(0, 100, 1024, seed=179).to(torch.int8), torch.empty(512, dtype=torch.int8)
    code = gfx950.compile(kernels.copy_shifted, (x, y, 16), constexprs={"BLOCK": 512}, num_warps=1)
    for shift, kinds in ((16, set()), (1, {"misaligned"})):
        assert _kinds(gfx950.run(code, (1,), (x, y, shift))) == kinds
        assert torch.equal(y, x[shift : shift + 512])


S_NOP, S_BARRIER, S_SET_GPR_IDX_OFF = 0xBF800000, 0xBF8A0000, 0xBF9C0000
V_MOV_B32, V_MOV_B32_MASK = 0x7E000200, 0xFE01FE00  # the operands left out
V_ACCVGPR_WRITE, V_ACCVGPR_WRITE_MASK = 0xD3D94000, 0xFFFFFF00  # the first of its two words
# The first of two words, offsets left out: ds_write_b32, write2, write2st64, b64, write2_b64, write2st64_b64, b128.
DS_WRITES, DS_WRITE_MASK = [0xD8000000 | opcode << 17 for opcode in (13, 14, 15, 77, 78, 79, 223)], 0xFFFE0000


def _words(elf: bytes, pattern: int, mask: int = 0xFFFFFFFF) -> list[int]:
    """Where in the file the code holds words like that."""
    from elftools.elf.elffile import ELFFile

    text = ELFFile(io.BytesIO(elf)).get_section_by_name(".text")
    words = np.frombuffer(text.data(), "<u4")
    return [text["sh_offset"] + 4 * int(i) for i in np.flatnonzero((words & mask) == pattern)]


def _patched(code, at: int, *words: int):
    elf = bytearray(code.elf)
    elf[at : at + 4 * len(words)] = np.array(words, "<u4").tobytes()
    return gfx950.load(bytes(elf), lds_size=code.lds_size)


def _transpose() -> tuple[tuple, dict]:
    return (_random(64, 64, seed=181), torch.empty(64, 64)), {"constexprs": {"N": 64}}


def _row_reductions() -> tuple[tuple, dict]:
    args = (_random(1, 1024, seed=191), torch.empty(3, 1), torch.empty(2, 1, dtype=torch.int32), 1024)
    return args, {"constexprs": {"ROWS": 1, "COLUMNS": 1024}}


EXCHANGING = {
    "transpose_through_lds": (kernels.transpose_through_lds, _transpose),
    "row_reductions": (kernels.row_reductions, _row_reductions),
    "product": (kernels.product, lambda: _product_arguments(Product(BF16, 16, 64, 128, 32))),
}


@pytest.mark.parametrize(("name", "zeros"), [*((name, False) for name in EXCHANGING), ("product", True)])
def test_a_missing_barrier_is_a_race(name, zeros):
    """Each barrier left out in turn. Not all need to show: a loop's barriers can stand in for one another.

    Waves run one after the other, so that a read which comes too early meets LDS that was never written, too. On zeros
    a write changes nothing, and only which wave touches which byte tells.
    """
    kernel, arguments = EXCHANGING[name]
    args, options = arguments()
    if zeros:
        args = tuple(torch.zeros_like(a) if isinstance(a, torch.Tensor) else a for a in args)
    code = gfx950.compile(kernel, args, **options)
    barriers = _words(code.elf, S_BARRIER)
    assert len(barriers) == code.assembly.count("s_barrier") > 0
    assert gfx950.run(code, (1,), args).ok
    results = [gfx950.run(_patched(code, at, S_NOP), (1,), args) for at in barriers]
    assert all(_kinds(result) <= {"race", "uninitialised"} for result in results)
    races = [result for result in results if "race" in _kinds(result)]
    assert 2 * len(races) > len(results)
    _assert_found(races[0], "race", "")


def test_lds_that_was_never_written():
    args, options = _transpose()
    code = gfx950.compile(kernels.transpose_through_lds, args, **options)
    write = min(at for pattern in DS_WRITES for at in _words(code.elf, pattern, DS_WRITE_MASK))
    result = gfx950.run(_patched(code, write, S_NOP, S_NOP), (1,), args)
    _assert_found(result, "uninitialised", "ds_read")


def test_lds_that_the_workgroup_does_not_have():
    args, options = _transpose()
    code = gfx950.compile(kernels.transpose_through_lds, args, **options)
    result = gfx950.run(gfx950.load(code.elf, lds_size=code.lds_size // 2), (1,), args)
    _assert_found(result, "out-of-bounds", "ds_")


def test_an_accumulator_register_that_was_never_set():
    """Each move of a register left out in turn: most of them set the accumulators to 0."""
    args, options = _product_arguments(Product(BF16, 32, 32, 64, 32, num_warps=1, num_stages=1))
    code = gfx950.compile(kernels.product, args, **options)
    moves = [(at, (S_NOP,)) for at in _words(code.elf, V_MOV_B32, V_MOV_B32_MASK)]
    moves += [(at, (S_NOP, S_NOP)) for at in _words(code.elf, V_ACCVGPR_WRITE, V_ACCVGPR_WRITE_MASK)]
    results = [gfx950.run(_patched(code, at, *words), (1,), args) for at, words in moves]
    found = [result for result in results if any("mfma" in f.instruction for f in result.findings)]
    assert found
    _assert_found(found[0], "uninitialised", "mfma")


def test_an_instruction_not_known_is_named():
    args, options = _transpose()
    code = gfx950.compile(kernels.transpose_through_lds, args, **options)
    patched = _patched(code, _words(code.elf, S_BARRIER)[0], S_SET_GPR_IDX_OFF)
    with pytest.raises(gfx950.UnknownInstructionError, match=r"(?i)s_set_gpr_idx_off.*0x.*transpose_through_lds"):
        gfx950.run(patched, (1,), args)
