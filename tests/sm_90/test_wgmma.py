"""The fused kernel's design for sm_90: its source run with torch on a CPU, compiled, and on a GPU for real."""

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

from sm_90 import launch
from submission import Plan, Tile
from tests.conftest import on_hopper
from tests.oracle import mxfp4_values, numpy_of
from tests.ragged import Ragged, hard, with_nan

if launch.kernel is None:
    pytest.skip("needs Triton 3.6 or later", allow_module_level=True)
import triton

from sm_90 import kernel
from tests.sm_90 import gluon_on_torch

CACHES = ("fp8", "mxfp4")
gpu = pytest.param("gpu", marks=on_hopper)
everywhere = pytest.mark.parametrize("where", ["late", gpu])  # "late", "early": on a CPU, by when copies land


def wgmma_plan(cache: str, splits: int, stages: int = 2) -> Plan:
    return Plan("wgmma", splits, tile=Tile(cache, stages=stages, merge="kernel"))


def run(case: Ragged, cache: str, where: str, splits: int, stages: int = 2) -> None:
    """Fill case.out."""
    case.out = torch.full_like(case.out, torch.nan, dtype=torch.bfloat16)
    if where == "gpu":
        case.move_to_gpu()
    for step in case.launches(wgmma_plan(cache, splits, stages), "nvidia"):
        if where == "gpu":
            step.start()
        elif step.kernel is kernel._wgmma_kernel:
            gluon_on_torch.run(step, late=where == "late")
        else:
            merge(**step.arguments)


def merge(partial_ptr, lse_ptr, scale_ptr, out_ptr, splits) -> None:
    """What _merge_kernel is for: parts, each divided by its own sum, weighted by 2^lse; NaN stays."""
    lse = lse_ptr.view(-1, splits, 16, 1).double()
    parts = partial_ptr.view(-1, splits, 16, 512).double()
    shares = torch.exp2(lse - lse.nan_to_num(-torch.inf).amax(1, keepdim=True).nan_to_num(0, neginf=0))
    scale = scale_ptr.double() if scale_ptr.dtype == torch.float32 else 1.0
    out_ptr.copy_((shares * parts).sum(1) / shares.sum(1).where(shares.sum(1) != 0, 1) * scale)


# ---- What it computes ----


@pytest.mark.parametrize("where", ["early", "late", gpu])
@pytest.mark.parametrize(("splits", "stages"), [(1, 1), (1, 2), (1, 3), (2, 4), (5, 2), (33, 2)])
@pytest.mark.parametrize("cache", CACHES)
def test_ragged_sequences(cache, where, splits, stages):
    case = Ragged([577, 0, 1, 33, 64, 129], cache, seed=splits)
    run(case, cache, where, splits, stages)
    assert max(case.errors()) < 0.004


@everywhere
@pytest.mark.parametrize(
    ("scale_q", "change"),
    [
        (1e6, lambda kv: kv * 1e-6),
        (1e-6, lambda kv: kv * 1e5),
        (1e-38, lambda kv: kv),
        (1.0, lambda kv: torch.where(torch.arange(576) == 77, kv * 1000, kv)),
        (1.0, lambda kv: torch.where(torch.arange(576) == 560, kv * 1000, kv)),
        (40.0, lambda kv: kv),
        (1.0, lambda kv: kv * torch.logspace(-6, 6, len(kv)).view(-1, 1, 1)),
        (1.0, lambda kv: torch.where(torch.arange(len(kv)).view(-1, 1, 1) % 3 == 0, kv, 0)),
        (1.0, torch.zeros_like),
        (1.0, lambda kv: torch.where(torch.arange(len(kv)).view(-1, 1, 1) < 128, 0, kv)),
        (1e-38, lambda kv: kv * 6e37),
    ],
)
@pytest.mark.parametrize("cache", CACHES)
def test_hard_numbers(cache, where, scale_q, change):
    """A query past float16's range, near float32's bottom, outlier channels among the values' dims and the others,
    large logits, tokens of all magnitudes, tokens of zeros, a cache of zeros, a part of zeros, float32's top."""
    case = hard([200, 33], cache, scale_q, change)
    run(case, cache, where, 2)
    assert max(case.errors()) < 0.004 if case.held.any() else not case.out.any()


@everywhere
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_query_that_is_not_finite_shows(cache, where, wrong, splits):
    case = Ragged([70, 33], cache, seed=2)
    case.q[1, 3, 40] = wrong
    run(case, cache, where, splits)
    assert torch.isfinite(case.out[0]).all()
    assert torch.isnan(case.out[1, 3]).all()


@everywhere
@pytest.mark.parametrize("block", [3, 17])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_scale_that_is_no_number_shows(where, block, splits):
    case = Ragged([70, 33], "mxfp4", seed=2)
    case.scale.view(torch.uint8)[75, block] = 255
    run(case, "mxfp4", where, splits)
    assert torch.isfinite(case.out[0]).all()
    assert torch.isnan(case.out[1]).any(1).all()


@everywhere
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("cache", CACHES)
def test_nan_in_the_cache_shows(cache, where, splits):
    """In all of its sequence's output, and in no other's."""
    case = with_nan(cache)
    run(case, cache, where, splits)
    assert case.out[0].isnan().all()
    assert case.errors()[1] < 0.004


@everywhere
@pytest.mark.parametrize("code", [8, 31, 33, 127, 200, 249, 250, 252])
@pytest.mark.parametrize("splits", [1, 2])
def test_every_scale_of_mxfp4(where, code, splits):
    """From 2^-119 to where values leave bfloat16; alone and beside each other."""
    case = Ragged([1, 70], "mxfp4", seed=3)
    case.q.zero_()
    case.scale.view(torch.uint8).fill_(code)
    case.held = mxfp4_values(numpy_of(case.cache)[:, 0], numpy_of(case.scale))
    run(case, "mxfp4", where, splits)
    assert max(case.errors()) < 0.004


@everywhere
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kept", range(4))
def test_nothing_comes_from_other_sequences(cache, where, splits, kept):
    """Tiles end in the middle of a sequence; what follows there is NaN."""
    case = Ragged([33, 65, 130, 1], cache, seed=4)
    others = torch.ones(len(case.held), dtype=torch.bool)
    others[case.indptr[kept] : case.indptr[kept + 1]] = False
    (case.cache if cache == "fp8" else case.scale).view(torch.uint8)[others] = 0x7F if cache == "fp8" else 0xFF
    run(case, cache, where, splits)
    assert case.errors()[kept] < 0.004


def test_the_test_above_can_fail(monkeypatch):
    @kernel.gluon.jit
    def leave_rows(block_s, left):
        pass

    monkeypatch.setattr(kernel, "_clear_rows", leave_rows)
    case = Ragged([33, 65], "fp8", seed=4)
    case.cache.view(torch.uint8)[33:] = 0x7F
    run(case, "fp8", "late", 1)
    assert case.out[0].isnan().all()


# ---- The stand-in for Gluon ----


@pytest.mark.parametrize(
    ("asm", "expected"),
    [
        ("{mov.b32 $0, $1;}", 0x40302010),
        ("{prmt.b32 $0, $1, 0, 0x3120;}", 0x40203010),
        ("{prmt.b32 $0, $1, 0, 0x2404;}", 0x30001000),
        ("{.reg .b32 a; shl.b32 a, $1, 4; and.b32 $0, a, 0xff00ff00;}", 0x03000100),
        ("{lop3.b32 $0, $1, 0x0f0f0f0f, 0xffff0000, 0xe4;}", 0x40300F0F),
        ("{lop3.b32 $0, $1, 0, 0x80000001, 0xfe;}", 0xC0302011),
    ],
)
def test_ptx_is_evaluated_as_specified(asm, expected):
    pair = torch.tensor([0x2010, 0x4030], dtype=torch.int16)
    got = gluon_on_torch._assemble(asm, "=r,r", [pair], torch.float16, True, 2)
    assert got.view(torch.int16).tolist() == [(expected & 0xFFFF ^ 0x8000) - 0x8000, (expected >> 16 ^ 0x8000) - 0x8000]


def test_every_fp8_is_unpacked_right():
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack([codes, codes.flip(0)], -1).reshape(1, -1).view(torch.int16)
    cvt = "{.reg .b16 h0, h1; mov.b32 {h0, h1}, $2; cvt.rn.f16x2.e4m3x2 $0, h0; cvt.rn.f16x2.e4m3x2 $1, h1;}"
    both = gluon_on_torch._assemble(cvt, "=r,=r,r", [pairs], (torch.float16, torch.float16), True, 2)
    wanted = pairs.view(torch.float8_e4m3fn).half().view(-1, 2, 2)
    for got, half in zip(both, wanted.unbind(1), strict=True):
        torch.testing.assert_close(got.view(-1, 2), half, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda c, b, rows, s: c.wait(b, 0), "waits for a phase that does not end"),
        (
            lambda c, b, rows, s: (c.expect(b, 9000), c.load(rows, [0, 0], b, s), c.wait(b, 0)),
            "bytes that do not come",
        ),
        (lambda c, b, rows, s: (c.expect(b, 64), c.load(rows, [0, 0], b, s)), "more bytes than expected"),
    ],
)
def test_a_copy_that_goes_wrong_is_reported(act, says):
    copies, barrier = gluon_on_torch.Copies(late=True), gluon_on_torch.Shared(torch.zeros(1, dtype=torch.int64))
    descriptor = SimpleNamespace(base=torch.zeros(64, 64, dtype=torch.int16), block_shape=[64, 64], layout=None)
    rows = gluon_on_torch.Rows(descriptor)
    copies.init(barrier, count=1)
    with pytest.raises(AssertionError, match=says):
        act(copies, barrier, rows, gluon_on_torch._allocate(torch.int16, [64, 64], None))


def test_a_product_is_not_there_before_it_is_waited_for():
    products, ones = gluon_on_torch.Products(), torch.ones(4, 4, dtype=torch.float16)
    b = gluon_on_torch.Shared(ones)
    first = products.multiply(ones, b, torch.zeros(4, 4), is_async=True)
    second = products.multiply(ones, b, first, is_async=True)
    products.wait(1, [first])
    assert (first == 4).all()
    assert second.isnan().all()
    products.wait(0, [second])
    assert (second == 8).all()


def test_addresses_outside_of_a_tensor_are_reported():
    pointer = gluon_on_torch.Pointer(torch.zeros(8)) + torch.arange(4, 12)
    with pytest.raises(AssertionError, match="outside of the tensor"):
        gluon_on_torch._load(pointer)
    inside = gluon_on_torch._load(pointer, mask=torch.arange(8) < 4, other=7)
    assert inside.tolist() == [0, 0, 0, 0, 7, 7, 7, 7]


# ---- What the compiler makes of it ----


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("cache", CACHES)
def test_the_compiler_for_sm_90_reports_no_trouble(cache, splits, tmp_path):
    """No spills, two programs in a multiprocessor, wgmma and mma, 16-byte loads, transposed reads."""
    compiled = compile_for_sm_90(cache, splits)
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024
    for instruction in (
        r"wgmma\.mma_async\.sync\.aligned\.m64n16k16\.f32\.f16\.f16",
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32",
        r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans",
        r"cp\.async\.bulk\.tensor\.2d",
    ):
        assert re.search(instruction, compiled.asm["ptx"]), instruction
    # The query is in sight of wgmma, and a slot has been read by all, before either goes on.
    ptx = compiled.asm["ptx"]
    first = ptx.index("wgmma.mma_async")
    assert "bar.sync" in ptx[ptx.rindex("fence.proxy.async", 0, first) : first]
    last_read = ptx.rindex("ldmatrix")
    assert "bar.sync" in ptx[last_read : ptx.index("expect_tx", last_read)]
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    assert stack == local == 0
    assert 2 * 128 * registers <= 65536


def compile_for_sm_90(cache: str, splits: int):
    """What Triton makes of the first launch, on a machine that needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
    types |= {torch.int16: "*i16", torch.uint8: "*u8", float: "fp32", int: "i32"}
    case = Ragged([64], cache, seed=1)
    case.out = case.out.bfloat16()
    function, _, arguments, constants, options = case.launches(wgmma_plan(cache, splits), "nvidia")[0]
    signature = {name: types.get(getattr(a, "dtype", type(a))) for name, a in arguments.items()}
    blocks = arguments["cache"]
    signature["cache"] = f"tensordesc<i16{blocks.block_shape},{blocks.layout!r}>"
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(arguments.values()) if isinstance(a, torch.Tensor)}
    source = GluonASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
