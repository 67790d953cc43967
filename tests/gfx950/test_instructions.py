"""gfx950/, an instruction at a time: each one assembled, run on random and edge-case inputs, and compared with what the
ISA's pseudocode makes of them in exact arithmetic (gfx950_numbers.py), a lane at a time.

Where the pseudocode is no specification (division, stochastic rounding, matrix layouts), the tests say what is asked.
"""

import functools
import itertools
import math
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch

NEEDS = "needs the gfx950 extra: pip install -e '.[gfx950]'"
triton = pytest.importorskip("triton", reason=NEEDS)
gfx950 = pytest.importorskip("gfx950", reason=NEEDS)

from gfx950.decode import decode  # noqa: E402 (after the skips)
from gfx950.findings import Findings, Place  # noqa: E402
from gfx950.machine import PRELOAD_PROLOGUE  # noqa: E402
from gfx950.memory import Lds  # noqa: E402
from gfx950.ops import BINDERS  # noqa: E402
from gfx950.ops.arithmetic import PURE  # noqa: E402
from tests.gfx950 import kernels  # noqa: E402
from tests.gfx950.assembler import (  # noqa: E402
    EXEC,
    LANES,
    LITERAL,
    M0,
    MEMORY_POINTER,
    SCC,
    VCC,
    barrier,
    code_object,
    constant,
    encode,
    opcode,
    run,
    s,
    s_mov,
    s_set,
    v,
    v_mov,
    v_set,
)
from tests.gfx950.numbers import (  # noqa: E402
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    bits_of,
    clip,
    divide,
    draw,
    edges,
    fma,
    maximum,
    minimum,
    same,
    samples,
    signed,
    to_integer,
    ulps,
    value_of,
    width,
)

M16, M32, M64 = 2**16 - 1, 2**32 - 1, 2**64 - 1
I32_MIN, I32_MAX = -(2**31), 2**31 - 1
SDWA, DPP = s(249), s(250)
SOURCES = (2, 4, 6)  # the registers that sources are put in, and the results
RESULT = 8
OLD = 0xC0DE5A5A  # what a result register holds before


# ---- Instructions that are functions of their operands ----


@dataclass(frozen=True)
class Case:
    """A vector instruction: the kinds of its result and sources, and the function on Python numbers.

    ulp: how far off a result may be, in steps of its format; 0 is bit for bit.
    """

    result: str
    sources: tuple[str, ...]
    function: Callable
    ulp: float = 0


def _cases(*groups) -> dict[str, Case]:
    return {
        name: Case(result, tuple(kinds.split()), function)
        for result, kinds, functions in groups
        for name, function in functions.items()
    }


def _first_one(bits: str) -> int:
    return bits.find("1")


def _permuted_byte(data: int, select: int) -> int:
    if select >= 13:
        return 0xFF
    if select == 12:
        return 0
    if select >= 8:
        return 0xFF * (data >> (16 * (select - 8) + 15) & 1)
    return data >> 8 * select & 0xFF


def _perm(a: int, b: int, select: int) -> int:
    return sum(_permuted_byte(a << 32 | b, select >> 8 * i & 0xFF) << 8 * i for i in range(4))


def _u24(x: int) -> int:
    return x & 0xFFFFFF


def _i24(x: int) -> int:
    return signed(x & 0xFFFFFF, 24)


def _median(a, b, c):
    return sorted((a, b, c))[1]


def _median_float(a, b, c):
    """The smallest where one is NaN; −0 is below +0."""
    if a != a or b != b or c != c:
        return minimum(minimum(a, b), c)
    return sorted((a, b, c), key=lambda x: (x, math.copysign(1, x)))[1]


def _bfe_i32(a: int, offset: int, size: int) -> int:
    size &= 31
    field = a >> (offset & 31) & ((1 << size) - 1)
    return signed(field, size) if size else 0


def _rounded(function: Callable) -> Callable:
    """A rounding to an integer, which keeps a zero's sign."""
    return lambda x: math.copysign(float(function(x)), x) if math.isfinite(x) else x


def _fract(kind: str) -> Callable:
    below_one = 1 - 2.0 ** -(FLOATS[kind].mantissa + 1)

    def fract(x):
        if not math.isfinite(x):
            return math.nan
        exact = Fraction(x) - math.floor(x)
        return exact if FLOATS[kind].decode(bits_of(kind, exact)) < 1 else below_one

    return fract


def _half_up(x: float) -> int:
    return math.floor(Fraction(x) + Fraction(1, 2))


def _ldexp(x: float, exponent: int):
    return x if not math.isfinite(x) or x == 0 else Fraction(x) * Fraction(2) ** clip(exponent, -5000, 5000)


def _frexp_mantissa(x):
    return math.frexp(x)[0] if math.isfinite(x) else x


def _frexp_exponent(x):
    return math.frexp(x)[1] if math.isfinite(x) else 0


def _ieee(low: bool) -> Callable:
    """minimum or maximum that a NaN wins."""

    def function(*values):
        if any(x != x for x in values):
            return math.nan
        return functools.reduce(minimum if low else maximum, values)

    return function


def _unfused(kind: str) -> Callable:
    return lambda a, b, c: FLOATS[kind].decode(bits_of(kind, a * b)) + c


def _roundings(kind: str) -> tuple[str, str, dict[str, Callable]]:
    return (kind, kind, {
        f"v_trunc_{kind}": _rounded(math.trunc),
        f"v_ceil_{kind}": _rounded(math.ceil),
        f"v_floor_{kind}": _rounded(math.floor),
        f"v_rndne_{kind}": _rounded(round),
        f"v_fract_{kind}": _fract(kind),
        f"v_frexp_mant_{kind}": _frexp_mantissa,
    })  # fmt: skip


def _float_pairs(kind: str, *names: str) -> tuple[str, str, dict[str, Callable]]:
    functions = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "subrev": lambda a, b: b - a,
        "mul": lambda a, b: a * b,
        "min": minimum,
        "max": maximum,
    }
    return (kind, f"{kind} {kind}", {f"v_{name}_{kind}": functions[name] for name in names})


def _float_triples(kind: str) -> tuple[str, str, dict[str, Callable]]:
    return (kind, f"{kind} {kind} {kind}", {
        f"v_fma_{kind}": fma,
        f"v_min3_{kind}": lambda a, b, c: minimum(minimum(a, b), c),
        f"v_max3_{kind}": lambda a, b, c: maximum(maximum(a, b), c),
        f"v_med3_{kind}": _median_float,
    })  # fmt: skip


def _integer_extremes(kind: str) -> list[tuple[str, str, dict[str, Callable]]]:
    return [
        (kind, f"{kind} {kind}", {f"v_min_{kind}": min, f"v_max_{kind}": max}),
        (kind, f"{kind} {kind} {kind}", {f"v_min3_{kind}": min, f"v_max3_{kind}": max, f"v_med3_{kind}": _median}),
    ]


CASES = _cases(
    ("u32", "u32", {
        "v_mov_b32": lambda a: a,
        "v_not_b32": lambda a: ~a,
        "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
        "v_ffbh_u32": lambda a: _first_one(f"{a:032b}"),
        "v_ffbl_b32": lambda a: _first_one(f"{a:032b}"[::-1]),
        "v_ffbh_i32": lambda a: _first_one(f"{a ^ (M32 if a >> 31 else 0):032b}"),
    }),
    ("u64", "u64", {"v_mov_b64": lambda a: a}),
    ("u32", "u32 u32", {
        "v_add_u32": lambda a, b: a + b,
        "v_sub_u32": lambda a, b: a - b,
        "v_subrev_u32": lambda a, b: b - a,
        "v_and_b32": lambda a, b: a & b,
        "v_or_b32": lambda a, b: a | b,
        "v_xor_b32": lambda a, b: a ^ b,
        "v_xnor_b32": lambda a, b: ~(a ^ b),
        "v_lshlrev_b32": lambda a, b: b << a % 32,
        "v_lshrrev_b32": lambda a, b: b >> a % 32,
        "v_mul_lo_u32": lambda a, b: a * b,
        "v_mul_hi_u32": lambda a, b: a * b >> 32,
        "v_mul_u32_u24": lambda a, b: _u24(a) * _u24(b),
        "v_mul_hi_u32_u24": lambda a, b: _u24(a) * _u24(b) >> 32,
        "v_mul_i32_i24": lambda a, b: _i24(a) * _i24(b),
        "v_mul_hi_i32_i24": lambda a, b: _i24(a) * _i24(b) >> 32,
        "v_bfm_b32": lambda a, b: ((1 << a % 32) - 1) << b % 32,
        "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
        "v_cvt_pk_u16_u32": lambda a, b: min(a, M16) | min(b, M16) << 16,
    }),
    ("i32", "i32 i32", {
        "v_add_i32": lambda a, b: a + b,
        "v_sub_i32": lambda a, b: a - b,
        "v_mul_hi_i32": lambda a, b: a * b >> 32,
        "v_cvt_pk_i16_i32": lambda a, b: clip(a, -32768, 32767) & M16 | clip(b, -32768, 32767) << 16,
    }),
    ("i32", "u32 i32", {"v_ashrrev_i32": lambda a, b: b >> a % 32}),
    *_integer_extremes("u32"), *_integer_extremes("i32"), *_integer_extremes("u16"), *_integer_extremes("i16"),
    ("u32", "u32 u32 u32", {
        "v_add3_u32": lambda a, b, c: a + b + c,
        "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
        "v_add_lshl_u32": lambda a, b, c: (a + b) << c % 32,
        "v_lshl_or_b32": lambda a, b, c: a << b % 32 | c,
        "v_and_or_b32": lambda a, b, c: a & b | c,
        "v_or3_b32": lambda a, b, c: a | b | c,
        "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
        "v_bfe_u32": lambda a, b, c: a >> b % 32 & ((1 << c % 32) - 1),
        "v_perm_b32": _perm,
        "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
        "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c % 4),
        "v_mad_u32_u24": lambda a, b, c: _u24(a) * _u24(b) + c,
        "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    }),
    ("u32", "u16 u16 u32", {"v_mad_u32_u16": lambda a, b, c: a * b + c}),
    ("i32", "i16 i16 i32", {"v_mad_i32_i16": lambda a, b, c: a * b + c}),
    ("i32", "i32 u32 u32", {"v_bfe_i32": _bfe_i32}),
    ("i32", "u32 u32 i32", {"v_mad_i32_i24": lambda a, b, c: _i24(a) * _i24(b) + c}),
    ("u64", "u32 u64", {"v_lshlrev_b64": lambda a, b: b << a % 64, "v_lshrrev_b64": lambda a, b: b >> a % 64}),
    ("i64", "u32 i64", {"v_ashrrev_i64": lambda a, b: b >> a % 64}),
    ("u64", "u64 u32 u64", {"v_lshl_add_u64": lambda a, b, c: (a << b % 8) + c}),
    ("u16", "u16 u16", {
        "v_add_u16": lambda a, b: a + b,
        "v_sub_u16": lambda a, b: a - b,
        "v_subrev_u16": lambda a, b: b - a,
        "v_mul_lo_u16": lambda a, b: a * b,
        "v_lshlrev_b16": lambda a, b: b << a % 16,
        "v_lshrrev_b16": lambda a, b: b >> a % 16,
    }),
    ("i16", "i16 i16", {"v_add_i16": lambda a, b: a + b, "v_sub_i16": lambda a, b: a - b}),
    ("i16", "u16 i16", {"v_ashrrev_i16": lambda a, b: b >> a % 16}),
    ("u16", "u16 u16 u16", {name: lambda a, b, c: a * b + c for name in ("v_mad_u16", "v_mad_legacy_u16")}),
    ("i16", "i16 i16 i16", {name: lambda a, b, c: a * b + c for name in ("v_mad_i16", "v_mad_legacy_i16")}),
    ("u32", "u16 u16", {"v_pack_b32_f16": lambda a, b: a | b << 16}),
    *map(_roundings, ("f16", "f32", "f64")), *map(_float_triples, ("f16", "f32")),
    _float_pairs("f16", "add", "sub", "subrev", "mul", "min", "max"),
    _float_pairs("f32", "add", "sub", "subrev", "mul", "min", "max"),
    _float_pairs("f64", "add", "mul", "min", "max"),
    ("f32", "f32 f32", {"v_mul_legacy_f32": lambda a, b: a * b if a and b else 0.0}),
    ("f32", "f32 f32 f32", {"v_minimum3_f32": _ieee(low=True), "v_maximum3_f32": _ieee(low=False)}),
    ("f64", "f64 f64 f64", {"v_fma_f64": fma}),
    ("f16", "f16 f16 f16", {"v_mad_f16": _unfused("f16")}),
    ("f16", "f16 i16", {"v_ldexp_f16": _ldexp}),
    ("f32", "f32 i32", {"v_ldexp_f32": _ldexp}),
    ("f64", "f64 i32", {"v_ldexp_f64": _ldexp}),
    ("i16", "f16", {"v_frexp_exp_i16_f16": _frexp_exponent, "v_cvt_i16_f16": lambda x: to_integer(x, -32768, 32767)}),
    ("u16", "f16", {"v_cvt_u16_f16": lambda x: to_integer(x, 0, M16)}),
    ("i32", "f32", {
        "v_frexp_exp_i32_f32": _frexp_exponent,
        "v_cvt_i32_f32": lambda x: to_integer(x, I32_MIN, I32_MAX),
        "v_cvt_flr_i32_f32": lambda x: to_integer(x, I32_MIN, I32_MAX, math.floor),
        "v_cvt_rpi_i32_f32": lambda x: to_integer(x, I32_MIN, I32_MAX, _half_up),
    }),
    ("i32", "f64", {
        "v_frexp_exp_i32_f64": _frexp_exponent, "v_cvt_i32_f64": lambda x: to_integer(x, I32_MIN, I32_MAX),
    }),
    ("u32", "f32", {"v_cvt_u32_f32": lambda x: to_integer(x, 0, M32)}),
    ("u32", "f64", {"v_cvt_u32_f64": lambda x: to_integer(x, 0, M32)}),
    ("f32", "i32", {"v_cvt_f32_i32": Fraction}), ("f64", "i32", {"v_cvt_f64_i32": Fraction}),
    ("f32", "u32", {
        "v_cvt_f32_u32": Fraction,
        **{f"v_cvt_f32_ubyte{i}": lambda a, i=i: Fraction(a >> 8 * i & 0xFF) for i in range(4)},
    }),
    ("f64", "u32", {"v_cvt_f64_u32": Fraction}),
    ("f64", "f32", {"v_cvt_f64_f32": lambda a: a}), ("f32", "f64", {"v_cvt_f32_f64": lambda a: a}),
    ("f16", "f32", {"v_cvt_f16_f32": lambda a: a}), ("f32", "f16", {"v_cvt_f32_f16": lambda a: a}),
    ("f32", "bf16", {"v_cvt_f32_bf16": lambda a: a}),
    ("f16", "u16", {"v_cvt_f16_u16": Fraction}), ("f16", "i16", {"v_cvt_f16_i16": Fraction}),
)  # fmt: skip


# ---- Functions that hardware approximates ----


def _flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < F32.tiny else x


def _exp2(x: float) -> float:
    return x if x != x else 0.0 if x < -2000 else math.inf if x >= 1024 else math.pow(2.0, x)


def _log2(x: float) -> float:
    return math.nan if x != x or x < 0 else -math.inf if x == 0 else math.log2(x) if math.isfinite(x) else x


def _rcp(x: float) -> float:
    return x if x != x else math.copysign(math.inf, x) if x == 0 else 1 / x


def _sqrt(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def _rsq(x: float) -> float:
    return math.nan if x != x or x < 0 else _rcp(_sqrt(x)) if x else math.copysign(math.inf, x)


_FUNCTIONS = {"exp": _exp2, "log": _log2, "rcp": _rcp, "sqrt": _sqrt, "rsq": _rsq}
APPROXIMATE = {
    **{f"v_{name}_f16": Case("f16", ("f16",), f, 0.5001) for name, f in _FUNCTIONS.items()},
    # Denormal numbers are zeros to these, going in and coming out.
    **{
        f"v_{name}_f32": Case("f32", ("f32",), lambda x, f=f: _flushed(f(_flushed(x))), 0.5001)
        for name, f in (*_FUNCTIONS.items(), ("rcp_iflag", _rcp))
    },
    **{f"v_{name}_f64": Case("f64", ("f64",), _FUNCTIONS[name], 1) for name in ("rcp", "sqrt", "rsq")},
}
OF_ANGLES = {"v_sin_f32": math.sin, "v_cos_f32": math.cos}


def test_every_function_has_a_case():
    assert PURE.keys() - CASES.keys() - APPROXIMATE.keys() - OF_ANGLES.keys() == set()


# 16-bit results go into the lower half of a register and clear the upper one, but those of the instructions that are
# new in this family keep it: VOP3 with op_sel, and the multiply-adds that are not "legacy". Source: LLVM,
# GCNSubtarget::zeroesHigh16BitsOfDest.
KEEP_UPPER = {
    *(f"v_{name}3_{kind}" for name in ("min", "max", "med") for kind in ("u16", "i16", "f16")),
    *("v_add_i16", "v_sub_i16", "v_mad_u16", "v_mad_i16", "v_mad_f16", "v_fma_f16", "v_div_fixup_f16", "v_mac_f16"),
    *("v_madmk_f16", "v_madak_f16", "v_bitop3_b16"),
}
FORMS = {1: ("VOP1", "VOP3"), 2: ("VOP2", "VOP3"), 3: ("VOP3",)}


def _registers(kinds: tuple[str, ...], operands: list[tuple[int, ...]]) -> dict[int, list[int]]:
    """Sources in their registers, two for 64 bits; with noise above 16 bits."""
    rng, registers = random.Random(7), {}
    for first, kind, column in zip(SOURCES, kinds, zip(*operands, strict=True), strict=False):
        noise = (0xFFFF0000 if width(kind) == 16 else 0) & rng.getrandbits(32)
        registers[first] = [x & M32 | noise for x in column]
        if width(kind) == 64:
            registers[first + 1] = [x >> 32 for x in column]
    return registers


def _vector(form: str, name: str, count: int, **fields) -> bytes:
    """name v8, v2, v4, v6 in an encoding."""
    names = {"VOP1": ("src0",), "VOP2": ("src0", "vsrc1")}.get(form, ("src0", "src1", "src2"))
    sources = dict(zip(names, (v(n) for n in SOURCES[:count]), strict=False))
    return encode(form, name, vdst=v(RESULT), **{**sources, **fields})


def _run_vector(program, kinds: tuple[str, ...], result: str, operands, **options) -> list[int]:
    """The bits of the results, with the upper half of a 16-bit result still in place."""
    rows = [RESULT, RESULT + 1] if width(result) == 64 else [RESULT]
    registers = {**_registers(kinds, operands), RESULT: OLD, RESULT + 1: OLD}
    outcome = run(program, v=registers, read_v=rows, **options)
    return (outcome.pair(RESULT) if width(result) == 64 else outcome.v[RESULT]).tolist()


def _assert_results(kind: str, ours: list[int], theirs: list[int], operands, ulp: float = 0) -> None:
    wrong = [
        f"{[hex(x) for x in given]} → {a:#x}, not {b:#x}"
        for given, a, b in zip(operands, ours, theirs, strict=True)
        if not same(kind, a, b)
    ]
    assert not wrong, f"{len(wrong)} of {len(ours)}: {'; '.join(wrong[:5])}"


def _expected(case: Case, operands: list[tuple[int, ...]]) -> list[int]:
    return [
        bits_of(case.result, case.function(*(value_of(k, x) for k, x in zip(case.sources, given, strict=True))))
        for given in operands
    ]


def _split_upper(name: str, kind: str, ours: list[int]) -> list[int]:
    """16-bit results without the upper half, which is checked."""
    if width(kind) != 16:
        return ours
    upper = OLD >> 16 if name in KEEP_UPPER else 0
    assert {x >> 16 for x in ours} == {upper}
    return [x & M16 for x in ours]


def _forms(name: str, count: int) -> list[str]:
    return [form for form in FORMS[count] if opcode(form, name) is not None]


@pytest.mark.parametrize("name", CASES)
def test_functions(name):
    case = CASES[name]
    forms = _forms(name, len(case.sources))
    assert forms
    for form in forms:
        operands = samples(case.sources, 4 * LANES, (name, form))
        if name == "v_cvt_rpi_i32_f32":  # the sum with 1/2 is exact here, or far from an integer
            operands = [(x,) for (x,) in operands if not 0 < abs(F32.decode(x)) < 0.5] + [(0x3E800000,)] * len(operands)
            operands = operands[: 4 * LANES]
        ours = _run_vector(_vector(form, name, len(case.sources)), case.sources, case.result, operands)
        _assert_results(case.result, _split_upper(name, case.result, ours), _expected(case, operands), operands)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_functions(name):
    case = APPROXIMATE[name]
    operands = samples(case.sources, 8 * LANES, name)
    ours = _split_upper(name, case.result, _run_vector(_vector("VOP1", name, 1), case.sources, case.result, operands))
    for (given,), got in zip(operands, ours, strict=True):
        exact = case.function(value_of(case.sources[0], given))
        assert ulps(case.result, got, exact) <= case.ulp, f"{given:#x} → {got:#x}, not {exact!r}"


@pytest.mark.parametrize("name", OF_ANGLES)
def test_functions_of_angles(name):
    rng = random.Random(name)
    turns = [F32.decode(F32.encode(rng.uniform(-256, 256))) for _ in range(LANES)]
    ours = _run_vector(_vector("VOP1", name, 1), ("f32",), "f32", [(F32.encode(x),) for x in turns])
    exact = [OF_ANGLES[name](2 * math.pi * (x % 1)) for x in turns]
    assert max(abs(F32.decode(a) - b) for a, b in zip(ours, exact, strict=True)) < 2**-24


# ---- Modifiers of VOP3: negation, absolute value, a factor and a clamp on the result; saturation of integers ----

MODIFIED = [
    *("v_add_f32", "v_mul_f32", "v_max_f32", "v_fma_f32", "v_min3_f32", "v_cvt_f32_f16", "v_floor_f32"),
    *("v_add_f16", "v_mul_f16", "v_fma_f16", "v_med3_f16", "v_cvt_f16_f32"),
    *("v_add_f64", "v_mul_f64", "v_fma_f64", "v_cvt_f64_f32"),
]
FACTORS = (1, 2, 4, 0.5)


def _of_ordinary_size(kind: str, rng: random.Random) -> int:
    """Numbers around 1, infinities and NaN: no result is denormal."""
    if rng.random() < 0.1:
        return rng.choice((FLOATS[kind].infinity, FLOATS[kind].infinity | FLOATS[kind].sign, FLOATS[kind].quiet_nan))
    return bits_of(kind, rng.choice((-1, 1)) * rng.uniform(0.125, 1.5))


def _with_sign(x: float, negate: int, absolute: int) -> float:
    x = abs(x) if absolute else x
    return -x if negate else x


def _finished(kind: str, exact, factor: float, clamp: int) -> int:
    value = FLOATS[kind].decode(bits_of(kind, exact)) * factor
    if clamp:
        value = 0.0 if value != value else min(max(value, 0.0), 1.0)
    return bits_of(kind, value)


@pytest.mark.parametrize("name", MODIFIED)
def test_modifiers(name):
    case, rng = CASES[name], random.Random(name)
    count = len(case.sources)
    for turn in range(12):
        neg, absolute, omod, clamp = rng.getrandbits(count), rng.getrandbits(count), turn % 4, turn // 4 % 2
        operands = [tuple(_of_ordinary_size(kind, rng) for kind in case.sources) for _ in range(LANES)]
        instruction = _vector("VOP3", name, count, neg=neg, abs=absolute, omod=omod, clmp=clamp)
        ours = _run_vector(instruction, case.sources, case.result, operands)
        theirs = []
        for given in operands:
            values = [value_of(kind, x) for kind, x in zip(case.sources, given, strict=True)]
            values = [_with_sign(x, neg >> i & 1, absolute >> i & 1) for i, x in enumerate(values)]
            theirs.append(_finished(case.result, case.function(*values), FACTORS[omod], clamp))
        _assert_results(case.result, _split_upper(name, case.result, ours), theirs, operands)


SATURATING = [
    *(f"v_{name}_{kind}" for name in ("add", "sub") for kind in ("u32", "i32", "u16", "i16")),
    *("v_subrev_u32", "v_subrev_u16", "v_mad_u16", "v_mad_i16", "v_mad_u32_u16", "v_mad_i32_i16"),
    *("v_mad_u32_u24", "v_mad_i32_i24", "v_sad_u32"),
]


@pytest.mark.parametrize("name", SATURATING)
def test_saturation_of_integers(name):
    case = CASES[name]
    bits = width(case.result)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if case.result[0] == "i" else (0, (1 << bits) - 1)
    operands = samples(case.sources, 4 * LANES, name)
    instruction = _vector("VOP3", name, len(case.sources), clmp=1)
    ours = _run_vector(instruction, case.sources, case.result, operands)
    clipped = Case(case.result, case.sources, lambda *values: clip(case.function(*values), low, high))
    _assert_results(case.result, _split_upper(name, case.result, ours), _expected(clipped, operands), operands)


def test_a_clamp_without_a_meaning_here_is_refused():
    with pytest.raises(gfx950.UnknownInstructionError, match="v_mul_lo_u32"):
        run(_vector("VOP3", "v_mul_lo_u32", 2, clmp=1), v={2: 1, 4: 1})


HALVES = [
    *("v_mad_u16", "v_mad_i16", "v_mad_f16", "v_fma_f16", "v_min3_f16", "v_max3_i16", "v_med3_u16", "v_add_i16"),
    *("v_sub_i16", "v_mad_legacy_u16", "v_pack_b32_f16", "v_mad_u32_u16"),
]


@pytest.mark.parametrize("name", HALVES)
def test_halves_of_registers(name):
    """op_sel: bits 0 to 2 choose the upper half of a source, bit 3 that of the result; the other half stays."""
    case = CASES[name]
    for select in range(16 if width(case.result) == 16 else 8):
        words = samples(["u32"] * len(case.sources), LANES, (name, select))
        words = [tuple(_without_signalling(x) for x in given) for given in words]
        instruction = _vector("VOP3", name, len(case.sources), opsel=select)
        ours = _run_vector(instruction, ("u32",) * 3, "u32", words)
        halved = [
            tuple(
                x >> (16 * (select >> i & 1)) & M16 if width(kind) == 16 else x
                for i, (kind, x) in enumerate(zip(case.sources, given, strict=True))
            )
            for given in words
        ]
        theirs = _expected(case, halved)
        if width(case.result) == 16:
            upper = select >> 3
            kept = OLD & (M16 if upper else M16 << 16) if upper or name in KEEP_UPPER else 0
            assert {x & (M16 if upper else M16 << 16) for x in ours} == {kept}
            ours = [x >> 16 * upper & M16 for x in ours]
        _assert_results(case.result, ours, theirs, words)


def _without_signalling(word: int) -> int:
    """Halves that are NaN in f16 made quiet."""
    return sum((h | 0x200 if F16.is_nan(h) else h) << p for p in (0, 16) for h in [word >> p & M16])


# ---- Operands that are no vector registers ----

INLINE = {
    **{128 + i: i for i in range(65)},
    **{192 + i: -i for i in range(1, 17)},
    **dict(zip(range(240, 248), (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0), strict=True)),
    248: 1 / (2 * math.pi),
}


def _inline_bits(value: float, kind: str) -> int:
    """A constant is an integer of the operand's width or a float of it, whatever the operand's kind."""
    return bits_of(f"{'f' if isinstance(value, float) else 'u'}{width(kind)}", value)


@pytest.mark.parametrize("kind", ["u32", "u64", "f16", "f64"])
def test_inline_constants(kind):
    name = {"u32": "v_or3_b32", "u64": "v_lshl_add_u64", "f16": "v_max_f16", "f64": "v_max_f64"}[kind]
    operands = {"u32": (0, 1, 2), "u64": (0,), "f16": (0, 1), "f64": (0, 1)}[kind]
    for code, value in INLINE.items():
        if code == 248 and kind == "f64":
            continue  # 1/2π is a value of its own there: see below
        fields = {f"src{i}": s(code) for i in operands}
        if kind == "u64":
            fields |= {"src1": constant(0), "src2": constant(0)}
        ours = _run_vector(encode("VOP3", name, vdst=v(RESULT), **fields), (), kind, [])
        wanted = _inline_bits(value, kind)
        ours = {x & M16 for x in ours} if kind == "f16" else set(ours)
        assert ours == {wanted} or (kind in FLOATS and all(same(kind, x, wanted) for x in ours)), f"{value} in {kind}"


def test_one_over_two_pi():
    """The double of it is not what the ISA's short decimal fraction reads as."""
    ours = _run_vector(encode("VOP3", "v_max_f64", vdst=v(RESULT), src0=s(248), src1=s(248)), (), "f64", [])
    assert {F64.decode(x) for x in ours} == {1 / (2 * math.pi)}


LITERALS = [
    ("VOP1_LIT", "v_mov_b32", "u32", 0xDEADBEEF, 0xDEADBEEF),
    ("VOP1_LIT", "v_mov_b64", "u64", 0x9234ABCD, 0xFFFFFFFF9234ABCD),
    ("VOP1_LIT", "v_trunc_f64", "f64", 0x40590000, 0x4059000000000000),
    ("VOP1_LIT", "v_trunc_f32", "f32", 0x42C80000, 0x42C80000),
    ("VOP1_LIT", "v_trunc_f16", "f16", 0x4900, 0x4900),
]


@pytest.mark.parametrize(("form", "name", "kind", "literal", "bits"), LITERALS)
def test_literals(form, name, kind, literal, bits):
    """32 bits stand for the upper half of a double, and are sign-extended to a 64-bit integer."""
    ours = _run_vector(encode(form, name, vdst=v(RESULT), src0=s(LITERAL), literal=literal), (), kind, [])
    assert set(ours) == {bits}


SCALAR_OPERANDS = [("v_add_u32", "u32"), ("v_mul_f16", "f16"), ("v_add_f64", "f64"), ("v_fma_f32", "f32")]


@pytest.mark.parametrize(("name", "kind"), SCALAR_OPERANDS)
@pytest.mark.parametrize("register", [10, VCC])
def test_scalar_registers_as_operands(name, kind, register):
    case = CASES[name]
    count, rng = len(case.sources), random.Random(name)
    fixed = _of_ordinary_size(kind, rng) if kind in FLOATS else rng.getrandbits(32)
    operands = [(fixed, *rest) for rest in samples(case.sources[1:], LANES, name)]
    program = _vector("VOP3", name, count, src0=s(register))
    scalars = {register: fixed & M32, register + 1: fixed >> 32}
    ours = _run_vector(program, case.sources, case.result, operands, s=scalars)
    _assert_results(kind, _split_upper(name, kind, ours), _expected(case, operands), operands)


def test_the_multiply_adds_into_the_result_and_with_constants():
    cases = [
        ("VOP2", "v_fmac_f32", "f32", {}, lambda a, b, d, k: fma(a, b, d)),
        ("VOP2", "v_fmac_f64", "f64", {}, lambda a, b, d, k: fma(a, b, d)),
        ("VOP2", "v_mac_f16", "f16", {}, lambda a, b, d, k: _unfused("f16")(a, b, d)),
        ("VOP2_LIT", "v_fmamk_f32", "f32", {"literal": 0x3FC00000}, lambda a, b, d, k: fma(a, k, b)),
        ("VOP2_LIT", "v_fmaak_f32", "f32", {"literal": 0x3FC00000}, lambda a, b, d, k: fma(a, b, k)),
        ("VOP2_LIT", "v_madmk_f16", "f16", {"literal": 0x3E00}, lambda a, b, d, k: _unfused("f16")(a, k, b)),
        ("VOP2_LIT", "v_madak_f16", "f16", {"literal": 0x3E00}, lambda a, b, d, k: _unfused("f16")(a, b, k)),
    ]
    for form, name, kind, fields, function in cases:
        operands = samples((kind,) * 3, 4 * LANES, name)
        a, b, d = zip(*operands, strict=True)
        registers = _registers((kind, kind), list(zip(a, b, strict=True)))
        registers |= {RESULT: [x & M32 | OLD & (M16 << 16) if kind == "f16" else x & M32 for x in d]}
        registers |= {RESULT + 1: [x >> 32 for x in d]} if kind == "f64" else {}
        names = {"src0": v(2), "vsrc1": v(4)}
        outcome = run(encode(form, name, vdst=v(RESULT), **names, **fields), v=registers, read_v=[*registers][-2:])
        ours = (outcome.pair(RESULT) if kind == "f64" else outcome.v[RESULT]).tolist()
        case = Case(kind, (kind,) * 3, lambda a, b, d, f=function: f(a, b, d, 1.5))
        _assert_results(kind, _split_upper(name, kind, ours), _expected(case, operands), operands)


# ---- EXEC ----

PARTLY = 0xF0F0_1234_8001_FFFE


def _exec(mask: int) -> dict[int, int]:
    return {EXEC: mask & M32, EXEC + 1: mask >> 32}


def _is_active(mask: int) -> list[bool]:
    return [bool(mask >> lane & 1) for lane in range(LANES)]


@pytest.mark.parametrize("name", [*CASES, *APPROXIMATE])
def test_inactive_lanes_keep_their_registers(name):
    case = CASES.get(name) or APPROXIMATE[name]
    operands = samples(case.sources, LANES, name)
    instruction = _vector(_forms(name, len(case.sources))[0], name, len(case.sources))
    everywhere = _run_vector(instruction, case.sources, case.result, operands)
    somewhere = _run_vector(instruction, case.sources, case.result, operands, s=_exec(PARTLY))
    old = OLD << 32 | OLD if width(case.result) == 64 else OLD
    wanted = [x if active else old for x, active in zip(everywhere, _is_active(PARTLY), strict=True)]
    assert somewhere == wanted


# ---- Masks: carries, comparisons, selection ----

MASKS = [0, M64, 0x5555_5555_AAAA_AAAA, 0x8000_0000_0000_0001]

# name: the exact sum of both sources and the carry that comes in
CARRIES = {
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_addc_co_u32": lambda a, b, c: a + b + c,
    "v_subb_co_u32": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32": lambda a, b, c: b - a - c,
}


@pytest.mark.parametrize("form", ["VOP2", "VOP3SD", "clamped"])
@pytest.mark.parametrize("name", CARRIES)
def test_carries(name, form):
    """In the short form the masks are VCC; in the long one any pair of scalar registers."""
    masks = [x for mask in MASKS for x in _is_active(mask)]
    operands = samples(("u32", "u32"), len(masks), (name, form))
    operands[::5] = [(x, x) for x, _ in operands[::5]]  # so that the carry decides
    if form == "VOP2":
        program, came, went = _vector(form, name, 2), VCC, VCC
    else:
        came, went = 12, 16
        fields = {"sdst": s(went), "clmp": form == "clamped"}
        program = _vector("VOP3SD", name, 2, src2=s(came), **fields)
    scalars = {came: [m & M32 for m in MASKS], came + 1: [m >> 32 for m in MASKS], **_exec(PARTLY)}
    registers = {**_registers(("u32", "u32"), operands), RESULT: OLD}
    outcome = run(program, v=registers, s=scalars, read_v=[RESULT], read_s=[went, went + 1])
    active = _is_active(PARTLY) * len(MASKS)
    exact = [CARRIES[name](a, b, c) for (a, b), c in zip(operands, masks, strict=True)]
    limited = [clip(x, 0, M32) if form == "clamped" else x & M32 for x in exact]
    assert outcome.v[RESULT].tolist() == [x if on else OLD for x, on in zip(limited, active, strict=True)]
    assert outcome.mask(went) == [on and not 0 <= x <= M32 for x, on in zip(exact, active, strict=True)]


@pytest.mark.parametrize(("name", "narrow", "wide"), [("v_mad_u64_u32", "u32", "u64"), ("v_mad_i64_i32", "i32", "i64")])
def test_wide_multiply_adds(name, narrow, wide):
    """The carry is bit 64 of the sum."""
    kinds = (narrow, narrow, wide)
    operands = samples(kinds, 4 * LANES, name)
    registers = {**_registers(kinds, operands), RESULT: OLD, RESULT + 1: OLD}
    program = _vector("VOP3SD", name, 3, sdst=s(16))
    outcome = run(program, v=registers, read_v=[RESULT, RESULT + 1], read_s=[16, 17])
    values = [[value_of(kind, x) for kind, x in zip(kinds, given, strict=True)] for given in operands]
    exact = [a * b + c for a, b, c in values]
    assert outcome.pair(RESULT).tolist() == [x & M64 for x in exact]
    assert outcome.mask(16) == [bool(x >> 64 & 1) for x in exact]


FLOAT_TESTS = {
    "f": lambda less, equal, more: False,
    "lt": lambda less, equal, more: less,
    "eq": lambda less, equal, more: equal,
    "le": lambda less, equal, more: less or equal,
    "gt": lambda less, equal, more: more,
    "lg": lambda less, equal, more: less or more,
    "ge": lambda less, equal, more: more or equal,
    "o": lambda less, equal, more: less or equal or more,
    "u": lambda less, equal, more: not (less or equal or more),
    "nge": lambda less, equal, more: not (more or equal),
    "nlg": lambda less, equal, more: not (less or more),
    "ngt": lambda less, equal, more: not more,
    "nle": lambda less, equal, more: not (less or equal),
    "neq": lambda less, equal, more: not equal,
    "nlt": lambda less, equal, more: not less,
    "tru": lambda less, equal, more: True,
}
INTEGER_TESTS = {name: FLOAT_TESTS[name] for name in ("f", "lt", "eq", "le", "gt", "ge")} | {
    "ne": FLOAT_TESTS["neq"],
    "t": FLOAT_TESTS["tru"],
}
COMPARISONS = {
    **{f"{test}_{kind}": (kind, f) for kind in ("f16", "f32", "f64") for test, f in FLOAT_TESTS.items()},
    **{
        f"{test}_{sign}{bits}": (f"{sign}{bits}", f)
        for sign, bits in itertools.product("iu", (16, 32, 64))
        for test, f in INTEGER_TESTS.items()
    },
}
CLASSES = ("class_f16", "class_f32", "class_f64")


def _class_of(f, code: int) -> int:
    """The bit of a number's class: NaN that signals, quiet NaN, −∞, −normal, −denormal, −0, +0, +denormal, …"""
    x = f.decode(code)
    if x != x:
        return 1 if code >> (f.mantissa - 1) & 1 else 0
    place = 3 if math.isinf(x) else 2 if abs(x) >= f.tiny else 1 if x else 0
    return 5 - place if code & f.sign else 6 + place


def test_every_comparison_has_a_case():
    names = {name.split("_", 2)[2] for name in BINDERS if name.startswith("v_cmp")}
    assert names == {*COMPARISONS, *CLASSES}


def _run_comparison(name: str, form: str, registers) -> tuple[list[bool], list[bool]]:
    """The mask that a comparison writes, and EXEC after it."""
    if form == "VOPC":
        target, program = VCC, encode(form, name, src0=v(2), vsrc1=v(4))
    else:
        target, program = 20, encode(form, name, vdst=s(20), src0=v(2), src1=v(4))
    read = [target, target + 1, EXEC, EXEC + 1]
    outcome = run(program, v=registers, s=_exec(PARTLY), read_s=read)
    return outcome.mask(target), outcome.mask(EXEC)


def _assert_comparison(name: str, registers, passes: list[bool]) -> None:
    """v_cmp writes the lanes that pass, v_cmpx narrows EXEC to them as well; inactive ones never pass."""
    active = _is_active(PARTLY) * (len(passes) // LANES)
    wanted = [a and b for a, b in zip(active, passes, strict=True)]
    for form in ("VOPC", "VOP3_SDST"):
        assert _run_comparison(f"v_cmp_{name}", form, registers) == (wanted, active)
        assert _run_comparison(f"v_cmpx_{name}", form, registers) == (wanted, wanted)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name):
    kind, test = COMPARISONS[name]
    operands = samples((kind, kind), 2 * LANES, name)
    operands[::3] = [(x, x) for x, _ in operands[::3]]
    values = [(value_of(kind, a), value_of(kind, b)) for a, b in operands]
    _assert_comparison(name, _registers((kind, kind), operands), [test(a < b, a == b, a > b) for a, b in values])


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    kind, rng = name[-3:], random.Random(name)
    f = FLOATS[kind]
    codes = [f.infinity + 1, f.sign | f.infinity + 1, *edges(kind)]
    codes = (codes * LANES)[: 4 * LANES]
    wanted = [1 << rng.randrange(10) if i % 3 else rng.getrandbits(10) for i in range(len(codes))]
    passes = [bool(w >> _class_of(f, x) & 1) for x, w in zip(codes, wanted, strict=True)]
    _assert_comparison(name, _registers((kind, "u32"), list(zip(codes, wanted, strict=True))), passes)


@pytest.mark.parametrize("fields", [{}, {"neg": 1}, {"abs": 2}, {"neg": 3, "abs": 1}], ids=str)
def test_selection_by_a_mask(fields):
    operands = samples(("f32", "f32"), LANES, fields)
    mask = MASKS[2]
    chosen = []
    for given, on in zip(operands, _is_active(mask), strict=True):
        x, bit = given[on], 1 << on
        x = x & ~F32.sign if fields.get("abs", 0) & bit else x
        chosen.append(x ^ F32.sign if fields.get("neg", 0) & bit else x)
    scalars = {register: word for base in (VCC, 14) for register, word in ((base, mask & M32), (base + 1, mask >> 32))}
    long = _vector("VOP3", "v_cndmask_b32", 2, src2=s(14), **fields)
    for program in (long, _vector("VOP2", "v_cndmask_b32", 2)) if not fields else (long,):
        assert _run_vector(program, ("f32", "f32"), "f32", operands, s=scalars) == chosen


# ---- Values that move between lanes ----


def _noise(count: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.getrandbits(32) for _ in range(count)]


def test_reading_a_lane_into_a_scalar_register():
    values = _noise(LANES, "readlane")
    first = encode("VOP1", "v_readfirstlane_b32", vdst=v(12), src0=v(2))
    for mask in (M64, PARTLY, 1 << 63, 0):
        lowest = (mask & -mask).bit_length() - 1 if mask else 0
        assert run(first, v={2: values}, s=_exec(mask), read_s=[12]).s[12] == [values[lowest]]
    for lane in (0, 7, 63):
        by_register = encode("VOP3", "v_readlane_b32", vdst=v(12), src0=v(2), src1=s(14))
        by_constant = encode("VOP3", "v_readlane_b32", vdst=v(12), src0=v(2), src1=constant(lane))
        for program in (by_register, by_constant):
            outcome = run(program, v={2: values}, s={14: lane + 64, **_exec(2)}, read_s=[12])
            assert outcome.s[12] == [values[lane]]


@pytest.mark.parametrize("lane", [0, 5, 63])
def test_writing_a_lane(lane):
    """EXEC does not matter."""
    values = _noise(LANES, "writelane")
    program = encode("VOP3", "v_writelane_b32", vdst=v(RESULT), src0=s(12), src1=s(14))
    outcome = run(program, v={RESULT: values}, s={12: 1234, 14: lane | 0x80, **_exec(0)}, read_v=[RESULT])
    assert outcome.v[RESULT].tolist() == [1234 if i == lane else x for i, x in enumerate(values)]


@pytest.mark.parametrize(("name", "shift"), [("v_mbcnt_lo_u32_b32", 0), ("v_mbcnt_hi_u32_b32", 32)])
def test_counting_the_lanes_below(name, shift):
    operands = samples(("u32", "u32"), LANES, name)
    below = [(1 << lane) - 1 >> shift & M32 for lane in range(LANES)]
    wanted = [(mask & b).bit_count() + start & M32 for (mask, start), b in zip(operands, below, strict=True)]
    assert _run_vector(_vector("VOP3", name, 2), ("u32", "u32"), "u32", operands) == wanted


@pytest.mark.parametrize("mask", [M64, PARTLY])
@pytest.mark.parametrize("n", [16, 32])
def test_swaps_of_lanes(n, mask):
    """In each 2n lanes the lower half of src0 and the upper half of vdst change places, whatever EXEC is."""
    a, b = _noise(LANES, "a"), _noise(LANES, "b")
    program = encode("VOP1", f"v_permlane{n}_swap_b32", vdst=v(4), src0=v(2))
    outcome = run(program, v={2: a, 4: b}, s=_exec(mask), read_v=[2, 4])
    assert outcome.v[2].tolist() == [a[i] if i & n else b[i + n] for i in range(LANES)]
    assert outcome.v[4].tolist() == [a[i - n] if i & n else b[i] for i in range(LANES)]


@pytest.mark.parametrize("mask", [M64, PARTLY])
def test_swap_of_registers(mask):
    a, b = _noise(LANES, "a"), _noise(LANES, "b")
    outcome = run(encode("VOP1", "v_swap_b32", vdst=v(4), src0=v(2)), v={2: a, 4: b}, s=_exec(mask), read_v=[2, 4])
    on = _is_active(mask)
    assert outcome.v[2].tolist() == [y if o else x for x, y, o in zip(a, b, on, strict=True)]
    assert outcome.v[4].tolist() == [x if o else y for x, y, o in zip(a, b, on, strict=True)]


ACCUMULATOR_MOVES = [("VOP3P", "v_accvgpr_read", 256 + 4, 6), ("VOP3P", "v_accvgpr_write", 4, 256 + 6)]
ACCUMULATOR_MOVES += [("VOP1", "v_accvgpr_mov_b32", 256 + 4, 256 + 6)]


@pytest.mark.parametrize(("form", "name", "source", "target"), ACCUMULATOR_MOVES)
def test_moves_between_the_register_files(form, name, source, target):
    values = {row: _noise(LANES, row) for row in (4, 6, 260, 262)}
    outcome = run(encode(form, name, vdst=v(6), src0=v(4)), v=values, s=_exec(PARTLY), read_v=[*values])
    lanes = zip(values[source], values[target], _is_active(PARTLY), strict=True)
    wanted = values | {target: [x if on else y for x, y, on in lanes]}
    assert {row: lanes.tolist() for row, lanes in outcome.v.items()} == wanted


@pytest.mark.parametrize("mask", [M64, PARTLY])
def test_permutations_through_lds(mask):
    """Addresses are bytes, wrap around, and have the offset added; inactive lanes give 0 and take nothing."""
    rng, values, on = random.Random(mask), _noise(LANES, "data"), _is_active(mask)
    addresses = [rng.getrandbits(32) if lane % 4 else 4 * rng.randrange(64) for lane in range(LANES)]
    lanes = [(a + 8) % 2**32 // 4 % 64 for a in addresses]
    registers = {2: addresses, 4: values, RESULT: OLD}
    pulled = [values[source] if on[source] else 0 for source in lanes]
    pushed = [0] * LANES
    for lane in range(LANES):
        if on[lane]:
            pushed[lanes[lane]] = values[lane]
    for name, wanted in (("ds_bpermute_b32", pulled), ("ds_permute_b32", pushed)):
        program = encode("DS", name, vdst=v(RESULT), addr=v(2), data0=v(4), offset0=8)
        outcome = run(program, v=registers, s=_exec(mask), read_v=[RESULT])
        assert outcome.v[RESULT].tolist() == [x if o else OLD for x, o in zip(wanted, on, strict=True)]


SWIZZLES = [(0x80E4 & 0xFF00 | 0b00_01_10_11, "quad"), (0x001F, ""), (0x041F, ""), (0x0010, ""), (0x3DF5, "")]


@pytest.mark.parametrize(("pattern", "what"), SWIZZLES)
@pytest.mark.parametrize("mask", [M64, PARTLY])
def test_swizzles(pattern, what, mask):
    values, on = _noise(LANES, pattern), _is_active(mask)
    if what == "quad":
        sources = [lane // 4 * 4 + (pattern >> 2 * (lane % 4) & 3) for lane in range(LANES)]
    else:
        keep, put, flip = pattern & 31, pattern >> 5 & 31, pattern >> 10 & 31
        sources = [lane // 32 * 32 + ((lane % 32 & keep | put) ^ flip) for lane in range(LANES)]
    program = encode("DS", "ds_swizzle_b32", vdst=v(RESULT), addr=v(2), offset0=pattern & 255, offset1=pattern >> 8)
    outcome = run(program, v={2: values, RESULT: OLD}, s=_exec(mask), read_v=[RESULT])
    wanted = [(values[i] if on[i] else 0) if o else OLD for i, o in zip(sources, on, strict=True)]
    assert outcome.v[RESULT].tolist() == wanted


# ---- DPP ----

# control code: the lane that a lane reads, None where there is none
DPP_PATTERNS: dict[int, Callable[[int], int | None]] = {
    0b11_10_01_00: lambda i: i,
    0b00_01_10_11: lambda i: i ^ 3,
    0b01_11_00_10: lambda i: i // 4 * 4 + (2, 0, 3, 1)[i % 4],
    **{0x100 + n: lambda i, n=n: i + n if i % 16 + n < 16 else None for n in (1, 4, 15)},  # row_shl
    **{0x110 + n: lambda i, n=n: i - n if i % 16 >= n else None for n in (1, 8, 15)},  # row_shr
    **{0x120 + n: lambda i, n=n: i // 16 * 16 + (i - n) % 16 for n in (1, 5, 15)},  # row_ror
    0x130: lambda i: i + 1 if i < 63 else None,  # wave_shl
    0x134: lambda i: (i + 1) % 64,  # wave_rol
    0x138: lambda i: i - 1 if i else None,  # wave_shr
    0x13C: lambda i: (i - 1) % 64,  # wave_ror
    0x140: lambda i: i ^ 15,  # row_mirror
    0x141: lambda i: i ^ 7,  # row_half_mirror
    0x142: lambda i: i // 16 * 16 - 1 if i >= 16 else None,  # row_bcast:15
    0x143: lambda i: 31 if i >= 32 else None,  # row_bcast:31
    **{0x150 + n: lambda i, n=n: i // 16 * 16 + n for n in (0, 6, 15)},  # row_newbcast
}
DPP_FIELDS = [(15, 15, 0), (15, 15, 1), (0b1010, 15, 0), (15, 0b0110, 1), (0b0111, 0b1011, 0)]


@pytest.mark.parametrize(("row_mask", "bank_mask", "bound"), DPP_FIELDS)
@pytest.mark.parametrize("control", DPP_PATTERNS, ids=hex)
def test_lane_patterns(control, row_mask, bank_mask, bound):
    """Rows of 16 and banks of 4 lanes may be masked; a lane without a source reads 0 or, unbound, stays as it is."""
    values = _noise(LANES, control)
    wanted = []
    for lane in range(LANES):
        source = DPP_PATTERNS[control](lane)
        on = row_mask >> lane // 16 & bank_mask >> lane % 16 // 4 & 1 and (source is not None or bound)
        wanted.append((0 if source is None else values[source]) if on else OLD)
    fields = {"vsrc0": v(2), "dpp": control, "row_mask": row_mask, "bank_mask": bank_mask, "bc": bound, "src0": DPP}
    ours = run(encode("VOP1_DPP16", "v_mov_b32", vdst=v(RESULT), **fields), v={2: values, RESULT: OLD}, read_v=[RESULT])
    assert ours.v[RESULT].tolist() == wanted
    in_place = run(encode("VOP1_DPP16", "v_mov_b32", vdst=v(2), **fields), v={2: values}, read_v=[2])
    assert in_place.v[2].tolist() == [x if w == OLD else w for x, w in zip(values, wanted, strict=True)]


@pytest.mark.parametrize("name", ["v_add_u32", "v_sub_f32", "v_mul_f16", "v_lshlrev_b32", "v_min_i32"])
def test_arithmetic_on_other_lanes(name):
    case, rng = CASES[name], random.Random(name)
    is_float = case.sources[0] in FLOATS
    operands = samples(case.sources, LANES, name)
    for signs in range(16 if is_float else 1):
        bits = {f"src{i}_{what}": signs >> 2 * i + j & 1 for i in (0, 1) for j, what in enumerate(("neg", "abs"))}
        control = rng.choice([0x101, 0x111, 0x1B, 0x140])
        fields = {"src0": DPP, "vsrc0": v(2), "vsrc1": v(4), "dpp": control, "row_mask": 15, "bank_mask": 15, "bc": 1}
        program = encode("VOP2_DPP16", name, vdst=v(RESULT), **fields, **(bits if is_float else {}))
        ours = _split_upper(name, case.result, _run_vector(program, case.sources, case.result, operands))
        theirs = []
        for lane in range(LANES):
            place = DPP_PATTERNS[control](lane)
            pair = [0 if place is None else operands[place][0], operands[lane][1]]
            pair = [value_of(kind, x) for kind, x in zip(case.sources, pair, strict=True)]
            if is_float:
                pair = [_with_sign(x, bits[f"src{i}_neg"], bits[f"src{i}_abs"]) for i, x in enumerate(pair)]
            theirs.append(bits_of(case.result, case.function(*pair)))
        _assert_results(case.result, ours, theirs, operands)


# ---- SDWA ----

PARTS = [
    (0, 8),
    (8, 8),
    (16, 8),
    (24, 8),
    (0, 16),
    (16, 16),
    (0, 32),
]  # bytes 0 to 3, words 0 and 1, all: (shift, bits)


def _part(word: int, select: int, extend: int) -> int:
    shift, bits = PARTS[select]
    x = word >> shift & ((1 << bits) - 1)
    return signed(x, bits) & M32 if extend else x


def _placed(value: int, select: int, unused: int, old: int) -> int:
    """A result in its part of a register: the rest is 0, above it the sign, or what it was."""
    shift, bits = PARTS[select]
    x = value & ((1 << bits) - 1)
    if unused == 1:
        return (signed(x, bits) << shift) & M32
    hole = M32 & ~(((1 << bits) - 1) << shift)
    return x << shift | (old & hole if unused == 2 else 0)


@pytest.mark.parametrize("name", ["v_add_u32", "v_mul_f16", "v_add_u16", "v_max_i16", "v_sub_f32", "v_lshrrev_b32"])
def test_parts_of_registers(name):
    case, rng = CASES[name], random.Random(name)
    is_float = case.sources[0] in FLOATS
    parts = (6,) if case.sources[0] == "f32" else (0, 1, 2, 3, 4, 5, 6)
    for turn in range(40):
        words = [tuple(map(_without_signalling, pair)) for pair in samples(("u32", "u32"), LANES, (name, turn))]
        fields = {f"src{i}_sel": rng.choice(parts) for i in (0, 1)} | {"dst_sel": turn % 7, "dst_unused": turn % 3}
        fields |= {f"src{i}_{'neg' if is_float else 'sext'}": rng.getrandbits(1) for i in (0, 1)}
        program = encode("VOP2_SDWA", name, vdst=v(RESULT), src0=SDWA, vsrc0=v(2), vsrc1=v(4), **fields)
        ours = _run_vector(program, ("u32", "u32"), "u32", words)
        theirs = {}
        for lane, pair in enumerate(words):
            given = [_part(x, fields[f"src{i}_sel"], fields.get(f"src{i}_sext", 0)) for i, x in enumerate(pair)]
            values = [value_of(kind, x) for kind, x in zip(case.sources, given, strict=True)]
            if is_float:
                values = [_with_sign(x, fields[f"src{i}_neg"], 0) for i, x in enumerate(values)]
            result = bits_of(case.result, case.function(*values))
            if not (is_float and FLOATS[case.result].is_nan(result)):  # of which any part may be anything
                theirs[lane] = _placed(result, fields["dst_sel"], fields["dst_unused"], OLD)
        assert len(theirs) > LANES // 2
        _assert_results("u32", [ours[i] for i in theirs], list(theirs.values()), [words[i] for i in theirs])


def test_parts_of_scalar_registers_and_masks():
    """s0 and s1 say that a source is scalar, sd that a comparison writes another mask than VCC."""
    values = _noise(LANES, "sdwa")
    program = encode("VOP2_SDWA", "v_add_u32", vdst=v(RESULT), src0=SDWA, vsrc0=v(12), vsrc1=v(2), s0=1, src0_sel=5,
                     src1_sel=1, dst_sel=6)  # fmt: skip
    outcome = run(program, v={2: values}, s={12: 0xABCD1234}, read_v=[RESULT])
    assert outcome.v[RESULT].tolist() == [0xABCD + (x >> 8 & 0xFF) for x in values]
    fields = {"src0": SDWA, "vsrc0": v(2), "vsrc1": v(4), "src0_sel": 3, "src1_sel": 6}
    for chosen, target in (({}, VCC), ({"sd": 1, "sdst": s(20)}, 20)):
        program = encode("VOPC_SDWA_SDST", "v_cmp_lt_u32", **fields, **chosen)
        outcome = run(program, v={2: values, 4: 128}, read_s=[target, target + 1])
        assert outcome.mask(target) == [x >> 24 < 128 for x in values]


@pytest.mark.parametrize("part", range(4))
def test_carries_of_parts(part):
    values = _noise(LANES, "carry")
    fields = {"src0": SDWA, "vsrc0": v(2), "vsrc1": v(4), "src0_sel": part, "src1_sel": 6, "dst_sel": 6}
    program = encode("VOP2_SDWA", "v_add_co_u32", vdst=v(RESULT), **fields)
    outcome = run(program, v={2: values, 4: M32 - 99}, read_v=[RESULT], read_s=[VCC, VCC + 1])
    exact = [(x >> 8 * part & 255) + M32 - 99 for x in values]
    assert outcome.v[RESULT].tolist() == [x & M32 for x in exact]
    assert outcome.mask(VCC) == [x > M32 for x in exact]


# ---- Scalar instructions ----

SCALAR_A, SCALAR_B, SCALAR_D = 4, 6, 8


@dataclass(frozen=True)
class Scalar:
    """A scalar instruction: bits of the result and of the sources, and the function of them.

    nonzero: SCC tells whether the result is not zero. carries: the function takes SCC too and gives (result, SCC).
    """

    bits: int
    sources: tuple[int, ...]
    function: Callable
    nonzero: bool = False
    carries: bool = False


def _search(text: str, what: str) -> int:
    return text.find(what)


def _bits_text(a: int, bits: int) -> str:
    return f"{a:0{bits}b}"


def _quads(a: int, bits: int) -> list[bool]:
    return [a >> i & 15 != 0 for i in range(0, bits, 4)]


def _scalar_singles() -> dict[str, Scalar]:
    cases = {
        "s_sext_i32_i8": Scalar(32, (32,), lambda a: signed(a & 0xFF, 8)),
        "s_sext_i32_i16": Scalar(32, (32,), lambda a: signed(a & M16, 16)),
        "s_abs_i32": Scalar(32, (32,), lambda a: abs(signed(a, 32)), nonzero=True),
        "s_bitreplicate_b64_b32": Scalar(64, (32,), lambda a: int("".join(2 * bit for bit in _bits_text(a, 32)), 2)),
        "s_flbit_i32": Scalar(32, (32,), lambda a: _search(_bits_text(a ^ (M32 if a >> 31 else 0), 32), "1")),
        "s_flbit_i32_i64": Scalar(32, (64,), lambda a: _search(_bits_text(a ^ (M64 if a >> 63 else 0), 64), "1")),
    }
    for bits in (32, 64):
        size = (bits,)
        cases |= {
            f"s_mov_b{bits}": Scalar(bits, size, lambda a: a),
            f"s_not_b{bits}": Scalar(bits, size, lambda a: ~a, nonzero=True),
            f"s_brev_b{bits}": Scalar(bits, size, lambda a, n=bits: int(_bits_text(a, n)[::-1], 2)),
            f"s_bcnt0_i32_b{bits}": Scalar(32, size, lambda a, n=bits: _bits_text(a, n).count("0"), nonzero=True),
            f"s_bcnt1_i32_b{bits}": Scalar(32, size, lambda a, n=bits: _bits_text(a, n).count("1"), nonzero=True),
            f"s_ff0_i32_b{bits}": Scalar(32, size, lambda a, n=bits: _search(_bits_text(a, n)[::-1], "0")),
            f"s_ff1_i32_b{bits}": Scalar(32, size, lambda a, n=bits: _search(_bits_text(a, n)[::-1], "1")),
            f"s_flbit_i32_b{bits}": Scalar(32, size, lambda a, n=bits: _search(_bits_text(a, n), "1")),
            f"s_quadmask_b{bits}": Scalar(
                bits, size, lambda a, n=bits: sum(on << i for i, on in enumerate(_quads(a, n))), nonzero=True
            ),
            f"s_wqm_b{bits}": Scalar(
                bits, size, lambda a, n=bits: sum(15 * on << 4 * i for i, on in enumerate(_quads(a, n))), nonzero=True
            ),
        }
    return cases


BITWISE = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def _bfe(bits: int, is_signed: bool) -> Callable:
    def extract(a, control):
        size = control >> 16 & 127
        field = (signed(a, bits) if is_signed else a) >> control % bits & ((1 << size) - 1)
        return signed(field, size) if is_signed and size else field

    return extract


def _overflows(exact: int) -> bool:
    return not I32_MIN <= exact <= I32_MAX


def _signed_pair(function: Callable) -> Callable:
    return lambda a, b, *scc: function(signed(a, 32), signed(b, 32))


def _scalar_pairs() -> dict[str, Scalar]:
    cases = {
        "s_bfm_b32": Scalar(32, (32, 32), lambda a, b: ((1 << a % 32) - 1) << b % 32),
        "s_bfm_b64": Scalar(64, (32, 32), lambda a, b: ((1 << a % 64) - 1) << b % 64),
        "s_mul_i32": Scalar(32, (32, 32), lambda a, b: a * b),
        "s_mul_hi_u32": Scalar(32, (32, 32), lambda a, b: a * b >> 32),
        "s_mul_hi_i32": Scalar(32, (32, 32), _signed_pair(lambda a, b: a * b >> 32)),
        "s_absdiff_i32": Scalar(32, (32, 32), lambda a, b: abs(signed(a - b & M32, 32)), nonzero=True),
        "s_pack_ll_b32_b16": Scalar(32, (32, 32), lambda a, b: (b & M16) << 16 | a & M16),
        "s_pack_lh_b32_b16": Scalar(32, (32, 32), lambda a, b: (b >> 16) << 16 | a & M16),
        "s_pack_hh_b32_b16": Scalar(32, (32, 32), lambda a, b: (b >> 16) << 16 | a >> 16),
        "s_add_u32": Scalar(32, (32, 32), lambda a, b, c: (a + b, a + b > M32), carries=True),
        "s_sub_u32": Scalar(32, (32, 32), lambda a, b, c: (a - b, b > a), carries=True),
        "s_addc_u32": Scalar(32, (32, 32), lambda a, b, c: (a + b + c, a + b + c > M32), carries=True),
        "s_subb_u32": Scalar(32, (32, 32), lambda a, b, c: (a - b - c, b + c > a), carries=True),
        "s_add_i32": Scalar(32, (32, 32), _signed_pair(lambda a, b: (a + b, _overflows(a + b))), carries=True),
        "s_sub_i32": Scalar(32, (32, 32), _signed_pair(lambda a, b: (a - b, _overflows(a - b))), carries=True),
        "s_min_i32": Scalar(32, (32, 32), _signed_pair(lambda a, b: (min(a, b), a < b)), carries=True),
        "s_max_i32": Scalar(32, (32, 32), _signed_pair(lambda a, b: (max(a, b), a >= b)), carries=True),
        "s_min_u32": Scalar(32, (32, 32), lambda a, b, c: (min(a, b), a < b), carries=True),
        "s_max_u32": Scalar(32, (32, 32), lambda a, b, c: (max(a, b), a >= b), carries=True),
    }
    for n in (1, 2, 3, 4):
        cases[f"s_lshl{n}_add_u32"] = Scalar(
            32, (32, 32), lambda a, b, c, n=n: ((a << n) + b, (a << n) + b > M32), carries=True
        )
    for bits in (32, 64):
        shift = (bits, 32)
        cases |= {f"s_{name}_b{bits}": Scalar(bits, (bits, bits), f, nonzero=True) for name, f in BITWISE.items()}
        cases |= {
            f"s_lshl_b{bits}": Scalar(bits, shift, lambda a, b, n=bits: a << b % n, nonzero=True),
            f"s_lshr_b{bits}": Scalar(bits, shift, lambda a, b, n=bits: a >> b % n, nonzero=True),
            f"s_ashr_i{bits}": Scalar(bits, shift, lambda a, b, n=bits: signed(a, n) >> b % n, nonzero=True),
            f"s_bfe_u{bits}": Scalar(bits, shift, _bfe(bits, False), nonzero=True),
            f"s_bfe_i{bits}": Scalar(bits, shift, _bfe(bits, True), nonzero=True),
            f"s_cselect_b{bits}": Scalar(bits, (bits, bits), lambda a, b, c: (a if c else b, c), carries=True),
        }
    return cases


SCALARS = {**_scalar_singles(), **_scalar_pairs()}


def _scalar_inputs(sources: tuple[int, ...], name: str, count: int = 48) -> tuple[list[tuple[int, ...]], list[int]]:
    rng = random.Random(name)
    operands = samples([f"u{bits}" for bits in sources], count, name)
    if "bfe" in name:  # fields of at most the register
        bits = sources[0]
        operands = [(a, rng.randrange(bits) | rng.randrange(bits + 1) << 16 | b & 0xFF80FF00) for a, b in operands]
    elif len(sources) == 2 and sources[0] == sources[1]:
        operands[::8] = [(a, a) for a, _ in operands[::8]]
    return operands, [rng.getrandbits(1) for _ in operands]


def _scalar_registers(operands: list[tuple[int, ...]]) -> dict[int, list[int]]:
    registers = {}
    for first, column in zip((SCALAR_A, SCALAR_B), zip(*operands, strict=True), strict=False):
        registers |= {first: [x & M32 for x in column], first + 1: [x >> 32 for x in column]}
    return registers


def _wide(outcome, code: int, bits: int) -> list[int]:
    low, high = outcome.s[code], outcome.s[code + 1]
    return [x | (y << 32 if bits == 64 else 0) for x, y in zip(low, high, strict=True)]


@pytest.mark.parametrize("name", SCALARS)
def test_scalar_functions(name):
    case = SCALARS[name]
    operands, conditions = _scalar_inputs(case.sources, name)
    fields = {"sdst": s(SCALAR_D), "ssrc0": s(SCALAR_A)} | ({"ssrc1": s(SCALAR_B)} if len(case.sources) == 2 else {})
    program = encode("SOP2" if len(case.sources) == 2 else "SOP1", name, **fields)
    registers = {**_scalar_registers(operands), SCALAR_D: OLD, SCALAR_D + 1: OLD, SCC: conditions}
    outcome = run(program, s=registers, read_s=[SCALAR_D, SCALAR_D + 1, SCC])
    for i, (given, c) in enumerate(zip(operands, conditions, strict=True)):
        value, scc = case.function(*given, c) if case.carries else (case.function(*given), c)
        value &= (1 << case.bits) - 1
        scc = value != 0 if case.nonzero else scc
        ours = _wide(outcome, SCALAR_D, case.bits)[i], outcome.s[SCC][i]
        assert ours == (value, int(scc)), f"{name} {[hex(x) for x in given]}, SCC {c}"
    if case.bits == 32:
        assert set(outcome.s[SCALAR_D + 1]) == {OLD}


SAVEEXEC = {**BITWISE, "andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
EXEC_CHANGES = {
    **{f"s_{name}_saveexec_b64": (f, False) for name, f in SAVEEXEC.items()},
    **{f"s_{name}_wrexec_b64": (SAVEEXEC[name], True) for name in ("andn1", "andn2")},
}


@pytest.mark.parametrize("name", EXEC_CHANGES)
def test_scalar_changes_of_exec(name):
    """…_saveexec gives what EXEC was, …_wrexec what it becomes."""
    function, gives_new = EXEC_CHANGES[name]
    operands = [*samples(("u64", "u64"), 30, name), (0, 0), (M64, M64), (0, M64), (M64, 0)]
    registers = {
        **_scalar_registers([(a,) for a, _ in operands]),
        EXEC: [b & M32 for _, b in operands],
        EXEC + 1: [b >> 32 for _, b in operands],
    }
    program = encode("SOP1", name, sdst=s(SCALAR_D), ssrc0=s(SCALAR_A))
    outcome = run(program, s=registers, read_s=[SCALAR_D, SCALAR_D + 1, EXEC, EXEC + 1, SCC])
    new = [function(a, b) & M64 for a, b in operands]
    assert _wide(outcome, EXEC, 64) == new
    assert _wide(outcome, SCALAR_D, 64) == (new if gives_new else [b for _, b in operands])
    assert outcome.s[SCC] == [int(x != 0) for x in new]


SCALAR_TESTS = {"eq": "eq", "lg": "neq", "gt": "gt", "ge": "ge", "lt": "lt", "le": "le"}


def _compared(test: str, kind: str, a: int, b: int) -> int:
    a, b = value_of(kind, a), value_of(kind, b)
    return int(FLOAT_TESTS[SCALAR_TESTS[test]](a < b, a == b, a > b))


@pytest.mark.parametrize(
    ("test", "kind"), [*itertools.product(SCALAR_TESTS, ("i32", "u32")), ("eq", "u64"), ("lg", "u64")]
)
def test_scalar_comparisons(test, kind):
    operands = samples((kind, kind), 40, test)
    operands[::4] = [(a, a) for a, _ in operands[::4]]
    program = encode("SOPC", f"s_cmp_{test}_{kind}", ssrc0=s(SCALAR_A), ssrc1=s(SCALAR_B))
    outcome = run(program, s=_scalar_registers(operands), read_s=[SCC])
    assert outcome.s[SCC] == [_compared(test, kind, a, b) for a, b in operands]


@pytest.mark.parametrize("test", SCALAR_TESTS)
@pytest.mark.parametrize("kind", ["i32", "u32"])
@pytest.mark.parametrize("number", [0, 7, 0x7FFF, 0x8000, 0xFFFF])
def test_scalar_comparisons_with_a_constant(test, kind, number):
    value = signed(number, 16) & M32 if kind == "i32" else number
    values = [value, value + 1 & M32, value - 1 & M32, 0, 1 << 31, M32]
    program = encode("SOPK", f"s_cmpk_{test}_{kind}", sdst=s(SCALAR_A), simm16=number)
    outcome = run(program, s={SCALAR_A: values}, read_s=[SCC])
    assert outcome.s[SCC] == [_compared(test, kind, x, value) for x in values]


@pytest.mark.parametrize("number", [0, 3, 0x7FFF, 0x8000, 0xFFFF])
def test_scalar_arithmetic_with_a_constant(number):
    k = signed(number, 16)
    values = [*edges("u32"), 12345]
    conditions = [i % 2 for i in range(len(values))]
    wanted = {
        "s_movk_i32": [(k, c) for _, c in zip(values, conditions, strict=True)],
        "s_cmovk_i32": [(k if c else x, c) for x, c in zip(values, conditions, strict=True)],
        "s_addk_i32": [(x + k, _overflows(signed(x, 32) + k)) for x in values],
        "s_mulk_i32": [(x * k, c) for x, c in zip(values, conditions, strict=True)],
    }
    for name, results in wanted.items():
        program = encode("SOPK", name, sdst=s(SCALAR_A), simm16=number)
        outcome = run(program, s={SCALAR_A: values, SCC: conditions}, read_s=[SCALAR_A, SCC])
        ours = list(zip(outcome.s[SCALAR_A], outcome.s[SCC], strict=True))
        assert ours == [(x & M32, int(c)) for x, c in results], name


@pytest.mark.parametrize("bits", [32, 64])
def test_scalar_moves_and_tests_of_bits(bits):
    operands = [(a, b) for a, b in samples((f"u{bits}", "u32"), 40, bits)]
    conditions = [i % 2 for i in range(len(operands))]
    registers = {**_scalar_registers(operands), SCALAR_D: 0x0F0F0F0F, SCALAR_D + 1: 0x33333333, SCC: conditions}
    old, read = (0x33333333 << 32 | 0x0F0F0F0F) & ((1 << bits) - 1), [SCALAR_D, SCALAR_D + 1, SCC]
    set_ = {
        f"s_bitset1_b{bits}": [old | 1 << b % bits for _, b in operands],
        f"s_bitset0_b{bits}": [old & ~(1 << b % bits) for _, b in operands],
    }
    for name, wanted in set_.items():
        outcome = run(encode("SOP1", name, sdst=s(SCALAR_D), ssrc0=s(SCALAR_B)), s=registers, read_s=read)
        assert (_wide(outcome, SCALAR_D, bits), outcome.s[SCC]) == (wanted, conditions), name
    outcome = run(encode("SOP1", f"s_cmov_b{bits}", sdst=s(SCALAR_D), ssrc0=s(SCALAR_A)), s=registers, read_s=read)
    assert _wide(outcome, SCALAR_D, bits) == [a if c else old for (a, _), c in zip(operands, conditions, strict=True)]
    for wanted in (0, 1):
        program = encode("SOPC", f"s_bitcmp{wanted}_b{bits}", ssrc0=s(SCALAR_A), ssrc1=s(SCALAR_B))
        outcome = run(program, s=registers, read_s=[SCC])
        assert outcome.s[SCC] == [int(a >> b % bits & 1 == wanted) for a, b in operands]


def test_scalar_sources_that_are_states():
    """VCCZ, EXECZ and SCC as operands, and constants in 64 bits."""
    for code, wanted in ((251, [1, 0, 0]), (252, [0, 0, 0]), (253, [0, 1, 1])):
        scalars = {VCC: [0, 1, 0], VCC + 1: [0, 0, 1 << 31], SCC: [0, 1, 1]}
        assert run(s_mov(10, code), s=scalars, read_s=[10]).s[10] == wanted
    assert run(s_mov(10, 252), s=_exec(0), read_s=[10]).s[10] == [1]
    for code, value in ((193, M64), (242, 0x3FF0000000000000), (192, 64)):
        outcome = run(encode("SOP1", "s_mov_b64", sdst=s(10), ssrc0=s(code)), read_s=[10, 11])
        assert _wide(outcome, 10, 64) == [value]
    literal = encode("SOP1_LIT", "s_mov_b64", sdst=s(10), ssrc0=s(LITERAL), literal=0x80000001)
    assert _wide(run(literal, read_s=[10, 11]), 10, 64) == [0xFFFFFFFF80000001]


BRANCHES = [
    ("s_branch", {}, True),
    *((f"s_cbranch_scc{c}", {SCC: value}, c == value) for c in (0, 1) for value in (0, 1)),
    *(("s_cbranch_vccz", {VCC: low, VCC + 1: high}, not (low or high)) for low, high in ((0, 0), (1, 0), (0, 1))),
    *(("s_cbranch_vccnz", {VCC: low, VCC + 1: high}, bool(low or high)) for low, high in ((0, 0), (1, 0), (0, 1))),
    *(("s_cbranch_execz", {EXEC: low, EXEC + 1: high}, not (low or high)) for low, high in ((0, 0), (1, 0), (0, 1))),
    *(("s_cbranch_execnz", {EXEC: low, EXEC + 1: high}, bool(low or high)) for low, high in ((0, 0), (1, 0), (0, 1))),
]


@pytest.mark.parametrize(("name", "scalars", "taken"), BRANCHES)
def test_branches(name, scalars, taken):
    """A taken branch skips the instruction after it."""
    program = s_mov(10, 128) + encode("SOPP", name, simm16=1) + s_mov(10, 129) + s_mov(11, 129)
    outcome = run(program, s={12: 0, **scalars}, read_s=[10, 11])
    assert (outcome.s[10], outcome.s[11]) == ([0 if taken else 1], [1])


def _jump_over_one(*jump: bytes) -> bytes:
    """s_getpc, an addition and the jump, to behind the move after it; and a move there."""
    return encode("SOP1", "s_getpc_b64", sdst=s(12)) + _add_constant(12, 12) + b"".join(jump)


def test_jumps_through_registers():
    """s_getpc and s_call give the address of the next instruction, s_setpc and s_swappc go where a register says."""
    skipped, done = s_mov(10, 129), s_mov(11, 129)
    to_register = _jump_over_one(encode("SOP1", "s_setpc_b64", ssrc0=s(12))) + skipped + done
    assert run(to_register, s={10: 5, 11: 5}, read_s=[10, 11]).s == {10: [5], 11: [1]}
    call = encode("SOPK", "s_call_b64", sdst=s(14), simm16=1) + skipped + done
    assert run(call, s={10: 5, 11: 5}, read_s=[10, 11]).s == {10: [5], 11: [1]}
    swap = _jump_over_one(encode("SOP1", "s_swappc_b64", sdst=s(14), ssrc0=s(12))) + skipped
    back = encode("SOP2", "s_sub_u32", sdst=s(14), ssrc0=s(12), ssrc1=s(14))
    assert run(swap + back, s={10: 5}, read_s=[10, 14]).s == {10: [5], 14: [4]}


FAULTS = {
    "jumps out of its code": [
        encode("SOPP", "s_branch", simm16=0x7000),
        encode("SOPP", "s_branch", simm16=-200 & 0xFFFF),
        encode("SOPK", "s_call_b64", sdst=s(14), simm16=0x7000),
    ],
    "outside the code": [
        encode("SOP1", "s_setpc_b64", ssrc0=s(12)),
        encode("SOP1", "s_swappc_b64", sdst=s(14), ssrc0=s(12)),
    ],
    "instructions without a barrier or an end": [encode("SOPP", "s_branch", simm16=-1 & 0xFFFF)],
    "an assertion of the kernel failed": [encode("SOPP", "s_trap", simm16=2)],
}


@pytest.mark.parametrize(("says", "program"), [(says, program) for says, some in FAULTS.items() for program in some])
def test_what_cannot_go_on(monkeypatch, says, program):
    monkeypatch.setattr("gfx950.machine.MAX_INSTRUCTIONS", 5000)
    with pytest.raises(gfx950.KernelFaultError, match=says):
        run(program, s={12: 0x1000, 13: 0})


def test_code_without_an_end():
    with pytest.raises(gfx950.KernelFaultError, match="jumps out of its code, or runs past its end"):
        gfx950.run(code_object(v_mov(2, constant(1)), arguments=0), 1, [])


def _add_constant(register: int, number: int) -> bytes:
    return encode("SOP2", "s_add_u32", sdst=s(register), ssrc0=s(register), ssrc1=constant(number))


MODE = 1


def _mode_field(offset: int, size: int) -> int:
    return MODE | offset << 6 | (size - 1) << 11


def test_the_mode_register():
    """Its first value is the descriptor's; a field is written and read alone."""
    program = encode("SOPK_LIT", "s_setreg_imm32_b32", simm16=_mode_field(8, 8), literal=0xFFFFFFA5)
    program += encode("SOPK", "s_setreg_b32", sdst=s(12), simm16=_mode_field(16, 4))
    program += encode("SOPK", "s_getreg_b32", sdst=s(10), simm16=_mode_field(0, 32))
    program += encode("SOPK", "s_getreg_b32", sdst=s(11), simm16=_mode_field(8, 4))
    outcome = run(program, s={12: 0xF6}, read_s=[10, 11])
    assert (outcome.s[10], outcome.s[11]) == ([0x6A5F0], [0x5])


SCALAR_LOADS = [1, 2, 4, 8, 16]


@pytest.mark.parametrize("count", SCALAR_LOADS)
def test_scalar_loads(count):
    memory = np.array(_noise(64, count), np.uint32)
    name = f"s_load_dword{f'x{count}' if count > 1 else ''}"
    pointer, read = s(MEMORY_POINTER), list(range(16, 16 + count))
    forms = [
        ({"imm": 1, "offset": 12}, 3),
        ({"soffset_en": 1, "soffset": s(12)}, 5),
        ({"imm": 1, "offset": 8, "soffset_en": 1, "soffset": s(12)}, 7),
    ]
    for fields, first in forms:
        program = encode("SMEM", name, sdata=s(16), sbase=pointer, **fields)
        outcome = run(program, s={12: 20}, read_s=read, memory=memory.copy())
        assert [outcome.s[i][0] for i in read] == memory[first : first + count].tolist()
    back = _add_constant(MEMORY_POINTER, 32) + encode(
        "SMEM", name, sdata=s(16), sbase=pointer, imm=1, offset=-12 & 0x1FFFFF
    )
    outcome = run(back, read_s=read, memory=memory.copy())
    assert [outcome.s[i][0] for i in read] == memory[5 : 5 + count].tolist()


@pytest.mark.parametrize("count", SCALAR_LOADS)
def test_scalar_buffer_loads(count):
    """A dword past num_records is 0."""
    memory = np.array(_noise(64, count), np.uint32)
    name = f"s_buffer_load_dword{f'x{count}' if count > 1 else ''}"
    read = list(range(16, 16 + count))
    program = s_mov(40, MEMORY_POINTER) + s_mov(41, MEMORY_POINTER + 1) + s_set(42, 4 * 8)
    program += encode("SMEM", name, sdata=s(16), sbase=s(40), imm=1, offset=16)
    outcome = run(program, read_s=read, memory=memory)
    assert [outcome.s[i][0] for i in read] == [int(memory[i]) if i < 8 else 0 for i in range(4, 4 + count)]


# ---- Packed arithmetic ----


@dataclass(frozen=True)
class Packed:
    kind: str
    count: int
    function: Callable


def _product_sum(a, b, c):
    return a * b + c


PACKED = {
    "v_pk_fma_f16": Packed("f16", 3, fma),
    "v_pk_add_f16": Packed("f16", 2, lambda a, b: a + b),
    "v_pk_mul_f16": Packed("f16", 2, lambda a, b: a * b),
    "v_pk_min_f16": Packed("f16", 2, minimum),
    "v_pk_max_f16": Packed("f16", 2, maximum),
    "v_pk_minimum3_f16": Packed("f16", 3, _ieee(low=True)),
    "v_pk_maximum3_f16": Packed("f16", 3, _ieee(low=False)),
    "v_pk_mad_i16": Packed("i16", 3, _product_sum),
    "v_pk_mad_u16": Packed("u16", 3, _product_sum),
    "v_pk_mul_lo_u16": Packed("u16", 2, lambda a, b: a * b),
    **{f"v_pk_add_{kind}": Packed(kind, 2, lambda a, b: a + b) for kind in ("i16", "u16")},
    **{f"v_pk_sub_{kind}": Packed(kind, 2, lambda a, b: a - b) for kind in ("i16", "u16")},
    **{f"v_pk_min_{kind}": Packed(kind, 2, min) for kind in ("i16", "u16")},
    **{f"v_pk_max_{kind}": Packed(kind, 2, max) for kind in ("i16", "u16")},
    "v_pk_lshlrev_b16": Packed("u16", 2, lambda a, b: b << a % 16),
    "v_pk_lshrrev_b16": Packed("u16", 2, lambda a, b: b >> a % 16),
    "v_pk_ashrrev_i16": Packed("i16", 2, lambda a, b: b >> a % 16),
    "v_pk_fma_f32": Packed("f32", 3, fma),
    "v_pk_mul_f32": Packed("f32", 2, lambda a, b: a * b),
    "v_pk_add_f32": Packed("f32", 2, lambda a, b: a + b),
}


def _packed_fields(count: int, rng: random.Random, is_float: bool) -> dict[str, int]:
    fields = {"opsel": rng.getrandbits(count), "opsel_hi": rng.getrandbits(2), "opsel_hi2": rng.getrandbits(1)}
    if is_float:
        fields |= {"neg": rng.getrandbits(count), "neg_hi": rng.getrandbits(count)}
    return fields


def _packed_result(case: Packed, words: tuple[int, ...], fields: dict[str, int]) -> tuple[int, int]:
    """The low and the high result: op_sel and neg belong to the low one, op_sel_hi and neg_hi to the high one."""
    bits = width(case.kind)
    high = fields["opsel_hi"] | fields["opsel_hi2"] << 2
    results = []
    for select, negate in ((fields["opsel"], fields.get("neg", 0)), (high, fields.get("neg_hi", 0))):
        values = [value_of(case.kind, word >> bits * (select >> i & 1)) for i, word in enumerate(words)]
        values = [-x if negate >> i & 1 else x for i, x in enumerate(values)]
        results.append(bits_of(case.kind, case.function(*values)))
    return results[0], results[1]


@pytest.mark.parametrize("name", PACKED)
def test_packed_arithmetic(name):
    case, rng = PACKED[name], random.Random(name)
    bits, is_float = width(case.kind), case.kind in FLOATS
    for turn in range(12):
        halves = samples((case.kind,) * (2 * case.count), LANES, (name, turn))
        words = [tuple(x[2 * i] | x[2 * i + 1] << bits for i in range(case.count)) for x in halves]
        fields = _packed_fields(case.count, rng, is_float)
        program = _vector("VOP3P", name, case.count, **fields)
        kinds = (f"u{2 * bits}",) * case.count
        ours = _run_vector(program, kinds, kinds[0], words)
        for low_high in (0, 1):
            mine = [x >> bits * low_high & ((1 << bits) - 1) for x in ours]
            theirs = [_packed_result(case, given, fields)[low_high] for given in words]
            _assert_results(case.kind, mine, theirs, words)


def test_every_packed_instruction_has_a_case():
    others = {"v_pk_mov_b32", "v_pk_fmac_f16"}
    assert {name for name in BINDERS if name.startswith("v_pk_")} == {*PACKED, *others}


@pytest.mark.parametrize("select", range(4))
def test_packed_moves(select):
    words = samples(("u64", "u64"), LANES, select)
    ours = _run_vector(_vector("VOP3P", "v_pk_mov_b32", 2, opsel=select), ("u64", "u64"), "u64", words)
    assert ours == [(a >> 32 * (select & 1) & M32) | (b >> 32 * (select >> 1) & M32) << 32 for a, b in words]


def test_packed_move_onto_its_source():
    words = _noise(LANES, "low"), _noise(LANES, "high")
    program = encode("VOP3P", "v_pk_mov_b32", vdst=v(2), src0=v(2), src1=v(2), opsel=0b01)
    outcome = run(program, v={2: words[0], 3: words[1]}, read_v=[2, 3])
    assert (outcome.v[2].tolist(), outcome.v[3].tolist()) == (words[1], words[0])


def test_packed_multiply_add_into_the_result():
    halves = samples(("f16",) * 6, 2 * LANES, "pk_fmac")
    words = [tuple(x[2 * i] | x[2 * i + 1] << 16 for i in range(3)) for x in halves]
    program = encode("VOP2", "v_pk_fmac_f16", vdst=v(6), src0=v(2), vsrc1=v(4))
    outcome = run(program, v=_registers(("u32",) * 3, words), read_v=[6])
    fields = {"opsel": 0, "opsel_hi": 3, "opsel_hi2": 1}
    for half in (0, 1):
        theirs = [_packed_result(PACKED["v_pk_fma_f16"], given, fields)[half] for given in words]
        _assert_results("f16", [int(x) >> 16 * half & M16 for x in outcome.v[6]], theirs, words)


@pytest.mark.parametrize("name", ["v_pk_add_f16", "v_pk_fma_f32", "v_mad_mix_f32"])
def test_a_clamp_on_packed_results(name):
    """NaN becomes 0."""
    kind, count = ("f16", 2) if "f16" in name else ("f32", 3)
    rng = random.Random(name)
    values = [tuple(_of_ordinary_size(kind, rng) for _ in range(count)) for _ in range(LANES)]
    fields = {"clmp": 1, "opsel_hi": 0, "opsel_hi2": 0}
    ours = _run_vector(_vector("VOP3P", name, count, **fields), (kind,) * count, "u32", values)
    function = fma if count == 3 else CASES["v_add_f16"].function
    theirs = [_finished(kind, function(*(value_of(kind, x) for x in given)), 1, 1) for given in values]
    _assert_results(kind, [x & ((1 << width(kind)) - 1) for x in ours], theirs, values)


def test_constants_in_packed_arithmetic():
    """A float is in the lower half, with zeros above; an integer is 32 bits with its sign."""
    words = _noise(LANES, "packed constants")
    for number, select_high, wanted in ((-3, 1, M16), (-3, 0, M16 - 2), (5, 1, 0), (5, 0, 5)):
        fields = {"src1": constant(number), "opsel_hi": 1 | select_high << 1, "opsel": 0}
        ours = _run_vector(_vector("VOP3P", "v_pk_add_u16", 2, **fields), ("u32",), "u32", [(x,) for x in words])
        low = number & M16
        assert ours == [(x + low & M16) | ((x >> 16) + wanted & M16) << 16 for x in words]
    halves = [F16.encode(random.Random(x).uniform(-2, 2)) for x in words]
    for select_high, added in ((1, 0.0), (0, 1.0)):
        fields = {"src1": constant(1.0), "opsel_hi": 1 | select_high << 1}
        given = [(x | x << 16,) for x in halves]
        ours = _run_vector(_vector("VOP3P", "v_pk_add_f16", 2, **fields), ("u32",), "u32", given)
        assert ours == [F16.encode(F16.decode(x) + 1.0) | F16.encode(F16.decode(x) + added) << 16 for x in halves]


def test_scalar_registers_and_constants_in_packed_pairs():
    a, b = 0x3FC00000, 0x40200000  # 1.5 and 2.5
    values = [(0x3F800000 | 0x40000000 << 32,)] * LANES  # 1 and 2
    program = _vector("VOP3P", "v_pk_mul_f32", 2, src1=s(12))
    ours = _run_vector(program, ("u64",), "u64", values, s={12: a, 13: b})
    assert set(ours) == {F32.encode(1.5) | F32.encode(5.0) << 32}
    program = _vector("VOP3P", "v_pk_mul_f32", 2, src1=constant(4.0), opsel_hi=1)
    assert set(_run_vector(program, ("u64",), "u64", values)) == {F32.encode(4.0) | F32.encode(8.0) << 32}


MIXED = {"v_mad_mix_f32": None, "v_mad_mixlo_f16": 0, "v_mad_mixhi_f16": 1}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_multiply_adds(name):
    """A source is a float32 or the half that op_sel names; neg_hi is its absolute value. The result is rounded to
    float32, and to float16 into one half."""
    for turn in range(16):
        rng = random.Random(f"{name}{turn}")
        fields = {"opsel": rng.getrandbits(3), "opsel_hi": rng.getrandbits(2), "opsel_hi2": rng.getrandbits(1)}
        fields |= {"neg": rng.getrandbits(3), "neg_hi": rng.getrandbits(3)}
        is_half = fields["opsel_hi"] | fields["opsel_hi2"] << 2
        words = [
            tuple(draw("f16", rng) | draw("f16", rng) << 16 if is_half >> i & 1 else draw("f32", rng) for i in range(3))
            for _ in range(LANES)
        ]
        ours = _run_vector(_vector("VOP3P", name, 3, **fields), ("u32",) * 3, "u32", words)
        theirs = []
        for given in words:
            values = [
                F16.decode(x >> 16 * (fields["opsel"] >> i & 1) & M16) if is_half >> i & 1 else F32.decode(x)
                for i, x in enumerate(given)
            ]
            values = [_with_sign(x, fields["neg"] >> i & 1, fields["neg_hi"] >> i & 1) for i, x in enumerate(values)]
            single = bits_of("f32", fma(*values))
            theirs.append(single if MIXED[name] is None else F16.encode(F32.decode(single)))
        if MIXED[name] is None:
            _assert_results("f32", ours, theirs, words)
        else:
            part = 16 * MIXED[name]
            assert {x >> 16 - part & M16 for x in ours} == {OLD >> 16 - part & M16}
            _assert_results("f16", [x >> part & M16 for x in ours], theirs, words)


# ---- Dot products ----


def _halves_of(word: int, kind: str) -> list:
    bits = width(kind)
    return [value_of(kind, word >> i) for i in range(0, 32, bits)]


def _in_single(x: float) -> float:
    return F32.decode(F32.encode(x))


def _float_dot(kind: str, addend_first: bool) -> Callable:
    """Each product is exact, each sum rounded to float32."""

    def dot(a, b, c):
        first, second = (x * y for x, y in zip(_halves_of(a, kind), _halves_of(b, kind), strict=True))
        addend = F32.decode(c)
        order = (addend, first, second) if addend_first else (first, second, addend)
        return F32.encode(_in_single(order[0] + order[1]) + order[2])

    return dot


def _integer_dot(kind: str) -> Callable:
    return lambda a, b, c: sum(x * y for x, y in zip(_halves_of(a, kind), _halves_of(b, kind), strict=True)) + c & M32


DOTS = {
    "v_dot2_f32_f16": ("VOP3P", "f16", _float_dot("f16", True)),
    "v_dot2_f32_bf16": ("VOP3P", "bf16", _float_dot("bf16", False)),
    "v_dot2_i32_i16": ("VOP3P", "i16", _integer_dot("i16")),
    "v_dot2_u32_u16": ("VOP3P", "u16", _integer_dot("u16")),
    "v_dot4_i32_i8": ("VOP3P", "i8", _integer_dot("i8")),
    "v_dot4_u32_u8": ("VOP3P", "u8", _integer_dot("u8")),
    "v_dot2c_f32_f16": ("VOP2", "f16", _float_dot("f16", True)),
    "v_dot2c_f32_bf16": ("VOP2", "bf16", _float_dot("bf16", True)),
    "v_dot2c_i32_i16": ("VOP2", "i16", _integer_dot("i16")),
    "v_dot4c_i32_i8": ("VOP2", "i8", _integer_dot("i8")),
}


@pytest.mark.parametrize("name", DOTS)
def test_dot_products(name):
    form, kind, function = DOTS[name]
    rng = random.Random(name)
    bits, is_float = width(kind), kind in FLOATS
    element = (lambda: bits_of(kind, rng.uniform(-4, 4))) if is_float else (lambda: rng.getrandbits(bits))

    def pack() -> int:
        return sum(element() << i for i in range(0, 32, bits))

    words = [
        (pack(), pack(), F32.encode(rng.uniform(-9, 9)) if is_float else rng.getrandbits(32)) for _ in range(LANES)
    ]
    fields = {"vdst": v(6), "src0": v(2)}
    fields |= {"src1": v(4), "src2": v(6)} if form == "VOP3P" else {"vsrc1": v(4)}
    outcome = run(encode(form, name, **fields), v=_registers(("u32",) * 3, words), read_v=[6])
    assert outcome.v[6].tolist() == [function(*given) for given in words]


def test_every_dot_product_has_a_case():
    assert {name for name in BINDERS if name.startswith("v_dot")} == {*DOTS}


# ---- Any function of three bits ----


@pytest.mark.parametrize("table", [0x00, 0xFF, 0x01, 0x80, 0xCA, 0x96, 0x1B, 0x2D, 0x47])
@pytest.mark.parametrize("bits", [32, 16])
def test_truth_tables(bits, table):
    """Bit 4a + 2b + c of the table is the result for the bits a, b, c."""
    words = samples(("u32",) * 3, LANES, table)
    for select in range(1 if bits == 32 else 16):
        fields = {"omod": table >> 6, "abs": table >> 3 & 7, "neg": table & 7, "opsel": select}
        ours = _run_vector(_vector("VOP3", f"v_bitop3_b{bits}", 3, **fields), ("u32",) * 3, "u32", words)
        for got, given in zip(ours, words, strict=True):
            a, b, c = (x >> 16 * (select >> i & 1) for i, x in enumerate(given))
            value = sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(bits))
            if bits == 16:
                value = value << 16 | OLD & M16 if select & 8 else value | OLD & (M16 << 16)
            assert got == value


# ---- Division ----


def _fma(target: int, a: int, b: int, c: object, kind: str, neg: int = 0) -> bytes:
    c = v(c) if isinstance(c, int) else c
    return encode("VOP3", f"v_fma_{kind}", vdst=v(target), src0=v(a), src1=v(b), src2=c, neg=neg)


def _division(kind: str, numerator: int, denominator: int) -> bytes:
    """v8 = numerator ÷ denominator, in the steps that LLVM takes."""
    n, d, scaled_d, scaled_n, r, e, q = numerator, denominator, 10, 12, 14, 16, 18
    one = constant(1.0)
    scale = [
        encode("VOP3SD", f"v_div_scale_{kind}", vdst=v(scaled_d), sdst=s(20), src0=v(d), src1=v(d), src2=v(n)),
        encode("VOP3SD", f"v_div_scale_{kind}", vdst=v(scaled_n), sdst=s(VCC), src0=v(n), src1=v(d), src2=v(n)),
    ]
    refine = [_fma(e, scaled_d, r, one, kind, neg=1), _fma(r, e, r, r, kind)]
    end = [
        encode("VOP3", f"v_div_fmas_{kind}", vdst=v(q), src0=v(e), src1=v(r), src2=v(q)),
        encode("VOP3", f"v_div_fixup_{kind}", vdst=v(RESULT), src0=v(q), src1=v(d), src2=v(n)),
    ]
    rcp = encode("VOP1", f"v_rcp_{kind}", vdst=v(r), src0=v(scaled_d))
    multiply = encode("VOP3", f"v_mul_{kind}", vdst=v(q), src0=v(scaled_n), src1=v(r))
    rest = _fma(e, scaled_d, q, scaled_n, kind, neg=1)
    if kind == "f32":
        return b"".join([*scale, rcp, *refine, multiply, rest, _fma(q, e, r, q, kind), rest, *end])
    return b"".join([*scale, rcp, *refine, *refine, multiply, rest, *end])


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_divisions_are_rounded_correctly(kind):
    """On all edges over all edges, and on any bits."""
    pairs = [*itertools.product(edges(kind), repeat=2), *samples((kind, kind), 12 * LANES, kind)]
    rng = random.Random(kind)
    f = FLOATS[kind]
    exponents = range(1, (f.infinity >> f.mantissa) - 1)
    for _ in range(8 * LANES):  # quotients and inverses at both ends of the range
        n, d = (rng.choice(exponents) << f.mantissa | rng.getrandbits(f.mantissa) for _ in range(2))
        pairs.append((n, d))
    pairs = pairs[: len(pairs) // LANES * LANES]
    ours = _run_vector(_division(kind, 2, 4), (kind, kind), kind, pairs)
    theirs = [bits_of(kind, divide(f.decode(n), f.decode(d))) for n, d in pairs]
    _assert_results(kind, ours, theirs, pairs)


def test_the_end_of_a_division_in_half_precision():
    """v_div_fixup: the quotient with the right sign, unless an operand is zero, infinite or NaN."""
    pairs = [*itertools.product(edges("f16"), repeat=2), *samples(("f16", "f16"), 4 * LANES, "fixup")]
    pairs = pairs[: len(pairs) // LANES * LANES]
    operands = []
    for i, (d, n) in enumerate(pairs):
        quotient = F16.encode(divide(F16.decode(n), F16.decode(d)))
        operands.append((quotient ^ (F16.sign if i % 2 else 0), d, n))
    special = [any(F16.is_nan(x) or math.isinf(F16.decode(x)) or not F16.decode(x) for x in pair) for pair in pairs]
    operands = [(0x1234, d, n) if odd else (q, d, n) for (q, d, n), odd in zip(operands, special, strict=True)]
    ours = _run_vector(_vector("VOP3", "v_div_fixup_f16", 3), ("f16",) * 3, "f16", operands)
    theirs = [F16.encode(divide(F16.decode(n), F16.decode(d))) for d, n in pairs]
    _assert_results("f16", _split_upper("v_div_fixup_f16", "f16", ours), theirs, operands)


# ---- Conversions to and from 16, 8 and 4 bits ----


def _pairs_of(f, **rounding) -> Callable:
    return lambda a, b: f.encode(a, **rounding) | f.encode(b, **rounding) << 16


PACKS = {
    "v_cvt_pk_f16_f32": ("f16", _pairs_of(F16)),
    "v_cvt_pk_bf16_f32": ("bf16", _pairs_of(BF16)),
    "v_cvt_pkrtz_f16_f32": ("f16", _pairs_of(F16, toward_zero=True)),
}


@pytest.mark.parametrize("name", PACKS)
def test_pairs_of_16_bits(name):
    kind, function = PACKS[name]
    operands = samples(("f32", "f32"), 8 * LANES, name)
    form = "VOP3" if opcode("VOP3", name) is not None else "VOP2"
    ours = _run_vector(_vector(form, name, 2), ("f32", "f32"), "u32", operands)
    theirs = [function(F32.decode(a), F32.decode(b)) for a, b in operands]
    for part in (0, 16):
        _assert_results(kind, [x >> part & M16 for x in ours], [x >> part & M16 for x in theirs], operands)


SATURATE = encode("SOPK_LIT", "s_setreg_imm32_b32", simm16=_mode_field(23, 1), literal=1)
KEPT = 0xA5C3960F  # what a register partly written holds before


def _run_partial(program: bytes, registers: dict) -> list[int]:
    outcome = run(program, v={**registers, RESULT: KEPT}, read_v=[RESULT])
    return outcome.v[RESULT].tolist()


def _assert_part(ours: list[int], shift: int, bits: int) -> list[int]:
    """The part of a register that was written; the others are as they were."""
    hole = M32 & ~(((1 << bits) - 1) << shift)
    assert {x & hole for x in ours} == {KEPT & hole}
    return [x >> shift & ((1 << bits) - 1) for x in ours]


def _narrow_inputs(kind: str, seed: object) -> list[int]:
    """float32 numbers around all that a narrow format holds: its values, what lies between, and far from them."""
    f, rng = FLOATS[kind], random.Random(f"{kind}{seed}")
    values = [f.decode(code) for code in range(1 << f.bits)]
    chosen = [F32.encode(x) for x in values if x == x and not math.isinf(x)]
    finite = sorted({x for x in values if x == x and not math.isinf(x)})
    middles = [F32.encode((a + b) / 2) for a, b in itertools.pairwise(finite)]
    chosen += [code + step for code in middles for step in (-1, 0, 1) if code & (F32.sign - 1)]
    chosen += [
        F32.encode(sign * f.largest * by) for sign in (-1, 1) for by in (1.01, 1.0625, 1.0626, 1.124, 1.126, 2, 1e30)
    ]
    chosen += [F32.infinity, F32.sign | F32.infinity]
    chosen += [] if kind == "fp4" else [F32.quiet_nan]
    rng.shuffle(chosen)
    return (chosen * 2)[: -(-len(chosen) // LANES) * LANES]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_8_bit_pairs(kind, saturate):
    """What is too large is NaN or infinity, and the largest number where the mode says to saturate."""
    f, a, b = FLOATS[kind], _narrow_inputs(kind, 1), _narrow_inputs(kind, 2)
    for half in (0, 1):
        program = (SATURATE if saturate else b"") + _vector("VOP3", f"v_cvt_pk_{kind}_f32", 2, opsel=8 * half)
        ours = _assert_part(_run_partial(program, {2: a, 4: b}), 16 * half, 16)
        for place, given in ((0, a), (8, b)):
            theirs = [f.encode(F32.decode(x), saturate=saturate) for x in given]
            _assert_results(kind, [x >> place & 0xFF for x in ours], theirs, [(x,) for x in given])


STOCHASTIC = {
    "v_cvt_sr_fp8_f32": ("fp8", 8, 2),
    "v_cvt_sr_bf8_f32": ("bf8", 8, 2),
    "v_cvt_sr_f16_f32": ("f16", 16, 3),
    "v_cvt_sr_bf16_f32": ("bf16", 16, 3),
}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding(name):
    """The noise is added below the bits that stay: with none of it a number is cut, with the most rounded away."""
    kind, bits, field = STOCHASTIC[name]
    f, rng = FLOATS[kind], random.Random(name)
    dropped = F32.mantissa - f.mantissa
    given = [F32.encode(rng.choice((-1, 1)) * rng.uniform(0.5, 100)) for _ in range(LANES)]
    given[:4] = [F32.encode(x) for x in (1.0, -1.0, 1.5, math.inf)]
    for part in range(32 // bits):
        noise = [(0, M32, rng.getrandbits(32))[lane % 3] for lane in range(LANES)]
        program = _vector("VOP3", name, 2, opsel=part << field)
        ours = _assert_part(_run_partial(program, {2: given, 4: noise}), bits * part, bits)
        for x, n, got in zip(given, noise, ours, strict=True):
            up = (x & (1 << dropped) - 1) + (n >> 32 - dropped) >> dropped
            cut = f.encode(F32.decode(x), toward_zero=math.isfinite(F32.decode(x)))
            assert same(kind, got, cut + up if math.isfinite(F32.decode(x)) else cut), f"{x:#x} with {n:#x}"


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_every_8_bit_code(kind):
    """One at a time, from any byte (SDWA), and by two from either half."""
    words = [code * 0x01010101 ^ 0x55AA3300 for code in range(256)]
    name = f"v_cvt_f32_{kind}"
    for select in (None, 0, 1, 2, 3):
        shift = 8 * (select or 0)
        program = _vector("VOP1", name, 1)
        if select is not None:
            fields = {"src0": SDWA, "vsrc0": v(2), "src0_sel": select, "dst_sel": 6}
            program = encode("VOP1_SDWA", name, vdst=v(RESULT), **fields)
        theirs = [F32.encode(FLOATS[kind].decode(x >> shift & 0xFF)) for x in words]
        ours = run(program, v={2: words}, read_v=[RESULT]).v[RESULT].tolist()
        _assert_results("f32", ours, theirs, [(x,) for x in words])
    for half in (0, 1):
        fields = {"src0": SDWA, "vsrc0": v(2), "src0_sel": 4 + half, "dst_sel": 6}
        program = encode("VOP1_SDWA", f"v_cvt_pk_f32_{kind}", vdst=v(RESULT), **fields)
        plain = _vector("VOP1", f"v_cvt_pk_f32_{kind}", 1)
        for code in (program, plain) if half == 0 else (program,):
            outcome = run(code, v={2: words}, read_v=[RESULT, RESULT + 1])
            for i in (0, 1):
                theirs = [F32.encode(FLOATS[kind].decode(x >> 16 * half + 8 * i & 0xFF)) for x in words]
                _assert_results("f32", outcome.v[RESULT + i].tolist(), theirs, [(x,) for x in words])


def _scales(count: int, seed: object, spread: int = 20) -> list[int]:
    """float32 numbers of which only the exponent counts."""
    rng = random.Random(str(seed))
    return [
        rng.getrandbits(1) << 31 | (127 + rng.randint(-spread, spread)) << 23 | rng.getrandbits(23)
        for _ in range(count)
    ]


def _scaled(x: float, scale: int, way: int):
    """x × or ÷ the power of two that a scale's exponent is."""
    return x if not math.isfinite(x) or not x else Fraction(x) * Fraction(2) ** (way * ((scale >> 23 & 255) - 127))


@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kind", ["fp8", "bf8", "fp4"])
def test_scaled_conversions_of_every_code_to_wider_ones(kind, wide):
    f, words = FLOATS[kind], [code * 0x01010101 ^ 0x55AA3300 for code in range(256)]
    scales = _scales(256, (kind, wide))
    parts = [(part, 8 * part if kind == "fp4" else 16 * part) for part in range(4 if kind == "fp4" else 2)]
    for part, shift in parts:
        program = _vector("VOP3", f"v_cvt_scalef32_pk_{wide}_{kind}", 2, opsel=part)
        read = [RESULT, RESULT + 1] if wide == "f32" else [RESULT]
        outcome = run(program, v={2: words, 4: scales, RESULT: OLD, RESULT + 1: OLD}, read_v=read)
        for i in (0, 1):
            values = [f.decode(x >> shift + f.bits * i & ((1 << f.bits) - 1)) for x in words]
            theirs = [bits_of(wide, _scaled(x, scale, 1)) for x, scale in zip(values, scales, strict=True)]
            ours = outcome.v[RESULT + i] if wide == "f32" else outcome.v[RESULT] >> np.uint32(16 * i) & M16
            _assert_results(wide, ours.tolist(), theirs, list(zip(words, scales, strict=True)))


@pytest.mark.parametrize("wide", ["f32", "f16"])
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_scaled_conversions_of_one_code(kind, wide):
    words, scales = [code * 0x01010101 ^ 0x55AA3300 for code in range(256)], _scales(256, kind)
    for select in range(16 if wide == "f16" else 4):
        program = _vector("VOP3", f"v_cvt_scalef32_{wide}_{kind}", 2, opsel=select)
        ours = _run_partial(program, {2: words, 4: scales})
        ours = _assert_part(ours, 16 * (select >> 3), 16) if wide == "f16" else ours
        values = [FLOATS[kind].decode(x >> 8 * (select & 3) & 0xFF) for x in words]
        theirs = [bits_of(wide, _scaled(x, scale, 1)) for x, scale in zip(values, scales, strict=True)]
        _assert_results(wide, ours, theirs, list(zip(words, scales, strict=True)))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kind", ["fp8", "bf8", "fp4"])
def test_scaled_conversions_to_narrower_ones(kind, wide, saturate):
    """Two numbers divided by the scale, into a byte (fp4) or a half of a register, of which the rest stays."""
    f, w = FLOATS[kind], FLOATS[wide]
    inputs = [[F32.decode(x) for x in _narrow_inputs(kind, i)] for i in (1, 2)]
    scales = _scales(len(inputs[0]), kind, spread=4)
    # Numbers that the scale brings back near the values of the narrow format, as far as the wide one holds them.
    a, b = ([w.encode(_scaled(x, scale, 1)) for x, scale in zip(xs, scales, strict=True)] for xs in inputs)
    if wide == "f32":
        registers, fields = {2: a, 4: b, 6: scales}, {"src0": v(2), "src1": v(4), "src2": v(6)}
    else:
        packed = [x | y << 16 for x, y in zip(a, b, strict=True)]
        registers, fields = {2: packed, 4: scales}, {"src0": v(2), "src1": v(4)}
    bits = 2 * f.bits
    for part in range(32 // bits):
        select = part << (2 if kind == "fp4" else 3)
        program = encode("VOP3", f"v_cvt_scalef32_pk_{kind}_{wide}", vdst=v(RESULT), opsel=select, **fields)
        ours = _assert_part(_run_partial((SATURATE if saturate else b"") + program, registers), bits * part, bits)
        for place, given in ((0, a), (f.bits, b)):
            exact = [_scaled(w.decode(x), scale, -1) for x, scale in zip(given, scales, strict=True)]
            theirs = [f.encode(x, saturate=saturate) for x in exact]
            mine = [x >> place & ((1 << f.bits) - 1) for x in ours]
            _assert_results(kind, mine, theirs, list(zip(given, scales, strict=True)))


def test_every_conversion_has_a_case():
    tested = {*CASES, *PACKS, *STOCHASTIC, *(f"v_cvt_pk_{kind}_f32" for kind in ("fp8", "bf8"))}
    tested |= {f"v_cvt_{pk}f32_{kind}" for pk in ("", "pk_") for kind in ("fp8", "bf8")}
    for kind, wide in itertools.product(("fp8", "bf8", "fp4"), ("f32", "f16", "bf16")):
        tested |= {f"v_cvt_scalef32_pk_{wide}_{kind}", f"v_cvt_scalef32_pk_{kind}_{wide}"}
    tested |= {f"v_cvt_scalef32_{wide}_{kind}" for wide in ("f32", "f16") for kind in ("fp8", "bf8")}
    assert {name for name in BINDERS if name.startswith("v_cvt")} - tested == set()


# ---- Matrices ----

MATRIX_BITS = {"f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "bf8": 8, "i8": 8, "fp4": 4}
FORMATS = {"fp8": 0, "bf8": 1, "fp4": 4}
SCALED_PREFIX = 0xD3AC  # what the first half of a scaled product says that it is


@dataclass(frozen=True)
class Matrices:
    """A product of an n × depth and a depth × n matrix, of elements of two kinds."""

    name: str
    size: int
    depth: int
    kinds: tuple[str, str]
    scaled: bool = False

    def __str__(self) -> str:
        return f"{self.name.removeprefix('v_mfma_')}{'-'.join(self.kinds) if 'f8f6f4' in self.name else ''}"


def _matrix_cases() -> list[Matrices]:
    cases = []
    for name in sorted(name for name in BINDERS if name.startswith("v_mfma_")):
        match = re.fullmatch(r"v_mfma_(scale_)?[fi]32_(\d+)x\d+x(\d+)_(\w+)", name)
        size, depth, kinds = int(match[2]), int(match[3]), match[4].split("_")
        if kinds == ["f8f6f4"]:
            pairs = itertools.product(FORMATS, repeat=2)
            cases += [Matrices(name, size, depth, pair, bool(match[1])) for pair in pairs]
        else:
            cases.append(Matrices(name, size, depth, (kinds[0], kinds[-1])))
    return cases


def _matrix_places(case: Matrices, kind: str) -> list[list[int]]:
    """For each group of lanes, the ks of the elements that one of its lanes holds, in order."""
    groups = LANES // case.size
    held = case.depth // groups
    if "f8f6f4" in case.name and MATRIX_BITS[kind] == 8:
        run_ = held // 2
        return [[*range(g * run_, (g + 1) * run_), *range(case.depth // 2 + g * run_, case.depth // 2 + (g + 1) * run_)]
                for g in range(groups)]  # fmt: skip
    return [list(range(g * held, (g + 1) * held)) for g in range(groups)]


def _matrix_element(kind: str, rng: random.Random) -> int:
    """Few bits each, so that any order of summation is exact; of i8 and fp4 all there are."""
    if kind == "i8" or kind == "fp4":
        return rng.getrandbits(MATRIX_BITS[kind])
    return bits_of(kind, rng.choice((-1, 1)) * rng.choice((0, 0.5, 1, 1.5, 2, 3, 4)))


def _matrix_registers(case: Matrices, kind: str, codes: list[list[int]]) -> list[list[int]]:
    """Registers, each of 64 lanes, that hold a matrix: lane = group × size + row."""
    bits = MATRIX_BITS[kind]
    places = _matrix_places(case, kind)
    per_register = 32 // bits
    count = len(places[0]) // per_register
    registers = [[0] * LANES for _ in range(count)]
    for lane in range(LANES):
        for i, k in enumerate(places[lane // case.size]):
            registers[i // per_register][lane] |= codes[lane % case.size][k] << bits * (i % per_register)
    return registers


def _result_place(size: int, register: int, lane: int) -> tuple[int, int]:
    """The row and column of the product that a result register holds in a lane."""
    row = register // 4 * (256 // size) + lane // size * 4 + register % 4
    return row, lane % size


def _matrix_values(kind: str, codes: list[list[int]]) -> np.ndarray:
    return np.array([[value_of(kind, code) for code in row] for row in codes], np.float64)


def _assert_matrices(case: Matrices, where: str, seed: int) -> None:
    """where: which operands lie in accumulation registers (a, b, c for C and the result), and k: C is a constant."""
    rng = random.Random(f"{case}{where}{seed}")
    codes = [[[_matrix_element(kind, rng) for _ in range(case.depth)] for _ in range(case.size)] for kind in case.kinds]
    count = case.size**2 // LANES
    is_integer = "i32" in case.name
    addend = [[rng.randint(-8, 8) for _ in range(LANES)] for _ in range(count)]
    first, second, third = (4 + 256 * ("a" in where), 24 + 256 * ("b" in where), 60 + 256 * ("c" in where))
    encode_result = (lambda x: int(x) & M32) if is_integer else (lambda x: F32.encode(float(x)))
    registers = {}
    for base, kind, matrix in zip((first, second), case.kinds, codes, strict=True):
        registers |= {base + i: lanes for i, lanes in enumerate(_matrix_registers(case, kind, matrix))}
    registers |= {third + i: [encode_result(x) for x in lanes] for i, lanes in enumerate(addend)}
    values = [_matrix_values(kind, matrix) for kind, matrix in zip(case.kinds, codes, strict=True)]
    fields = {"vdst": v(60), "src0": v(4), "src1": v(24), "src2": v(60)}
    fields |= {"acc": ("a" in where) | ("b" in where) << 1, "acc_cd": "c" in where}
    if "k" in where:
        fields["src2"] = constant(3) if is_integer else constant(2.0)
        addend = [[3 if is_integer else 2.0] * LANES for _ in range(count)]
    if "f8f6f4" in case.name:
        fields |= {"cbsz": FORMATS[case.kinds[0]], "blgp": FORMATS[case.kinds[1]]}
    if case.scaled:
        values = [_with_scales(case, i, value, registers, fields, rng) for i, value in enumerate(values)]
        fields["x2encoding"] = SCALED_PREFIX
    program = encode("VOP3PX2" if case.scaled else "VOP3P_MFMA", case.name, **fields)
    read = [third + i for i in range(count)]
    outcome = run(program, v=registers, s=_exec(PARTLY), read_v=read)
    product = values[0] @ values[1].T
    for i, row in enumerate(read):
        exact = [product[_result_place(case.size, i, lane)] + addend[i][lane] for lane in range(LANES)]
        assert outcome.v[row].tolist() == [encode_result(x) for x in exact], f"register {i}"


def _with_scales(case: Matrices, which: int, values: np.ndarray, registers, fields, rng) -> np.ndarray:
    """Registers of E8M0 scales, of which op_sel names a byte; the values times theirs: lane group g has k = 32g …"""
    row, byte = 50 + which, rng.randrange(4)
    words = [sum(rng.randint(126, 128) << 8 * i for i in range(4)) for _ in range(LANES)]
    registers[row] = words
    fields[f"scale_src{which}"] = v(row)
    fields["opsel"] = fields.get("opsel", 0) | (byte & 1) << which
    fields["opsel_hi"] = fields.get("opsel_hi", 0) | (byte >> 1) << which
    out = values.copy()
    for lane, word in enumerate(words):
        group = lane // case.size
        out[lane % case.size, 32 * group : 32 * group + 32] *= 2.0 ** ((word >> 8 * byte & 255) - 127)
    return out


@pytest.mark.parametrize("case", _matrix_cases(), ids=str)
def test_matrix_products(case):
    """EXEC does not matter."""
    for seed, where in enumerate(("", "ab", "ac", "bk", "ck")):
        _assert_matrices(case, where, seed)


def test_a_scaled_product_with_constant_scales():
    case = next(case for case in _matrix_cases() if case.scaled and case.kinds == ("fp4", "fp4"))
    one, two = 0x7F7F7F7F, 0x80  # 1, and 2 in the lowest byte
    codes = [[[2] * case.depth] * case.size] * 2
    registers = {base + i: row for base in (4, 24) for i, row in enumerate(_matrix_registers(case, "fp4", codes[0]))}
    count = case.size**2 // LANES
    fields = {"vdst": v(60), "src0": v(4), "src1": v(24), "src2": constant(0), "cbsz": 4, "blgp": 4}
    program = encode("VOP3PX2", case.name, scale_src0=s(12), scale_src1=v(50), x2encoding=SCALED_PREFIX, **fields)
    registers[50] = [one] * LANES
    outcome = run(program, v=registers, s={12: two}, read_v=[60 + i for i in range(count)])
    assert {x for row in outcome.v.values() for x in row.tolist()} == {F32.encode(2.0 * case.depth)}


REFUSED = [
    ("v_mfma_f32_16x16x32_bf16", {"cbsz": 1}),
    ("v_mfma_f32_16x16x32_bf16", {"blgp": 1}),
    ("v_mfma_f32_16x16x128_f8f6f4", {"cbsz": 2}),
    ("v_mfma_f32_16x16x128_f8f6f4", {"blgp": 3}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_matrix_forms_without_semantics_are_refused(name, fields):
    with pytest.raises(gfx950.UnknownInstructionError, match=name):
        run(encode("VOP3P_MFMA", name, vdst=v(60), src0=v(4), src1=v(24), src2=constant(0), **fields))


# ---- Memory: loads and stores of each size ----


@dataclass(frozen=True)
class Width:
    """What one lane moves: bytes, whether a load extends the sign, and the half of a register that it fills or is."""

    size: int
    is_signed: bool = False
    half: int | None = None

    @property
    def registers(self) -> int:
        return max(self.size // 4, 1)


_WHOLE = {"dword": Width(4), "dwordx2": Width(8), "dwordx3": Width(12), "dwordx4": Width(16)}
LOADS = {
    "ubyte": Width(1),
    "sbyte": Width(1, True),
    "ushort": Width(2),
    "sshort": Width(2, True),
    **_WHOLE,
    **{f"ubyte_d16{name}": Width(1, half=half) for name, half in (("", 0), ("_hi", 1))},
    **{f"sbyte_d16{name}": Width(1, True, half) for name, half in (("", 0), ("_hi", 1))},
    **{f"short_d16{name}": Width(2, half=half) for name, half in (("", 0), ("_hi", 1))},
}
STORES = {
    "byte": Width(1),
    "byte_d16_hi": Width(1, half=1),
    "short": Width(2),
    "short_d16_hi": Width(2, half=1),
    **_WHOLE,
}
LDS_LOADS = {
    "u8": Width(1),
    "i8": Width(1, True),
    "u16": Width(2),
    "i16": Width(2, True),
    "b32": Width(4),
    "b64": Width(8),
    "b96": Width(12),
    "b128": Width(16),
    **{f"u8_d16{name}": Width(1, half=half) for name, half in (("", 0), ("_hi", 1))},
    **{f"i8_d16{name}": Width(1, True, half) for name, half in (("", 0), ("_hi", 1))},
    **{f"u16_d16{name}": Width(2, half=half) for name, half in (("", 0), ("_hi", 1))},
}
LDS_STORES = {
    "b8": Width(1),
    "b16": Width(2),
    "b8_d16_hi": Width(1, half=1),
    "b16_d16_hi": Width(2, half=1),
    "b32": Width(4),
    "b64": Width(8),
    "b96": Width(12),
    "b128": Width(16),
}
MEMORY_BYTES = 4096
STRIDE = 32  # bytes between the places that neighbouring lanes use


def _loaded(w: Width, data: bytes, old: int) -> list[int]:
    """The registers of a lane after a load."""
    if w.size >= 4:
        return list(struct.unpack(f"<{w.size // 4}I", data))
    x = int.from_bytes(data, "little", signed=w.is_signed)
    if w.half is None:
        return [x & M32]
    return [old & (M16 << 16) | x & M16 if w.half == 0 else old & M16 | (x & M16) << 16]


def _stored(w: Width, words: list[int]) -> bytes:
    data = struct.pack(f"<{len(words)}I", *words)
    start = 2 if w.half else 0
    return data[start : start + w.size]


def _random_bytes(count: int, seed: object) -> np.ndarray:
    return np.frombuffer(random.Random(str(seed)).randbytes(count), np.uint8).copy()


def _shuffled_places(seed: object) -> list[int]:
    places = [STRIDE * i for i in range(LANES)]
    random.Random(str(seed)).shuffle(places)
    return places


DATA, ADDRESS = 30, 20


def _add_to_pointer() -> bytes:
    """v[20:21] = the memory's address + v22."""
    carry = encode("VOP3SD", "v_add_co_u32", vdst=v(ADDRESS), sdst=s(VCC), src0=s(MEMORY_POINTER), src1=v(22))
    upper = v_mov(ADDRESS + 1, s(MEMORY_POINTER + 1))
    return (
        upper
        + carry
        + encode(
            "VOP3SD",
            "v_addc_co_u32",
            vdst=v(ADDRESS + 1),
            sdst=s(VCC),
            src0=v(ADDRESS + 1),
            src1=constant(0),
            src2=s(VCC),
        )
    )


def _buffer_resource(records: int, stride: int = 0) -> bytes:
    """s[40:43]: a raw buffer over the memory."""
    upper = encode("SOP2_LIT", "s_or_b32", sdst=s(41), ssrc0=s(41), ssrc1=s(LITERAL), literal=stride << 16)
    return s_mov(40, MEMORY_POINTER) + s_mov(41, MEMORY_POINTER + 1) + upper + s_set(42, records) + s_set(43, 0)


def _access(space: str, name: str, data: str, **fields) -> bytes:
    """An access to byte v22 + 8 of the memory, by each way there is to address it; the data in v30 (or a30: acc)."""
    fields = {data: v(DATA), **fields}
    if space == "global":  # a scalar base, and a 32-bit offset
        return encode("GLOBAL", f"global_{name}", addr=v(22), saddr=s(MEMORY_POINTER), offset=8, **fields)
    if space == "global64":  # the whole address in registers, and a negative offset
        near = encode("VOP2", "v_add_u32", vdst=v(22), src0=constant(24), vsrc1=v(22))
        return (
            near
            + _add_to_pointer()
            + encode("GLOBAL", f"global_{name}", addr=v(ADDRESS), saddr=s(127), offset=-16 & 0x1FFF, **fields)
        )
    if space == "flat":
        return _add_to_pointer() + encode("FLAT", f"flat_{name}", addr=v(ADDRESS), offset=8, **fields)
    fields["vdata"] = fields.pop(data)
    return _buffer_resource(MEMORY_BYTES) + encode(
        "MUBUF", f"buffer_{name}", vaddr=v(22), srsrc=s(40), soffset=constant(3), offset=5, offen=1, **fields
    )


SPACES = ("global", "global64", "flat", "buffer")


@pytest.mark.parametrize("accumulator", [0, 1])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", LOADS)
def test_loads(name, space, accumulator):
    w, memory, places = LOADS[name], _random_bytes(MEMORY_BYTES, name), _shuffled_places(space)
    rows = [DATA + 256 * accumulator + i for i in range(4)]
    program = _access(space, f"load_{name}", "vdst", acc=accumulator)
    outcome = run(program, v={22: places, **dict.fromkeys(rows, OLD)}, s=_exec(PARTLY), read_v=rows, memory=memory)
    for lane, (place, on) in enumerate(zip(places, _is_active(PARTLY), strict=True)):
        wanted = [OLD] * 4
        if on:
            wanted[: w.registers] = _loaded(w, memory[place + 8 :][: w.size].tobytes(), OLD)
        assert [int(outcome.v[row][lane]) for row in rows] == wanted


@pytest.mark.parametrize("accumulator", [0, 1])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", STORES)
def test_stores(name, space, accumulator):
    w, memory, places = STORES[name], _random_bytes(MEMORY_BYTES, name), _shuffled_places(space)
    data = {DATA + 256 * accumulator + i: _noise(LANES, (name, i)) for i in range(w.registers)}
    wanted = memory.copy()
    for lane, (place, on) in enumerate(zip(places, _is_active(PARTLY), strict=True)):
        if on:
            stored = _stored(w, [lanes[lane] for lanes in data.values()])
            wanted[place + 8 : place + 8 + w.size] = np.frombuffer(stored, np.uint8)
    program = _access(space, f"store_{name}", "data", acc=accumulator)
    run(program, v={22: places, **data}, s=_exec(PARTLY), memory=memory)
    assert (memory == wanted).all()


def test_every_load_and_store_has_a_case():
    names = {f"{space}_load_{name}" for space in ("global", "flat", "buffer", "scratch") for name in LOADS}
    names |= {f"{space}_store_{name}" for space in ("global", "flat", "buffer", "scratch") for name in STORES}
    names |= {f"global_load_lds_{name}" for name in TO_LDS}
    spaces = ("global_load", "global_store", "flat_load", "flat_store", "buffer_load", "buffer_store", "scratch_")
    assert {name for name in BINDERS if name.startswith(spaces)} == names


@pytest.mark.parametrize("name", ["dword", "dwordx4", "ubyte"])
def test_accesses_past_the_end_of_a_buffer(name):
    """A load gives 0, a store is dropped, and neither is a finding."""
    w, memory = LOADS[name], _random_bytes(MEMORY_BYTES, name)
    records = 10 * STRIDE + w.size - 1
    places = [STRIDE * i for i in range(LANES)]
    program = _buffer_resource(records)
    load = encode("MUBUF", f"buffer_load_{name}", vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=constant(0), offen=1)
    rows = [DATA + i for i in range(w.registers)]
    outcome = run(program + load, v={22: places, **dict.fromkeys(rows, OLD)}, read_v=rows, memory=memory)
    for lane, place in enumerate(places):
        wanted = _loaded(w, memory[place:][: w.size].tobytes() if lane < 10 else bytes(w.size), OLD)
        assert [int(outcome.v[row][lane]) for row in rows] == wanted
    store_name = f"buffer_store_{name.removeprefix('u')}"
    store = encode("MUBUF", store_name, vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=constant(0), offen=1)
    before = memory.copy()
    run(program + store, v={22: places, **dict.fromkeys(rows, 0x01010101)}, memory=memory)
    changed = np.nonzero(memory != before)[0]
    assert 0 < changed.size <= 10 * w.size
    assert changed.max() < 9 * STRIDE + w.size


NO_SIZE, MASKED = 2**31 - 2, 2**31  # what Triton gives as a buffer's size, and as the offset of a masked lane
DROPPED = {
    "load": encode("MUBUF", "buffer_load_dwordx2", vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=s(12), offen=1),
    "load to LDS": encode("MUBUF", "buffer_load_dword", vaddr=v(22), srsrc=s(40), soffset=s(12), offen=1, lds=1),
    "store": encode("MUBUF", "buffer_store_byte", vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=s(12), offen=1),
    "atomic": encode("MUBUF", "buffer_atomic_add", vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=s(12), offen=1),
    "compare and swap": encode(
        "MUBUF", "buffer_atomic_cmpswap", vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=s(12), offen=1
    ),
    "load with an offset": encode(
        "MUBUF", "buffer_load_dword", vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=s(12), offset=16, offen=1
    ),
}


@pytest.mark.parametrize("offset", [-64 % 2**32, MASKED + 8, NO_SIZE], ids=hex)
@pytest.mark.parametrize("name", DROPPED)
def test_faults_behind_the_range_check_of_a_buffer_without_a_size(name, offset):
    """The hardware drops such an access. The offset that Triton gives masked lanes is none, whatever is added to it."""
    places = [MASKED] * LANES
    places[7] = 64

    def kinds(scalar: int) -> list:
        memory = np.zeros(MEMORY_BYTES, np.uint8)
        program = _buffer_resource(NO_SIZE) + s_set(M0, 0) + DROPPED[name]
        registers = {22: places, DATA: 1, DATA + 1: 0}
        return run(program, v=registers, s={12: scalar}, memory=memory, lds=LDS_BYTES, faulty=True).result.findings

    assert kinds(0) == kinds(32) == []
    places[41] = offset
    for scalar in (0, 32):
        (finding,) = kinds(scalar)
        assert (finding.kind, finding.lane) == ("out-of-bounds", 41)
        assert finding.message.startswith("reads" if "load" in name else "writes")


def test_a_fault_behind_a_range_check_says_where_it_would_have_been():
    places = [4 * lane - 4 for lane in range(LANES)]
    load = encode("MUBUF", "buffer_load_dword", vdata=v(DATA), vaddr=v(22), srsrc=s(40), soffset=constant(0), offen=1)
    registers = {22: [place % 2**32 for place in places]}
    outcome = run(
        _buffer_resource(NO_SIZE) + load, v=registers, read_v=[DATA], memory=np.ones(64, np.uint32), faulty=True
    )
    (finding,) = outcome.result.findings
    assert "4 bytes before argument 2" in finding.message
    assert "offset of -4" in finding.message
    assert finding.lane == 0
    assert outcome.v[DATA].tolist() == [0] + [1] * (LANES - 1)


@pytest.mark.parametrize(("offset", "kinds"), [(MASKED, set()), (16, set()), (-16 % 2**32, {"out-of-bounds"})])
def test_scalar_loads_from_a_buffer_without_a_size(offset, kinds):
    program = s_mov(40, MEMORY_POINTER) + s_mov(41, MEMORY_POINTER + 1) + s_set(42, NO_SIZE)
    program += encode("SMEM", "s_buffer_load_dwordx2", sdata=s(16), sbase=s(40), soffset_en=1, soffset=s(12))
    outcome = run(program, s={12: offset}, read_s=[16], memory=np.full(64, 7, np.uint32), faulty=True)
    assert outcome.kinds() == kinds
    assert outcome.s[16] == [7 if offset == 16 else 0]


def test_structured_buffers():
    """index × stride + offset; past the records or the stride it is out of range."""
    memory = np.array(_noise(MEMORY_BYTES // 4, "structured"), np.uint32)
    indices, offsets = [i % 40 for i in range(LANES)], [4 * (i % 5) for i in range(LANES)]
    fields = {"srsrc": s(40), "soffset": s(12), "offset": 4, "idxen": 1, "offen": 1}
    load = encode("MUBUF", "buffer_load_dword", vdata=v(DATA), vaddr=v(22), **fields)
    outcome = run(
        _buffer_resource(30, stride=16) + load,
        v={22: indices, 23: offsets, DATA: OLD},
        s={12: 8},
        read_v=[DATA],
        memory=memory,
    )
    wanted = [
        int(memory[(16 * i + o + 4 + 8) // 4]) if i < 30 and o + 8 <= 16 else 0
        for i, o in zip(indices, offsets, strict=True)
    ]
    assert outcome.v[DATA].tolist() == wanted


# ---- Scratch ----


@pytest.mark.parametrize("addressing", ["offset", "scalar", "vector"])
@pytest.mark.parametrize("name", STORES)
def test_scratch(name, addressing):
    """What a lane stores is there for it alone."""
    w = STORES[name]
    load = {"byte": "ubyte", "short": "ushort", "byte_d16_hi": "ubyte_d16_hi", "short_d16_hi": "short_d16_hi"}.get(
        name, name
    )
    data = {DATA + i: _noise(LANES, (name, i)) for i in range(w.registers)}
    where = {
        "offset": {"saddr": s(127)},
        "scalar": {"saddr": s(12)},
        "vector": {"saddr": s(127), "sve": 1, "addr": v(22)},
    }
    start = {"offset": 16, "scalar": -32 & 0x1FFF, "vector": 8}[addressing]
    rows = [60 + i for i in range(4)]
    fields = where[addressing] | {"offset": start}
    program = encode("SCRATCH", f"scratch_store_{name}", data=v(DATA), **fields)
    program += encode("SCRATCH", f"scratch_load_{load}", vdst=v(60), **fields)
    registers = {22: [4 * (lane % 8) for lane in range(LANES)], **data, **dict.fromkeys(rows, OLD)}
    outcome = run(program, v=registers, s={12: 64, **_exec(PARTLY)}, read_v=rows, scratch=96)
    for lane, on in enumerate(_is_active(PARTLY)):
        wanted = [OLD] * 4
        if on:
            stored = _stored(w, [lanes[lane] for lanes in data.values()])
            wanted[: w.registers] = _loaded(LOADS[load], stored, OLD)
        assert [int(outcome.v[row][lane]) for row in rows] == wanted


@pytest.mark.parametrize("name", LOADS)
def test_loads_from_scratch(name):
    w, words = LOADS[name], [_noise(LANES, i) for i in range(4)]
    program = encode("SCRATCH", "scratch_store_dwordx4", data=v(DATA), saddr=s(127), offset=16)
    program += encode("SCRATCH", f"scratch_load_{name}", vdst=v(60), saddr=s(127), offset=16)
    rows = [60 + i for i in range(w.registers)]
    registers = {DATA + i: lanes for i, lanes in enumerate(words)} | dict.fromkeys(rows, OLD)
    outcome = run(program, v=registers, read_v=rows, scratch=32)
    for lane in range(LANES):
        data = struct.pack("<4I", *(lanes[lane] for lanes in words))[: w.size]
        assert [int(outcome.v[row][lane]) for row in rows] == _loaded(w, data, OLD)


# ---- LDS ----

LDS_BYTES = MEMORY_BYTES


def _fill_lds(rows: int = 16) -> bytes:
    """Lane i copies rows × 4 bytes of the memory, from byte 64 i, to the same place in LDS; v240 to v245 are used."""
    lane = encode("VOP3", "v_mbcnt_lo_u32_b32", vdst=v(240), src0=constant(-1), src1=constant(0))
    lane += encode("VOP3", "v_mbcnt_hi_u32_b32", vdst=v(240), src0=constant(-1), src1=v(240))
    program = lane + encode("VOP2", "v_lshlrev_b32", vdst=v(240), src0=constant(6), vsrc1=v(240))
    for offset in range(0, 4 * rows, 16):
        program += encode(
            "GLOBAL", "global_load_dwordx4", vdst=v(242), addr=v(240), saddr=s(MEMORY_POINTER), offset=offset
        )
        program += encode("DS", "ds_write_b128", addr=v(240), data0=v(242), offset0=offset)
    return program


def _drain_lds() -> bytes:
    """All of LDS back to the memory."""
    program = b""
    for offset in range(0, 64, 16):
        program += encode("DS", "ds_read_b128", vdst=v(242), addr=v(240), offset0=offset)
        program += encode(
            "GLOBAL", "global_store_dwordx4", data=v(242), addr=v(240), saddr=s(MEMORY_POINTER), offset=offset
        )
    return program


def _with_exec(mask: int, program: bytes) -> bytes:
    """A part of a program under another EXEC."""
    narrow = s_set(EXEC, mask) + s_set(EXEC + 1, mask >> 32)
    return narrow + program + s_set(EXEC, -1) + s_set(EXEC + 1, -1)


@pytest.mark.parametrize("accumulator", [0, 1])
@pytest.mark.parametrize("name", LDS_LOADS)
def test_lds_loads(name, accumulator):
    w, memory, places = LDS_LOADS[name], _random_bytes(LDS_BYTES, name), _shuffled_places(name)
    rows = [DATA + 256 * accumulator + i for i in range(4)]
    load = encode("DS", f"ds_read_{name}", vdst=v(DATA), addr=v(22), offset0=0x10, offset1=2, acc=accumulator)
    outcome = run(
        _fill_lds() + _with_exec(PARTLY, load),
        v={22: places, **dict.fromkeys(rows, OLD)},
        read_v=rows,
        memory=memory,
        lds=LDS_BYTES,
    )
    for lane, (place, on) in enumerate(zip(places, _is_active(PARTLY), strict=True)):
        wanted = [OLD] * 4
        if on:
            wanted[: w.registers] = _loaded(w, memory[place + 0x210 :][: w.size].tobytes(), OLD)
        assert [int(outcome.v[row][lane]) for row in rows] == wanted


@pytest.mark.parametrize("accumulator", [0, 1])
@pytest.mark.parametrize("name", LDS_STORES)
def test_lds_stores(name, accumulator):
    w, memory, places = LDS_STORES[name], _random_bytes(LDS_BYTES, name), _shuffled_places(name)
    data = {DATA + 256 * accumulator + i: _noise(LANES, (name, i)) for i in range(w.registers)}
    wanted = memory.copy()
    for lane, (place, on) in enumerate(zip(places, _is_active(PARTLY), strict=True)):
        if on:
            stored = _stored(w, [lanes[lane] for lanes in data.values()])
            wanted[place + 0x210 : place + 0x210 + w.size] = np.frombuffer(stored, np.uint8)
    store = encode("DS", f"ds_write_{name}", data0=v(DATA), addr=v(22), offset0=0x10, offset1=2, acc=accumulator)
    program = _fill_lds() + _with_exec(PARTLY, store) + _drain_lds()
    run(program, v={22: places, **data}, memory=memory, lds=LDS_BYTES)
    assert (memory == wanted).all()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(("suffix", "unit"), [("2", 1), ("2st64", 64)])
def test_lds_accesses_to_two_places(suffix, unit, bits):
    """Offsets count elements, or 64 of them; the address may be in a register that is written."""
    size, offsets = bits // 8, (3, 1) if unit == 64 else (5, 30)
    first, second = (offset * unit * size for offset in offsets)
    memory, places = _random_bytes(LDS_BYTES, bits), [8 * (lane * 37 % 64) for lane in range(LANES)]
    count, fields = bits // 32, {"offset0": offsets[0], "offset1": offsets[1]}
    load = encode("DS", f"ds_read{suffix}_b{bits}", vdst=v(22), addr=v(22), **fields)
    rows = [22 + i for i in range(2 * count)]
    registers = {**dict.fromkeys(rows, OLD), 22: places}
    outcome = run(_fill_lds() + load, v=registers, read_v=rows, memory=memory, lds=LDS_BYTES)
    for lane, place in enumerate(places):
        data = memory[place + first :][:size].tobytes() + memory[place + second :][:size].tobytes()
        assert [int(outcome.v[row][lane]) for row in rows] == list(struct.unpack(f"<{2 * count}I", data))
    data = {row: _noise(LANES, row) for base in (30, 40) for row in range(base, base + count)}
    wanted, before = memory.copy(), memory.copy()
    spread = [16 * lane for lane in range(LANES)]
    for base, offset in ((30, first), (40, second)):
        for lane, place in enumerate(spread):
            stored = _stored(Width(size), [data[base + i][lane] for i in range(count)])
            wanted[place + offset : place + offset + size] = np.frombuffer(stored, np.uint8)
    store = encode("DS", f"ds_write{suffix}_b{bits}", addr=v(22), data0=v(30), data1=v(40), **fields)
    run(_fill_lds() + store + _drain_lds(), v={22: spread, **data}, memory=memory, lds=LDS_BYTES)
    assert (memory == wanted).all()
    assert (memory != before).any()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_transposing_lds_loads(bits):
    """16 lanes name the rows, 8 bytes each, of a matrix with 16 columns; a lane receives a column."""
    memory, places = _random_bytes(LDS_BYTES, bits), [8 * (lane * 29 % 512) for lane in range(LANES)]
    program = _fill_lds() + encode("DS", f"ds_read_b64_tr_b{bits}", vdst=v(DATA), addr=v(22), offset0=16)
    outcome = run(
        program, v={22: places, DATA: OLD, DATA + 1: OLD}, read_v=[DATA, DATA + 1], memory=memory, lds=LDS_BYTES
    )
    for lane, got in enumerate(outcome.pair(DATA).tolist()):
        group = places[lane // 16 * 16 :][:16]
        text = b"".join(memory[place + 16 :][:8].tobytes() for place in group)
        whole = int.from_bytes(text, "little")
        column = lane % 16
        elements = [whole >> bits * (16 * row + column) & ((1 << bits) - 1) for row in range(64 // bits)]
        assert got == sum(x << bits * i for i, x in enumerate(elements))


# ---- Loads from global memory to LDS ----

TO_LDS = {"ubyte": Width(1), "sbyte": Width(1, True), "ushort": Width(2), "sshort": Width(2, True), **_WHOLE}
del TO_LDS["dwordx2"]


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "GLOBAL") for name in TO_LDS), *((name, "MUBUF") for name in TO_LDS)]
)
def test_direct_loads_to_lds(name, form):
    """Lane i's bytes go to M0 + offset + i × size; a byte or a short fills a dword."""
    w, memory, places = TO_LDS[name], _random_bytes(MEMORY_BYTES, name), _shuffled_places(name)
    wanted = memory.copy()
    size = max(w.size, 4)
    for lane, (place, on) in enumerate(zip(places, _is_active(PARTLY), strict=True)):
        if on:
            data = struct.pack(f"<{w.registers}I", *_loaded(w, memory[place + 16 :][: w.size].tobytes(), 0))
            at = 0x200 + 16 + size * lane
            wanted[at : at + size] = np.frombuffer(data, np.uint8)
    if form == "GLOBAL":
        load = encode("GLOBAL", f"global_load_lds_{name}", addr=v(22), saddr=s(MEMORY_POINTER), offset=16)
    else:
        fields = {"vaddr": v(22), "srsrc": s(40), "soffset": constant(0), "offen": 1, "offset": 16, "lds": 1}
        load = _buffer_resource(MEMORY_BYTES) + encode("MUBUF", f"buffer_load_{name}", **fields)
    program = s_set(M0, 0x200) + _fill_lds() + _with_exec(PARTLY, load) + _drain_lds()
    run(program, v={22: places}, memory=memory, lds=LDS_BYTES)
    assert (memory == wanted).all()


# ---- Atomics ----


def _raw(kind: str, function: Callable) -> Callable:
    """A function of numbers as one of bits."""
    return lambda old, new: bits_of(kind, function(value_of(kind, old), value_of(kind, new)))


def _both_halves(f) -> Callable:
    def add(old, new):
        return sum(f.encode(f.decode(old >> p & M16) + f.decode(new >> p & M16)) << p for p in (0, 16))

    return add


def _increment(old: int, limit: int) -> int:
    return 0 if old >= limit else old + 1


def _decrement(old: int, limit: int) -> int:
    return limit if old == 0 or old > limit else old - 1


# operation: function of the old and the given value, by the kind of number
OPERATIONS = {
    "swap": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "rsub": lambda old, new: new - old,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "inc": _increment,
    "dec": _decrement,
}


@dataclass(frozen=True)
class Atomic:
    kind: str
    function: Callable | None  # of bits; None for compare and swap


def _global_atomics() -> dict[str, Atomic]:
    table = {}
    for suffix, bits in (("", 32), ("_x2", 64)):
        unsigned, signed_ = f"u{bits}", f"i{bits}"
        for name in ("swap", "add", "sub", "and", "or", "xor", "inc", "dec"):
            table[name + suffix] = Atomic(unsigned, _raw(unsigned, OPERATIONS[name]))
        for name in ("min", "max"):
            table[f"u{name}{suffix}"] = Atomic(unsigned, _raw(unsigned, OPERATIONS[name]))
            table[f"s{name}{suffix}"] = Atomic(signed_, _raw(signed_, OPERATIONS[name]))
        table[f"cmpswap{suffix}"] = Atomic(unsigned, None)
    for kind in ("f32", "f64"):
        table[f"add_{kind}"] = Atomic(kind, _raw(kind, OPERATIONS["add"]))
    table |= {"min_f64": Atomic("f64", _raw("f64", minimum)), "max_f64": Atomic("f64", _raw("f64", maximum))}
    table |= {f"pk_add_{name}": Atomic("u32", _both_halves(FLOATS[name])) for name in ("f16", "bf16")}
    return table


def _lds_atomics() -> dict[str, Atomic]:
    table = {}
    for bits in (32, 64):
        unsigned = f"u{bits}"
        for name in ("add", "sub", "rsub", "inc", "dec", "min", "max"):
            table[f"{name}_u{bits}"] = Atomic(unsigned, _raw(unsigned, OPERATIONS[name]))
        for name in ("and", "or", "xor"):
            table[f"{name}_b{bits}"] = Atomic(unsigned, _raw(unsigned, OPERATIONS[name]))
        for name in ("min", "max"):
            table[f"{name}_i{bits}"] = Atomic(f"i{bits}", _raw(f"i{bits}", OPERATIONS[name]))
        for name, function in (("add", OPERATIONS["add"]), ("min", minimum), ("max", maximum)):
            table[f"{name}_f{bits}"] = Atomic(f"f{bits}", _raw(f"f{bits}", function))
        table |= {f"wrxchg_b{bits}": Atomic(unsigned, OPERATIONS["swap"]), f"cmpst_b{bits}": Atomic(unsigned, None)}
    table |= {f"pk_add_{name}": Atomic("u32", _both_halves(FLOATS[name])) for name in ("f16", "bf16")}
    return table


GLOBAL_ATOMICS, LDS_ATOMICS = _global_atomics(), _lds_atomics()


def _lds_atomic_names(name: str) -> list[str]:
    """Without and with a returned value; an exchange always returns one."""
    head, tail = name.rsplit("_", 1)
    returning = f"ds_{head}_rtn_{tail}"
    return [returning] if head == "wrxchg" else [f"ds_{name}", returning]


def test_every_atomic_has_a_case():
    names = {f"{space}_atomic_{name}" for space in ("global", "flat", "buffer") for name in GLOBAL_ATOMICS}
    names |= {each for name in LDS_ATOMICS for each in _lds_atomic_names(name)}
    others = ("ds_read", "ds_write", "ds_bpermute", "ds_permute", "ds_swizzle")
    assert {n for n in BINDERS if "_atomic_" in n or (n.startswith("ds_") and not n.startswith(others))} == names


@dataclass(frozen=True)
class AtomicInputs:
    """Old values at every place, what lanes bring (and compare with), and the places, of which some are shared."""

    old: list[int]
    given: list[int]
    compare: list[int]
    places: list[int]


def _atomic_inputs(atomic: Atomic, seed: object) -> AtomicInputs:
    rng = random.Random(str(seed))
    kind = atomic.kind
    if atomic.function is not None and "pk" in str(seed):
        finite = 0x7BFF7BFF  # in both halves
        old, given = ([rng.getrandbits(32) & finite for _ in range(LANES)] for _ in range(2))
    else:
        numbers = [draw(kind, rng) for _ in range(4 * LANES)]
        if kind in FLOATS:  # which of two NaNs stays, and a zero's sign, is no matter here
            numbers = [x for x in numbers if not FLOATS[kind].is_nan(x) and FLOATS[kind].decode(x)]
        old, given = numbers[:LANES], numbers[LANES : 2 * LANES]
    places = [lane if lane % 3 else 0 for lane in range(LANES)]
    compare = [old[place] if rng.random() < 0.5 else given[lane] for lane, place in enumerate(places)]
    return AtomicInputs(old, given, compare, places)


def _atomic_results(atomic: Atomic, inputs: AtomicInputs, active: list[bool]) -> tuple[list[int], dict[int, int]]:
    """Memory after, and what each active lane gets; lanes that share a place go in order."""
    memory, returned = list(inputs.old), {}
    for lane, place in enumerate(inputs.places):
        if active[lane]:
            old, new = memory[place], inputs.given[lane]
            returned[lane] = old
            if atomic.function is not None:
                memory[place] = atomic.function(old, new)
            elif old == inputs.compare[lane]:
                memory[place] = new
    return memory, returned


def _atomic_registers(inputs: AtomicInputs, bits: int, given_row: int, compare_row: int) -> dict[int, list[int]]:
    registers = {}
    for row, values in ((given_row, inputs.given), (compare_row, inputs.compare)):
        registers[row] = [x & M32 for x in values]
        if bits == 64:
            registers[row + 1] = [x >> 32 for x in values]
    return registers


def _assert_atomic(atomic: Atomic, inputs, outcome, memory: np.ndarray, returns: bool) -> None:
    kind, bits = atomic.kind, width(atomic.kind)
    after, returned = _atomic_results(atomic, inputs, _is_active(PARTLY))
    words = memory[:LANES].tolist()
    _assert_results(kind, words, after, [(x,) for x in inputs.old])
    got = (outcome.pair(60) if bits == 64 else outcome.v[60]).tolist()
    old = OLD << 32 | OLD if bits == 64 else OLD
    assert got == [returned.get(lane, old) if returns else old for lane in range(LANES)]


@pytest.mark.parametrize("returns", [0, 1])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", GLOBAL_ATOMICS)
def test_global_atomics(name, space, returns):
    """sc0 asks for the value from before. Compare and swap has the new value first, then what it compares with."""
    atomic = GLOBAL_ATOMICS[name]
    inputs, size = _atomic_inputs(atomic, name), width(atomic.kind) // 8
    memory = np.zeros(LANES + 8 // size, f"u{size}")
    memory[8 // size :] = inputs.old
    registers = {22: [size * place for place in inputs.places], 60: OLD, 61: OLD}
    registers |= _atomic_registers(inputs, 8 * size, DATA, DATA + size // 4)
    if space == "buffer":  # gives the old value in place of the data
        program = _access(space, f"atomic_{name}", "data", sc0=returns)
        program += v_mov(60, v(DATA)) + v_mov(61, v(DATA + 1)) if returns else b""
    else:
        program = _access(space, f"atomic_{name}", "data", vdst=v(60), sc0=returns)
    outcome = run(program, v=registers, s=_exec(PARTLY), read_v=[60, 61], memory=memory)
    _assert_atomic(atomic, inputs, outcome, memory[8 // size :], bool(returns))


@pytest.mark.parametrize("name", [each for name in LDS_ATOMICS for each in _lds_atomic_names(name)])
def test_lds_atomics(name):
    """ds_cmpst compares with data0 and stores data1."""
    atomic = LDS_ATOMICS[name.replace("_rtn", "").removeprefix("ds_")]
    inputs, size = _atomic_inputs(atomic, name), width(atomic.kind) // 8
    memory = np.zeros(LDS_BYTES // size, f"u{size}")
    memory[:LANES] = inputs.old
    given, compare = (40, DATA) if atomic.function is None else (DATA, 40)
    registers = {22: [size * place for place in inputs.places], 60: OLD, 61: OLD}
    registers |= _atomic_registers(inputs, 8 * size, given, compare)
    instruction = encode("DS", name, vdst=v(60), addr=v(22), data0=v(DATA), data1=v(40))
    program = _fill_lds() + barrier() + _with_exec(PARTLY, instruction) + barrier() + _drain_lds()
    outcome = run(program, v=registers, read_v=[60, 61], memory=memory, lds=LDS_BYTES)
    _assert_atomic(atomic, inputs, outcome, memory, "_rtn" in name)


# ---- Races in LDS ----

LANE_PLACE, SAME_PLACE = 1, 2  # registers with byte addresses: 4 × the lane, and 0
V_ZERO, V_WAVE, V_LANE = 2, 3, 4  # registers with data


def _lds_read(place: int = LANE_PLACE) -> bytes:
    return encode("DS", "ds_read_b32", vdst=v(10), addr=v(place))


def _lds_write(data: int, place: int = LANE_PLACE) -> bytes:
    return encode("DS", "ds_write_b32", addr=v(place), data0=v(data))


def _lds_add(place: int = LANE_PLACE) -> bytes:
    return encode("DS", "ds_add_u32", addr=v(place), data0=v(V_ZERO))


def _run_waves(*programs: bytes, order: str | None = None):
    """A workgroup whose waves each run a program of their own, on LDS that the first has filled with zeros."""
    end = encode("SOPP", "s_endpgm")
    text = encode("VOP2", "v_and_b32", vdst=v(4), src0=constant(63), vsrc1=v(0))
    text += encode("VOP2", "v_lshlrev_b32", vdst=v(1), src0=constant(2), vsrc1=v(4)) + v_mov(2, constant(0))
    text += encode("VOP2", "v_lshrrev_b32", vdst=v(3), src0=constant(6), vsrc1=v(0))
    text += encode("VOP1", "v_readfirstlane_b32", vdst=v(10), src0=v(3))
    text += _only_wave(0, _lds_write(V_ZERO)) + barrier()
    text += b"".join(_only_wave(number, program + end) for number, program in enumerate(programs)) + end
    return gfx950.run(code_object(text, arguments=0, lds=1024, waves=len(programs)), 1, [], order=order)


def _only_wave(number: int, program: bytes) -> bytes:
    """s10 holds the wave's number."""
    other = encode("SOPC", "s_cmp_lg_u32", ssrc0=s(10), ssrc1=constant(number))
    return other + encode("SOPP", "s_cbranch_scc1", simm16=len(program) // 4) + program


NO_RACE = {
    "a wave's own read, atomic and write": [_lds_read() + _lds_add() + _lds_read() + _lds_write(V_LANE), b""],
    "lanes that meet, with the same last value in each wave": [_lds_write(V_LANE, SAME_PLACE)] * 2,
    "the same values, read back by each wave": [_lds_write(V_LANE) + _lds_read()] * 3,
    "atomics": [_lds_add(), _lds_add(SAME_PLACE), _lds_add()],
    "reads": [_lds_read(), _lds_read(SAME_PLACE)],
    "other bytes": [
        encode("DS", "ds_write_b16", addr=v(LANE_PLACE), data0=v(V_LANE)),
        encode("DS", "ds_write_b16", addr=v(LANE_PLACE), data0=v(V_LANE), offset0=2),
    ],
    "a barrier between": [_lds_write(V_WAVE) + barrier() + barrier(), barrier() + _lds_read() + barrier()],
}
RACES = {
    "a read and a write": [_lds_read(), _lds_write(V_LANE)],
    "a read and a write of the value already there": [_lds_read(), _lds_write(V_ZERO)],
    "writes of different values": [_lds_write(V_WAVE), _lds_write(V_WAVE)],
    "lanes that meet, with another last value in each wave": [_lds_write(V_WAVE, SAME_PLACE)] * 2,
    "an atomic and a read": [_lds_add(), _lds_read()],
    "an atomic and a write of the value already there": [_lds_add(), _lds_write(V_ZERO)],
    "two atomics, and a read by one of the two waves": [_lds_add() + _lds_read(), _lds_add()],
    "three atomics, and a read by one of the three waves": [_lds_add(), _lds_add() + _lds_read(), _lds_add()],
    "a write that both made, then a write by one": [
        _lds_write(V_LANE) + _lds_read(),
        _lds_write(V_LANE) + _lds_write(V_WAVE),
    ],
    "a read of what another wave alone wrote, in one byte": [
        encode("DS", "ds_write_b8", addr=v(LANE_PLACE), data0=v(V_LANE), offset0=3),
        _lds_read(),
    ],
}


@pytest.mark.parametrize("order", [None, "lockstep", "shuffled"])
@pytest.mark.parametrize("name", NO_RACE)
def test_no_race(name, order):
    for programs in itertools.permutations(NO_RACE[name]):
        result = _run_waves(*programs, order=order)
        assert result.ok, "\n".join(map(str, result.findings))


@pytest.mark.parametrize("order", [None, "lockstep", "shuffled"])
@pytest.mark.parametrize("name", RACES)
def test_races(name, order):
    for programs in itertools.permutations(RACES[name]):
        result = _run_waves(*programs, order=order)
        assert {finding.kind for finding in result.findings} == {"race"}, name


def test_a_race_names_the_waves_and_the_byte():
    others = [_lds_write(V_ZERO), _lds_write(V_ZERO)]
    (finding,) = _run_waves(*others, encode("DS", "ds_read_b32", vdst=v(10), addr=v(SAME_PLACE), offset0=8)).findings
    assert finding.message == "reads LDS byte 8, which waves 0, 1 wrote with no barrier between"
    assert (finding.wave, finding.lane, finding.address) == (2, 0, 8)


def test_races_of_random_accesses():
    """Against the rule read pair by pair: which two accesses of different waves may not meet between barriers."""
    rng, raced = random.Random(5), 0
    for _ in range(300):
        findings = Findings(lambda: Place("", 0, (0, 0, 0), 0, None))
        lds, content = Lds(4, findings), None
        lds.store(np.zeros(1, np.int64), np.zeros((1, 1), np.uint8), np.zeros(1, int), 0, 1)
        lds.pass_barrier()
        past, content, expected = [], 0, False
        for _ in range(rng.randint(2, 6)):
            wave, deed, value = rng.randrange(3), rng.choice(["read", "write", "atomic"]), rng.randrange(2)
            same = deed == "write" and value == content
            wrote = {w for w, d in past if d == "write"}
            for other, did in past:
                both = {deed, did}
                if other == wave or both in ({"read"}, {"atomic"}):
                    continue
                if both == {"write"}:
                    expected |= not same
                elif both == {"read", "write"}:
                    reader = wave if deed == "read" else other
                    expected |= reader not in wrote or (deed == "write" and not same)
                else:
                    expected = True
            past.append((wave, deed))
            at, lane = np.zeros(1, np.int64), np.zeros(1, int)
            if deed != "write":
                lds.load(at, 1, lane, wave, 1, atomic=deed == "atomic")
            if deed != "read":
                content = value
                lds.store(at, np.full((1, 1), value, np.uint8), lane, wave, 1, atomic=deed == "atomic")
        assert bool(findings.list()) == expected, past
        raced += expected
    assert 100 < raced < 290


# ---- Bank conflicts: 64 banks of 4 bytes ----

CONFLICTS = [
    # instruction, its byte address as a multiple of the lane, EXEC, extra passes
    ("ds_read_b32", 4, -1, 0),
    ("ds_read_b32", 0, -1, 0),  # one dword for all
    ("ds_read_b32", 8, -1, 1),  # two lanes a bank
    ("ds_read_b32", 256, -1, 63),  # all in one bank
    ("ds_write_b32", 128, -1, 31),
    ("ds_read_b64", 8, -1, 0),  # in two groups of 32 lanes
    ("ds_read_b64", 16, -1, 2),
    ("ds_read_b128", 16, -1, 0),  # in four groups of 16
    ("ds_write_b128", 32, -1, 4),
    ("ds_read_b128", 256, -1, 4 * 15),
    ("ds_read_b128", 256, 0x0001000100010001, 0),  # a lane in each group
    ("ds_read_b128", 256, 0x000F, 3),  # four in the first
    ("ds_add_u32", 4, -1, 0),
    ("ds_add_u32", 0, -1, 63),  # atomics on one dword follow one another
    ("ds_add_u32", 0, 0xFF, 7),
]


@pytest.mark.parametrize(("name", "stride", "exec_mask", "extra"), CONFLICTS)
def test_bank_conflicts(name, stride, exec_mask, extra):
    data = {"vdst": v(60)} if "read" in name else {"data0": v(DATA)}
    program = _with_exec(exec_mask & (2**64 - 1), encode("DS", name, addr=v(23), **data))
    places = [stride * lane for lane in range(LANES)]
    registers = {23: places} | {DATA + i: 1 for i in range(4)}
    outcome = run(program, v=registers, lds=64 * 256, faulty=True)
    assert outcome.kinds() <= {"uninitialised"}
    assert outcome.result.counters.lds_bank_conflicts == extra


# ---- Denormal numbers, as the MODE register has them ----

DENORMAL, NEGATIVE_DENORMAL = 0x00000001, 0x807FFFFF
SMALLEST, TINY = 0x00800000, 0x00C00000  # 2^-126, and half as much again: their difference is denormal
FLUSHING, KEEPS_INPUTS, KEEPS_RESULTS = 0xC0, 0xD0, 0xE0


def _float_pairs() -> tuple[list[int], list[int]]:
    values = [DENORMAL, NEGATIVE_DENORMAL, SMALLEST, TINY, 0x3F800000, 0, 0x80000000, 0x7F800000]
    pairs = list(itertools.product(values, repeat=2))
    assert len(pairs) == LANES
    return [a for a, _ in pairs], [b for _, b in pairs]


def _zeroed(bits: int, when: bool) -> int:
    return bits & 0x80000000 if when and bits & 0x7F800000 == 0 else bits


@pytest.mark.parametrize("mode", [FLUSHING, KEEPS_INPUTS, KEEPS_RESULTS, 0xF0], ids=hex)
@pytest.mark.parametrize(
    ("form", "name", "function"),
    [
        ("VOP2", "v_add_f32", lambda x, y: x + y),
        ("VOP2", "v_sub_f32", lambda x, y: x - y),
        ("VOP2", "v_max_f32", max),
        ("VOP2", "v_fmac_f32", lambda x, y: x * y),
        ("VOP3P", "v_pk_add_f32", lambda x, y: x + y),
    ],
)
def test_denormals(form, name, function, mode):
    """The sum, … of numbers that are zeros on the way in, and on the way out, where their bit of the mode is 0."""
    a, b = _float_pairs()
    fields = {"src0": v(2), "vsrc1" if form == "VOP2" else "src1": v(4)}
    outcome = run(
        v_mov(6, constant(0)) + encode(form, name, vdst=v(6), **fields),
        v={2: a, 3: 0, 4: b, 5: 0},
        read_v=[6],
        mode=mode,
    )
    for x, y, got in zip(a, b, outcome.v[6].tolist(), strict=True):
        x, y = (_zeroed(bits, not mode & 0x10) for bits in (x, y))
        first, second = (struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (x, y))
        value = float(function(first, second))
        if math.isnan(value):
            assert got & 0x7FFFFFFF > 0x7F800000
            continue
        wanted = struct.unpack("<I", struct.pack("<f", value))[0]
        wanted = _zeroed(wanted, not mode & 0x20)
        assert got == wanted or (got | wanted) & 0x7FFFFFFF == 0, (hex(x), hex(y), hex(got), hex(wanted))


@pytest.mark.parametrize(("mode", "smaller"), [(FLUSHING, False), (0xF0, True)])
def test_denormals_in_comparisons_and_selections(mode, smaller):
    """A comparison takes a denormal for zero; a selection moves its bits."""
    less = encode("VOPC", "v_cmp_lt_f32", src0=constant(0), vsrc1=v(2))
    pick = encode("VOP3", "v_cndmask_b32", vdst=v(6), src0=v(2), src1=v(2), src2=s(VCC), neg=1)
    outcome = run(less + pick, v={2: DENORMAL}, read_v=[6], read_s=[VCC, VCC + 1], mode=mode)
    assert set(outcome.mask(VCC)) == {smaller}
    assert set(outcome.v[6].tolist()) == {DENORMAL if smaller else DENORMAL | 0x80000000}


def test_a_program_may_keep_denormals_for_a_while():
    keep = encode("SOPK_LIT", "s_setreg_imm32_b32", simm16=_mode_field(4, 2), literal=3)
    drop = encode("SOPK_LIT", "s_setreg_imm32_b32", simm16=_mode_field(4, 2), literal=0)
    doubled = [encode("VOP2", "v_add_f32", vdst=v(6 + i), src0=v(2), vsrc1=v(2)) for i in range(3)]
    program = doubled[0] + keep + doubled[1] + drop + doubled[2]
    outcome = run(program, v={2: DENORMAL}, read_v=[6, 7, 8], mode=FLUSHING)
    assert [set(outcome.v[row].tolist()) for row in (6, 7, 8)] == [{0}, {2 * DENORMAL}, {0}]


@pytest.mark.parametrize("mode", [0xF1, 0xF4, 0x30, 0x70, 0xB0], ids=hex)
def test_modes_without_semantics_are_refused(mode):
    with pytest.raises(gfx950.CodeObjectError, match=r"compiled for (rounding|denormal)"):
        run(b"", mode=mode)


@pytest.mark.parametrize(("offset", "size", "value"), [(0, 2, 1), (2, 2, 3), (6, 2, 0), (4, 2, 0)])
def test_changes_of_mode_without_semantics_are_refused(offset, size, value):
    program = encode("SOPK_LIT", "s_setreg_imm32_b32", simm16=_mode_field(offset, size), literal=value)
    with pytest.raises(gfx950.UnknownInstructionError, match=r"s_setreg_imm32_b32.*no semantics yet for"):
        run(program)


# ---- Which registers hold a value ----

NEVER = 70  # v70 and v71 are never written

COPIES = [
    ("VOP1", "v_mov_b32", {"src0": v(NEVER)}),
    ("VOP2", "v_add_u32", {"src0": v(2), "vsrc1": v(NEVER)}),
    ("VOP3", "v_fma_f32", {"src0": v(2), "src1": v(2), "src2": v(NEVER)}),
    ("VOP3P", "v_pk_add_u16", {"src0": v(2), "src1": v(NEVER)}),
    ("VOP3P", "v_pk_add_f32", {"src0": v(2), "src1": v(NEVER)}),
    ("VOP3P", "v_mad_mix_f32", {"src0": v(2), "src1": v(2), "src2": v(NEVER)}),
    ("VOP3P", "v_dot2_f32_f16", {"src0": v(2), "src1": v(2), "src2": v(NEVER)}),
    ("VOP3", "v_cvt_pk_fp8_f32", {"src0": v(2), "src1": v(NEVER)}),
    ("VOP3", "v_cvt_scalef32_pk_f32_fp8", {"src0": v(2), "src1": v(NEVER)}),
    ("VOP1", "v_cvt_pk_f32_fp8", {"src0": v(NEVER)}),
    ("VOP3SD", "v_add_co_u32", {"src0": v(2), "src1": v(NEVER), "sdst": s(20)}),
    ("VOP3", "v_cndmask_b32", {"src0": v(NEVER), "src1": v(2), "src2": s(20)}),
    ("VOP3", "v_mbcnt_lo_u32_b32", {"src0": v(2), "src1": v(NEVER)}),
    ("VOP1_DPP16", "v_mov_b32", {"src0": DPP, "vsrc0": v(NEVER), "dpp": 0x121, "row_mask": 15, "bank_mask": 15}),
    ("VOP1_SDWA", "v_mov_b32", {"src0": SDWA, "vsrc0": v(NEVER), "src0_sel": 4, "dst_sel": 6}),
]
ZERO_MASK = s_set(20, 0) + s_set(21, 0)


def _store_result() -> bytes:
    return encode("GLOBAL", "global_store_dword", data=v(RESULT), addr=v(22), saddr=s(MEMORY_POINTER))


def _kinds(program: bytes, **options) -> set[str]:
    registers = {2: 1, 22: [4 * lane for lane in range(LANES)], **options.pop("v", {})}
    return run(
        program, v=registers, memory=np.zeros(1024, np.uint32), lds=1024, scratch=64, faulty=True, **options
    ).kinds()


@pytest.mark.parametrize(("form", "name", "fields"), COPIES)
def test_computing_with_a_register_never_written(form, name, fields):
    """No finding, until the result is stored; none either where the value does not come from such a register."""
    program = ZERO_MASK + encode(form, name, vdst=v(RESULT), **fields)
    assert _kinds(program) == set()
    assert _kinds(program + _store_result()) == {"uninitialised"}
    known = {NEVER: 3, NEVER + 1: 4, RESULT: 5}
    assert _kinds(program + _store_result(), v=known) == set()


def test_a_selected_value_is_what_counts():
    """v_cndmask takes nothing from the operand that its mask leaves out."""
    fields = {"src0": v(NEVER), "src1": v(2), "src2": s(20)}
    program = s_set(20, -1) + s_set(21, -1) + encode("VOP3", "v_cndmask_b32", vdst=v(RESULT), **fields)
    assert _kinds(program + _store_result()) == set()
    program = s_set(20, -2) + s_set(21, -1) + encode("VOP3", "v_cndmask_b32", vdst=v(RESULT), **fields)
    assert _kinds(program + _store_result()) == {"uninitialised"}


USES = {
    "an address": encode("GLOBAL", "global_load_dword", vdst=v(RESULT), addr=v(NEVER), saddr=s(MEMORY_POINTER)),
    "a buffer's offset": _buffer_resource(4096)
    + encode("MUBUF", "buffer_load_dword", vdata=v(RESULT), vaddr=v(NEVER), srsrc=s(40), soffset=constant(0), offen=1),
    "a place in LDS": encode("DS", "ds_write_b32", addr=v(NEVER), data0=v(2)),
    "a place to read in LDS": encode("DS", "ds_read_b32", addr=v(NEVER), vdst=v(2)),
    "a comparison": encode("VOPC", "v_cmp_lt_u32", src0=v(2), vsrc1=v(NEVER)),
    "a class": encode("VOPC", "v_cmp_class_f32", src0=v(NEVER), vsrc1=v(2)),
    "a scalar register": encode("VOP1", "v_readfirstlane_b32", vdst=v(12), src0=v(NEVER)),
    "one lane": encode("VOP3", "v_readlane_b32", vdst=v(12), src0=v(NEVER), src1=constant(5)),
    "a stored value": encode("GLOBAL", "global_store_dword", data=v(NEVER), addr=v(22), saddr=s(MEMORY_POINTER)),
    "half of a stored pair": encode(
        "GLOBAL", "global_store_dwordx2", data=v(NEVER - 1), addr=v(22), saddr=s(MEMORY_POINTER)
    ),
    "an atomic": encode("GLOBAL", "global_atomic_add", data=v(NEVER), addr=v(22), saddr=s(MEMORY_POINTER)),
    "an LDS atomic": encode("DS", "ds_add_u32", data0=v(NEVER), addr=v(22)),
    "a lane to read": encode("DS", "ds_bpermute_b32", vdst=v(RESULT), addr=v(NEVER), data0=v(2)),
    "a matrix": encode("VOP3P_MFMA", "v_mfma_f32_16x16x16_f16", vdst=v(60), src0=v(2), src1=v(NEVER), src2=constant(0)),
    "an addend": encode("VOP3P_MFMA", "v_mfma_f32_16x16x16_f16", vdst=v(60), src0=v(2), src1=v(2), src2=v(NEVER)),
    "a place in scratch": encode("SCRATCH", "scratch_store_dword", data=v(2), saddr=s(127), sve=1, addr=v(NEVER)),
}


@pytest.mark.parametrize("use", USES)
def test_using_a_register_never_written(use):
    base = {3: 1, NEVER - 1: 1}
    assert "uninitialised" in _kinds(USES[use], v=base)
    whole = {NEVER + i: [4 * lane % 32 for lane in range(LANES)] for i in range(4)}
    lds = encode("DS", "ds_write_b32", addr=v(22), data0=v(2)) + barrier()
    assert _kinds(lds + USES[use], v=base | whole) == set()


def test_only_active_lanes_are_asked():
    """The lower 32 lanes get a value, and they alone are then used."""
    half = _with_exec(M32, v_set(RESULT, 7))
    assert _kinds(half + _with_exec(M32, _store_result())) == set()
    assert _kinds(half + _store_result()) == {"uninitialised"}


def _through(write: bytes, read: bytes) -> bytes:
    """v2 and v70, which holds nothing, written as a pair, and read back to v8 and v9."""
    return v_mov(69, v(2)) + write + read


PASSAGES = {
    "LDS": _through(
        encode("DS", "ds_write2_b32", addr=v(22), data0=v(69), data1=v(70), offset1=64)
        + encode("DS", "ds_read2_b32", vdst=v(8), addr=v(22), offset1=64),
        b"",
    ),
    "LDS, 64 bits": _through(
        encode("DS", "ds_write_b64", addr=v(23), data0=v(69)), encode("DS", "ds_read_b64", vdst=v(8), addr=v(23))
    ),
    "scratch": _through(
        encode("SCRATCH", "scratch_store_dwordx2", data=v(69), saddr=s(127)),
        encode("SCRATCH", "scratch_load_dwordx2", vdst=v(8), saddr=s(127)),
    ),
    "v_mov_b64": _through(b"", encode("VOP3", "v_mov_b64", vdst=v(8), src0=v(69))),
    "v_pk_mov_b32": _through(b"", encode("VOP3P", "v_pk_mov_b32", vdst=v(8), src0=v(69), src1=v(69), opsel=0b10)),
    "v_lshlrev_b64": _through(b"", encode("VOP3", "v_lshlrev_b64", vdst=v(8), src0=constant(3), src1=v(69))),
    "v_lshl_add_u64": _through(
        b"", encode("VOP3", "v_lshl_add_u64", vdst=v(8), src0=v(69), src1=constant(0), src2=constant(5))
    ),
    "v_pk_mul_f32": _through(b"", encode("VOP3P", "v_pk_mul_f32", vdst=v(8), src0=v(69), src1=v(69))),
    "v_mad_u64_u32": _through(
        b"", encode("VOP3SD", "v_mad_u64_u32", vdst=v(8), sdst=s(20), src0=v(2), src1=v(2), src2=v(69))
    ),
}


@pytest.mark.parametrize("passage", PASSAGES)
def test_halves_of_a_pair_are_kept_apart(passage):
    """The half that holds a value may be stored, the other not."""
    registers = {23: [8 * lane for lane in range(LANES)]}
    store_high = encode("GLOBAL", "global_store_dword", data=v(9), addr=v(22), saddr=s(MEMORY_POINTER))
    assert _kinds(PASSAGES[passage] + _store_result(), v=registers) == set()
    assert _kinds(PASSAGES[passage] + store_high, v=registers) == {"uninitialised"}


@pytest.mark.parametrize("name", ["v_lshrrev_b64", "v_ashrrev_i64"])
def test_right_shifts_need_the_upper_half_only(name):
    shift = encode("VOP3", name, vdst=v(8), src0=constant(3), src1=v(NEVER - 2))
    high = {NEVER - 1: 5}  # v68 holds nothing
    store_high = encode("GLOBAL", "global_store_dword", data=v(9), addr=v(22), saddr=s(MEMORY_POINTER))
    assert _kinds(shift + store_high, v=high) == set()
    assert _kinds(shift + _store_result(), v=high) == {"uninitialised"}


def test_lanes_without_a_value_move_with_it():
    """Lane 5 of a register is written; wherever a permutation takes it, there it may be stored."""
    write = encode("VOP3", "v_writelane_b32", vdst=v(NEVER), src0=constant(7), src1=constant(5))
    pull = encode("DS", "ds_bpermute_b32", vdst=v(RESULT), addr=v(24), data0=v(NEVER))
    assert _kinds(write + pull + _store_result(), v={24: 4 * 5}) == set()
    assert _kinds(write + pull + _store_result(), v={24: 4 * 6}) == {"uninitialised"}
    swizzle = encode("DS", "ds_swizzle_b32", vdst=v(RESULT), addr=v(NEVER), offset0=5 << 5)
    rotate = encode(
        "VOP1_DPP16", "v_mov_b32", vdst=v(RESULT), src0=DPP, vsrc0=v(NEVER), dpp=0x155, row_mask=1, bank_mask=15
    )
    assert _kinds(write + swizzle + _with_exec(M32, _store_result())) == set()
    assert _kinds(write + swizzle + _store_result()) == {"uninitialised"}
    assert _kinds(write + rotate + _with_exec(M16, _store_result())) == set()
    swap = encode("VOP1", "v_permlane32_swap_b32", vdst=v(NEVER), src0=v(2))
    assert _kinds(v_mov(NEVER, v(2)) + swap + _store_result(), v={RESULT: 1}) == set()


# ---- The decoder and the names ----


def test_every_name_is_an_instruction():
    """No binder is for a misspelt name."""
    from tinygrad.runtime.autogen.amd.cdna import enum

    known = {
        re.sub(r"_e(32|64)$", "", member.name.lower())
        for table in vars(enum).values()
        if isinstance(table, type) and table.__module__ == enum.__name__
        for member in table
    }
    assert set(BINDERS) - known == set()


LISTED_AS = {"v_accvgpr_read_b32": "v_accvgpr_read", "v_accvgpr_write_b32": "v_accvgpr_write"}


def _listing(assembly: str) -> list[str]:
    """The mnemonics in a compiler's listing, without the suffix of their encoding."""
    names = []
    for line in assembly.splitlines():
        words = line.partition(";")[0].split()
        if words and words[0] == ".section":
            break
        if words and not words[0].startswith(".") and not words[0].endswith(":"):
            name = re.sub(r"_(e32|e64|dpp|sdwa)$", "", words[0])
            names.append(LISTED_AS.get(name, name))
    return names


def _decoded(code, count: int) -> list[str]:
    """So many mnemonics from the start of the code; the padding after the part that loads arguments is skipped."""
    text = code.image[code.text[0] - code.base :][: code.text[1]]
    names, pc = [], 0
    while len(names) < count:
        instruction = decode(text, pc)
        names.append(instruction.name)
        pc += instruction.size
        if code.descriptor.preload_length and instruction.name == "s_branch" and pc <= PRELOAD_PROLOGUE:
            pc = PRELOAD_PROLOGUE
    return names


def _compiled() -> dict[str, Callable]:
    f32, bf16, fp8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
    x, y, i32 = torch.zeros(1024, dtype=f32), torch.zeros(1024, dtype=f32), torch.zeros(1024, dtype=torch.int32)
    product = {"M": 32, "N": 64, "K": 64, "A_T": False, "B_T": True}
    a, b = torch.zeros(32, 64, dtype=bf16), torch.zeros(64, 64, dtype=bf16)
    small, codes = torch.zeros(32, 128, dtype=fp8), torch.zeros(64, 64, dtype=torch.uint8)
    scales = torch.full((64, 4), 127, dtype=torch.uint8)
    scaled = {"M": 32, "N": 64, "K": 128, "A_FORMAT": "e4m3", "B_FORMAT": "e2m1", "B_T": True, "STEPS": 1}
    return {
        "product": (kernels.product, (a, b, y, 64), product),
        "scaled_product": (kernels.scaled_product, (small.view(torch.uint8), scales, codes, scales, y), scaled),
        "cast": (kernels.cast, (x, torch.zeros(1024, dtype=fp8)), {"BLOCK": 1024}),
        "row_reductions": (kernels.row_reductions, (x, y, i32, 16), {"ROWS": 4, "COLUMNS": 64}),
        "divide": (kernels.divide, (x, x, y, y, y), {"BLOCK": 256}),
        "integer_functions": (kernels.integer_functions, (i32, i32, i32, 256), {"BLOCK": 256}),
        "atomic_rows": (kernels.atomic_rows, (x.to(bf16), y.to(bf16), 256), {"BLOCK": 256}),
        "high_products": (kernels.high_products, (i32.long(), i32.long(), i32.long()), {"BLOCK": 256}),
        "transpose_through_lds": (kernels.transpose_through_lds, (x, y), {"N": 32}),
    }


@pytest.mark.parametrize("name", _compiled())
def test_the_decoder_reads_what_the_compiler_wrote(name):
    kernel, args, constexprs = _compiled()[name]
    code = gfx950.compile(kernel, args, constexprs, num_warps=4)
    listed = _listing(code.assembly)
    assert len(listed) > 20
    assert _decoded(code, len(listed)) == listed
