"""Vector arithmetic: VOP1, VOP2, VOP3, VOPC and packed VOP3P, one lane at a time in numpy's arrays of 64.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 12 (VOP encodings), and LLVM's AMDGPU back end for which
instructions treat denormal numbers as zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gfx950.decode import VCC, Instruction
from gfx950.ops import Step, binds
from gfx950.ops.operands import DTYPES, Source, constant_bits, destination, plain_source, row_of, source, store_row
from gfx950.wave import Wave, bits_of, mask_of

U32, U64, F32 = np.uint32, np.uint64, np.float32
MIN_NORMAL = np.finfo(np.float32).tiny


# ---- Arithmetic that numpy lacks ----


def _round_to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """float64 sums whose last bit is set where they are inexact, so that rounding once more to float32 is right."""
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a × b + c, rounded once."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    return _round_to_odd(np.atleast_1d(total), np.atleast_1d(error)).astype(np.float32)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float64 a × b + c, rounded once where long double holds the product (to within 2^-64), as on x86-64."""
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float64)


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float16)


def _flush(x: np.ndarray) -> np.ndarray:
    """Denormal float32 numbers become zeros of their sign."""
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(F32(0), x), x)


def _transcendental(function: Callable) -> Callable:
    """A float32 function computed in float64, rounded once; denormals are zeros on the way in and out."""
    return lambda x: _flush(function(_flush(x).astype(np.float64)).astype(np.float32))


def _minimum(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a < b) | ((a == b) & np.signbit(a)), a, b)))


def _maximum(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a > b) | ((a == b) & np.signbit(b)), a, b)))


def _median(low: Callable, high: Callable) -> Callable:
    return lambda a, b, c: high(low(a, b), low(high(a, b), c))


def _to_integer(dtype: type, rounding: Callable = np.trunc) -> Callable:
    info = np.iinfo(dtype)

    def convert(x):
        x = rounding(x.astype(np.float64))
        return np.where(np.isnan(x), 0, np.clip(x, info.min, info.max)).astype(dtype)

    return convert


def _ldexp(a: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """a × 2^exponent, rounded once."""
    return np.ldexp(a.astype(np.float64), np.clip(exponent.astype(np.int32), -600, 600)).astype(a.dtype)


def _frexp_exponent(x):
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32)


def _frexp_mantissa(x):
    return np.where(np.isfinite(x), np.frexp(x)[0], x).astype(x.dtype)


def _fract(x):
    return np.minimum(x - np.floor(x), np.nextafter(x.dtype.type(1), x.dtype.type(0))).astype(x.dtype)


def _bit_length(x: np.ndarray) -> np.ndarray:
    return np.frexp(x.astype(np.float64))[1]


def _leading_zeros(x):
    return np.where(x == 0, -1, 32 - _bit_length(x)).astype(np.int32).view(U32)


def _trailing_zeros(x):
    return np.where(x == 0, -1, _bit_length(x & -x.view(np.int32).view(U32)) - 1).astype(np.int32).view(U32)


def _leading_signs(x):
    return _leading_zeros(np.where(x < 0, ~x, x).view(U32))


def _reverse_bits(x):
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = (x >> U32(shift) & U32(mask)) | (x & U32(mask)) << U32(shift)
    return x


def _permute_bytes(a, b, selector):
    """v_perm_b32: each byte of the selector picks one of the eight bytes of (a, b), a sign, or a constant."""
    both = b.astype(U64) | a.astype(U64) << U64(32)
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), U32)
    for i in range(4):
        pick = (selector >> U32(8 * i) & U32(0xFF)).astype(U64)
        byte = both >> (np.minimum(pick, U64(7)) * U64(8)) & U64(0xFF)
        sign = np.where(both >> (U64(15) + (pick & U64(3)) * U64(16)) & U64(1), U64(0xFF), U64(0))
        byte = np.where(pick < 8, byte, np.where(pick < 12, sign, np.where(pick == 12, U64(0), U64(0xFF))))
        out |= byte.astype(U32) << U32(8 * i)
    return out


def _bitfield_unsigned(a, offset, width):
    offset, width = (offset & U32(31)).astype(U64), (width & U32(31)).astype(U64)
    return (a.astype(U64) >> offset & ((U64(1) << width) - U64(1))).astype(U32)


def _bitfield_signed(a, offset, width):
    width = width.view(U32) & U32(31)
    field = _bitfield_unsigned(a.view(U32), offset.view(U32), width).astype(np.int64)
    half = np.where(width > 0, np.int64(1) << np.maximum(width.astype(np.int64) - 1, 0), 0)
    return ((field ^ half) - half).astype(np.int32)


def _sign_extend_24(x):
    return (x << U32(8)).view(np.int32).astype(np.int64) >> 8


def _unsigned_24(x):
    return (x & U32(0xFFFFFF)).astype(U64)


def _saturating(dtype: type) -> Callable:
    info = np.iinfo(dtype)
    return lambda x: np.clip(x, info.min, info.max).astype(dtype)


# ---- Instructions that are functions of their operands ----


@dataclass(frozen=True)
class Pure:
    """result kind, source kinds, function; with `clamp` a function of wider results for the integer clamp bit."""

    result: str
    sources: tuple[str, ...]
    function: Callable


def _table(*groups: tuple[str, str, dict[str, Callable]]) -> dict[str, Pure]:
    return {
        name: Pure(result, tuple(kinds.split()), function)
        for result, kinds, functions in groups
        for name, function in functions.items()
    }


_shift = {16: np.uint16(15), 32: U32(31), 64: U64(63)}

PURE = _table(
    ("u32", "u32", {
        "v_not_b32": lambda a: ~a,
        "v_bfrev_b32": _reverse_bits,
        "v_ffbh_u32": _leading_zeros,
        "v_ffbl_b32": _trailing_zeros,
    }),
    ("u32", "i32", {"v_ffbh_i32": _leading_signs}),
    ("u32", "u32 u32", {
        "v_add_u32": lambda a, b: a + b,
        "v_sub_u32": lambda a, b: a - b,
        "v_subrev_u32": lambda a, b: b - a,
        "v_and_b32": lambda a, b: a & b,
        "v_or_b32": lambda a, b: a | b,
        "v_xor_b32": lambda a, b: a ^ b,
        "v_xnor_b32": lambda a, b: ~(a ^ b),
        "v_lshlrev_b32": lambda a, b: b << (a & U32(31)),
        "v_lshrrev_b32": lambda a, b: b >> (a & U32(31)),
        "v_min_u32": np.minimum,
        "v_max_u32": np.maximum,
        "v_mul_lo_u32": lambda a, b: a * b,
        "v_mul_hi_u32": lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32),
        "v_mul_u32_u24": lambda a, b: (_unsigned_24(a) * _unsigned_24(b)).astype(U32),
        "v_mul_hi_u32_u24": lambda a, b: (_unsigned_24(a) * _unsigned_24(b) >> U64(32)).astype(U32),
        "v_mul_i32_i24": lambda a, b: (_sign_extend_24(a) * _sign_extend_24(b)).astype(U32),
        "v_mul_hi_i32_i24": lambda a, b: (_sign_extend_24(a) * _sign_extend_24(b) >> 32).astype(U32),
        "v_bfm_b32": lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
        "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(U32) + b,
        "v_cvt_pk_u16_u32": lambda a, b: np.minimum(a, U32(0xFFFF)) | np.minimum(b, U32(0xFFFF)) << U32(16),
    }),
    ("i32", "i32 i32", {
        "v_min_i32": np.minimum,
        "v_max_i32": np.maximum,
        "v_add_i32": lambda a, b: a + b,
        "v_sub_i32": lambda a, b: a - b,
        "v_mul_hi_i32": lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32),
        "v_cvt_pk_i16_i32": lambda a, b: (
            np.clip(a, -32768, 32767) & 0xFFFF | np.clip(b, -32768, 32767) << 16
        ).astype(np.int32),
    }),
    ("i32", "u32 i32", {"v_ashrrev_i32": lambda a, b: b >> (a & U32(31)).view(np.int32)}),
    ("u32", "u32 u32 u32", {
        "v_add3_u32": lambda a, b, c: a + b + c,
        "v_lshl_add_u32": lambda a, b, c: (a << (b & U32(31))) + c,
        "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & U32(31)),
        "v_lshl_or_b32": lambda a, b, c: a << (b & U32(31)) | c,
        "v_and_or_b32": lambda a, b, c: a & b | c,
        "v_or3_b32": lambda a, b, c: a | b | c,
        "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
        "v_bfe_u32": _bitfield_unsigned,
        "v_perm_b32": _permute_bytes,
        "v_alignbit_b32": lambda a, b, c: ((b.astype(U64) | a.astype(U64) << U64(32)) >> (c & U32(31))).astype(U32),
        "v_alignbyte_b32": lambda a, b, c: (
            (b.astype(U64) | a.astype(U64) << U64(32)) >> (U32(8) * (c & U32(3)))
        ).astype(U32),
        "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
        "v_med3_u32": _median(np.minimum, np.maximum),
        "v_mad_u32_u24": lambda a, b, c: (_unsigned_24(a) * _unsigned_24(b) + c).astype(U32),
        "v_mad_i32_i24": lambda a, b, c: (_sign_extend_24(a) * _sign_extend_24(b)).astype(U32) + c,
        "v_sad_u32": lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c,
    }),
    ("u32", "u16 u16 u32", {"v_mad_u32_u16": lambda a, b, c: a.astype(U32) * b + c}),
    ("i32", "i16 i16 i32", {"v_mad_i32_i16": lambda a, b, c: a.astype(np.int32) * b + c}),
    ("i32", "i32 i32 i32", {
        "v_bfe_i32": _bitfield_signed,
        "v_min3_i32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        "v_max3_i32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
        "v_med3_i32": _median(np.minimum, np.maximum),
    }),
    ("u64", "u32 u64", {
        "v_lshlrev_b64": lambda a, b: b << (a & U32(63)).astype(U64),
        "v_lshrrev_b64": lambda a, b: b >> (a & U32(63)).astype(U64),
    }),
    ("i64", "u32 i64", {"v_ashrrev_i64": lambda a, b: b >> (a & U32(63)).astype(np.int64)}),
    ("u64", "u64 u32 u64", {"v_lshl_add_u64": lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c}),
    ("u16", "u16 u16", {
        "v_add_u16": lambda a, b: a + b,
        "v_sub_u16": lambda a, b: a - b,
        "v_subrev_u16": lambda a, b: b - a,
        "v_mul_lo_u16": lambda a, b: a * b,
        "v_min_u16": np.minimum,
        "v_max_u16": np.maximum,
        "v_lshlrev_b16": lambda a, b: b << (a & _shift[16]),
        "v_lshrrev_b16": lambda a, b: b >> (a & _shift[16]),
    }),
    ("i16", "i16 i16", {
        "v_min_i16": np.minimum,
        "v_max_i16": np.maximum,
        "v_add_i16": lambda a, b: a + b,
        "v_sub_i16": lambda a, b: a - b,
    }),
    ("i16", "u16 i16", {"v_ashrrev_i16": lambda a, b: b >> (a & _shift[16]).view(np.int16)}),
    ("u16", "u16 u16 u16", {
        "v_mad_u16": lambda a, b, c: a * b + c,
        "v_mad_legacy_u16": lambda a, b, c: a * b + c,
        "v_min3_u16": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        "v_max3_u16": lambda a, b, c: np.maximum(np.maximum(a, b), c),
        "v_med3_u16": _median(np.minimum, np.maximum),
    }),
    ("i16", "i16 i16 i16", {
        "v_mad_i16": lambda a, b, c: a * b + c,
        "v_mad_legacy_i16": lambda a, b, c: a * b + c,
        "v_min3_i16": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        "v_max3_i16": lambda a, b, c: np.maximum(np.maximum(a, b), c),
        "v_med3_i16": _median(np.minimum, np.maximum),
    }),
    ("u32", "u16 u16", {"v_pack_b32_f16": lambda a, b: a.astype(U32) | b.astype(U32) << U32(16)}),
    ("f32", "f32", {
        "v_trunc_f32": np.trunc,
        "v_ceil_f32": np.ceil,
        "v_floor_f32": np.floor,
        "v_rndne_f32": np.rint,
        "v_fract_f32": _fract,
        "v_exp_f32": _transcendental(np.exp2),
        "v_log_f32": _transcendental(np.log2),
        "v_rcp_f32": _transcendental(np.reciprocal),
        "v_rcp_iflag_f32": _transcendental(np.reciprocal),
        "v_rsq_f32": _transcendental(lambda x: 1 / np.sqrt(x)),
        "v_sqrt_f32": _transcendental(np.sqrt),
        "v_sin_f32": _transcendental(lambda x: np.sin(x * (2 * np.pi))),
        "v_cos_f32": _transcendental(lambda x: np.cos(x * (2 * np.pi))),
        "v_frexp_mant_f32": _frexp_mantissa,
    }),
    ("i32", "f32", {"v_frexp_exp_i32_f32": _frexp_exponent}),
    ("f32", "f32 f32", {
        "v_add_f32": lambda a, b: a + b,
        "v_sub_f32": lambda a, b: a - b,
        "v_subrev_f32": lambda a, b: b - a,
        "v_mul_f32": lambda a, b: a * b,
        "v_mul_legacy_f32": lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b),
        "v_min_f32": _minimum,
        "v_max_f32": _maximum,
    }),
    ("f32", "f32 i32", {"v_ldexp_f32": _ldexp}),
    ("f32", "f32 f32 f32", {
        "v_fma_f32": fma32,
        "v_min3_f32": lambda a, b, c: _minimum(_minimum(a, b), c),
        "v_max3_f32": lambda a, b, c: _maximum(_maximum(a, b), c),
        "v_med3_f32": _median(_minimum, _maximum),
        "v_minimum3_f32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        "v_maximum3_f32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    }),
    ("f64", "f64", {
        "v_trunc_f64": np.trunc,
        "v_ceil_f64": np.ceil,
        "v_floor_f64": np.floor,
        "v_rndne_f64": np.rint,
        "v_fract_f64": _fract,
        "v_rcp_f64": np.reciprocal,
        "v_rsq_f64": lambda x: 1 / np.sqrt(x),
        "v_sqrt_f64": np.sqrt,
        "v_frexp_mant_f64": _frexp_mantissa,
    }),
    ("i32", "f64", {"v_frexp_exp_i32_f64": _frexp_exponent}),
    ("f64", "f64 f64", {
        "v_add_f64": lambda a, b: a + b,
        "v_mul_f64": lambda a, b: a * b,
        "v_min_f64": _minimum,
        "v_max_f64": _maximum,
    }),
    ("f64", "f64 i32", {"v_ldexp_f64": lambda a, b: np.ldexp(a, b)}),
    ("f64", "f64 f64 f64", {"v_fma_f64": fma64}),
    ("f16", "f16", {
        "v_trunc_f16": np.trunc,
        "v_ceil_f16": np.ceil,
        "v_floor_f16": np.floor,
        "v_rndne_f16": np.rint,
        "v_fract_f16": _fract,
        "v_exp_f16": lambda x: np.exp2(x.astype(np.float64)).astype(np.float16),
        "v_log_f16": lambda x: np.log2(x.astype(np.float64)).astype(np.float16),
        "v_rcp_f16": lambda x: (1 / x.astype(np.float64)).astype(np.float16),
        "v_rsq_f16": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float16),
        "v_sqrt_f16": lambda x: np.sqrt(x.astype(np.float64)).astype(np.float16),
        "v_frexp_mant_f16": _frexp_mantissa,
    }),
    ("i16", "f16", {"v_frexp_exp_i16_f16": lambda x: _frexp_exponent(x).astype(np.int16)}),
    ("f16", "f16 f16", {
        "v_add_f16": lambda a, b: a + b,
        "v_sub_f16": lambda a, b: a - b,
        "v_subrev_f16": lambda a, b: b - a,
        "v_mul_f16": lambda a, b: a * b,
        "v_min_f16": _minimum,
        "v_max_f16": _maximum,
    }),
    ("f16", "f16 i16", {"v_ldexp_f16": lambda a, b: _ldexp(a, b)}),
    ("f16", "f16 f16 f16", {
        "v_fma_f16": fma16,
        "v_mad_f16": lambda a, b, c: a * b + c,
        "v_min3_f16": lambda a, b, c: _minimum(_minimum(a, b), c),
        "v_max3_f16": lambda a, b, c: _maximum(_maximum(a, b), c),
        "v_med3_f16": _median(_minimum, _maximum),
    }),
    ("f32", "i32", {"v_cvt_f32_i32": lambda a: a.astype(np.float32)}),
    ("f32", "u32", {"v_cvt_f32_u32": lambda a: a.astype(np.float32)}
        | {f"v_cvt_f32_ubyte{i}": lambda a, i=i: (a >> U32(8 * i) & U32(0xFF)).astype(np.float32) for i in range(4)}),
    ("f64", "i32", {"v_cvt_f64_i32": lambda a: a.astype(np.float64)}),
    ("f64", "u32", {"v_cvt_f64_u32": lambda a: a.astype(np.float64)}),
    ("f64", "f32", {"v_cvt_f64_f32": lambda a: a.astype(np.float64)}),
    ("f32", "f64", {"v_cvt_f32_f64": lambda a: a.astype(np.float32)}),
    ("u32", "f32", {"v_cvt_u32_f32": _to_integer(np.uint32)}),
    ("i32", "f32", {
        "v_cvt_i32_f32": _to_integer(np.int32),
        "v_cvt_rpi_i32_f32": _to_integer(np.int32, lambda x: np.floor(x + 0.5)),
        "v_cvt_flr_i32_f32": _to_integer(np.int32, np.floor),
    }),
    ("u32", "f64", {"v_cvt_u32_f64": _to_integer(np.uint32)}),
    ("i32", "f64", {"v_cvt_i32_f64": _to_integer(np.int32)}),
    ("f16", "f32", {"v_cvt_f16_f32": lambda a: a.astype(np.float16)}),
    ("f32", "f16", {"v_cvt_f32_f16": lambda a: a.astype(np.float32)}),
    ("f32", "bf16", {"v_cvt_f32_bf16": lambda a: a.astype(np.float32)}),
    ("f16", "u16", {"v_cvt_f16_u16": lambda a: a.astype(np.float16)}),
    ("f16", "i16", {"v_cvt_f16_i16": lambda a: a.astype(np.float16)}),
    ("u16", "f16", {"v_cvt_u16_f16": _to_integer(np.uint16)}),
    ("i16", "f16", {"v_cvt_i16_f16": _to_integer(np.int16)}),
)  # fmt: skip

# Integer instructions whose clamp bit saturates: the exact result in a wider type, and the type it is clipped to.
_SATURATES = {
    "v_add_u32": (lambda a, b: a.astype(np.int64) + b, np.uint32),
    "v_sub_u32": (lambda a, b: a.astype(np.int64) - b, np.uint32),
    "v_subrev_u32": (lambda a, b: b.astype(np.int64) - a, np.uint32),
    "v_add_i32": (lambda a, b: a.astype(np.int64) + b, np.int32),
    "v_sub_i32": (lambda a, b: a.astype(np.int64) - b, np.int32),
    "v_add_u16": (lambda a, b: a.astype(np.int64) + b, np.uint16),
    "v_sub_u16": (lambda a, b: a.astype(np.int64) - b, np.uint16),
    "v_add_i16": (lambda a, b: a.astype(np.int64) + b, np.int16),
    "v_sub_i16": (lambda a, b: a.astype(np.int64) - b, np.int16),
    "v_mad_u16": (lambda a, b, c: a.astype(np.int64) * b + c, np.uint16),
    "v_mad_i16": (lambda a, b, c: a.astype(np.int64) * b + c, np.int16),
}


@binds(*PURE)
def _bind_pure(wave: Wave, inst: Instruction, machine) -> Step:
    pure = PURE[inst.name]
    function = pure.function
    if inst.get("clmp") and inst.name in _SATURATES:
        exact, dtype = _SATURATES[inst.name]
        clip = _saturating(dtype)
        function = lambda *operands: clip(exact(*operands))  # noqa: E731
    return apply(
        wave, inst, pure.result, [source(wave, inst, i, kind) for i, kind in enumerate(pure.sources)], function
    )


def apply(wave: Wave, inst: Instruction, result: str, sources: list[Source], function: Callable) -> Step:
    """The step that computes function(*sources) into vdst and carries on which lanes hold a value."""
    target = destination(wave, inst, result)
    reads = [s.read for s in sources]
    write = target.write
    rows, results = [row for s in sources for row in s.rows], list(target.rows)
    shuffled = [s for s in sources if s.lanes is not None]
    if shuffled:
        return _apply_shuffled(wave, sources, function, target)
    propagate = wave.propagate
    if len(reads) == 1:
        (first,) = reads

        def step():
            write(function(first()))
            propagate(rows, results)

    elif len(reads) == 2:
        first, second = reads

        def step():
            write(function(first(), second()))
            propagate(rows, results)

    else:
        first, second, third = reads

        def step():
            write(function(first(), second(), third()))
            propagate(rows, results)

    return step


def _apply_shuffled(wave: Wave, sources: list[Source], function: Callable, target) -> Step:
    """As `apply`, where an operand takes other lanes' values (DPP)."""

    def step():
        defined = None
        for s in sources:
            lanes = wave.lanes_defined(list(s.rows))
            if lanes is not None:
                lanes = lanes if s.lanes is None else lanes[s.lanes]
                defined = lanes if defined is None else defined & lanes
        target.write(function(*(s.read() for s in sources)))
        for row in target.rows:
            wave.set_defined(row, defined)

    return step


# ---- Moves ----


@binds("v_mov_b32", "v_mov_b64")
def _bind_mov(wave: Wave, inst: Instruction, machine) -> Step:
    kind = "u" + inst.name[-2:]
    if kind == "u64":
        kind = "i64"  # a 32-bit literal is sign-extended
    return apply(wave, inst, kind, [source(wave, inst, 0, kind)], lambda a: a)


@binds("v_nop", "v_clrexcp")
def _bind_nothing(wave: Wave, inst: Instruction, machine) -> Step:
    return lambda: None


@binds("v_accvgpr_read", "v_accvgpr_write", "v_accvgpr_mov_b32")
def _bind_accvgpr(wave: Wave, inst: Instruction, machine) -> Step:
    """Moves between the two halves of the register file: the plain operand is a VGPR, the other an accumulator."""
    code, target = inst.operand("src0"), row_of(inst.operand("vdst"))
    if inst.name != "v_accvgpr_read":
        target += 256
    read = plain_source(wave, inst, code + (256 if inst.name != "v_accvgpr_write" else 0), "u32")
    store = store_row(wave, target)

    def step():
        store(read.read(), None if wave.full else wave.mask)
        wave.propagate(list(read.rows), [target])

    return step


@binds("v_swap_b32")
def _bind_swap(wave: Wave, inst: Instruction, machine) -> Step:
    a, b = row_of(inst.operand("vdst")), row_of(inst.operand("src0"))
    first, second = store_row(wave, a), store_row(wave, b)

    def step():
        old, lanes = wave.vgpr[a].copy(), None if wave.full else wave.mask
        first(wave.vgpr[b], lanes)
        second(old, lanes)
        mine, others = wave.lanes_defined([a]), wave.lanes_defined([b])
        wave.set_defined(a, others)
        wave.set_defined(b, mine)

    return step


def condition(wave: Wave, inst: Instruction, slot: int) -> Callable[[], np.ndarray]:
    """A mask operand as bool lanes: VCC in the short encodings, an SGPR pair or a constant in VOP3."""
    if not inst.has(f"src{slot}"):
        return lambda: mask_of(wave.get64(VCC))
    code = inst.operand(f"src{slot}")
    constant = constant_bits(inst, code, "u64")
    if constant is not None:
        fixed = mask_of(constant)
        return lambda: fixed
    return lambda: mask_of(wave.get64(code))


@binds("v_cndmask_b32")
def _bind_cndmask(wave: Wave, inst: Instruction, machine) -> Step:
    kind = "f32" if inst.get("neg") or inst.get("abs") else "u32"
    off, on = source(wave, inst, 0, kind), source(wave, inst, 1, kind)
    chosen, target = condition(wave, inst, 2), destination(wave, inst, kind)

    def step():
        pick = chosen()
        target.write(np.where(pick, on.read(), off.read()))
        first, second = wave.lanes_defined(list(off.rows)), wave.lanes_defined(list(on.rows))
        if first is None and second is None:
            wave.define(target.rows[0])
            return
        everywhere = np.ones(64, bool)
        if first is not None and off.lanes is not None:
            first = first[off.lanes]
        wave.set_defined(
            target.rows[0],
            np.where(pick, everywhere if second is None else second, everywhere if first is None else first),
        )

    return step


# ---- Multiply-add into the destination, and with constants ----


@binds("v_fmac_f32", "v_fmac_f64", "v_mac_f16", "v_pk_fmac_f16")
def _bind_fmac(wave: Wave, inst: Instruction, machine) -> Step:
    kind = inst.name[-3:]
    a, b = source(wave, inst, 0, kind), source(wave, inst, 1, kind)
    c = plain_source(wave, inst, inst.operand("vdst"), kind)
    function = {"f32": fma32, "f64": fma64, "f16": lambda x, y, z: x * y + z}[kind]
    if inst.name == "v_pk_fmac_f16":
        return _packed_half_fmac(wave, inst)
    return apply(wave, inst, kind, [a, b, c], function)


def _packed_half_fmac(wave: Wave, inst: Instruction) -> Step:
    words = [source(wave, inst, 0, "u32"), source(wave, inst, 1, "u32")]
    words.append(plain_source(wave, inst, inst.operand("vdst"), "u32"))

    def function(a, b, c):
        halves = [np.broadcast_to(x, 64).copy().view(np.float16) for x in (a, b, c)]
        return fma16(*halves).view(U32)

    return apply(wave, inst, "u32", words, function)


@binds("v_fmamk_f32", "v_fmaak_f32", "v_madmk_f16", "v_madak_f16")
def _bind_fma_constant(wave: Wave, inst: Instruction, machine) -> Step:
    kind = inst.name[-3:]
    dtype = DTYPES[kind]
    constant = np.array([inst.literal & 2 ** (8 * dtype.itemsize) - 1]).astype(f"u{dtype.itemsize}").view(dtype)
    a, b = source(wave, inst, 0, kind), source(wave, inst, 1, kind)
    third = Source(lambda: constant)
    operands = [a, third, b] if "mk" in inst.name else [a, b, third]
    return apply(wave, inst, kind, operands, fma32 if kind == "f32" else lambda x, y, z: x * y + z)


# ---- Carries, and wide multiplication ----


def _mask_writer(wave: Wave, inst: Instruction) -> Callable[[np.ndarray], None]:
    """Writes bool lanes to the scalar result of an instruction: VCC, or the pair it names. Inactive lanes get 0."""
    code = VCC
    if inst.format == "VOP3SD" or (inst.format.endswith("_SDST") and inst.has("sdst") and inst.get("sd")):
        code = inst.operand("sdst")
    elif inst.format == "VOP3_SDST":
        code = inst.operand("vdst")
    return lambda lanes: wave.set64(code, bits_of(lanes & wave.mask))


_CARRIES = {
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_addc_co_u32": lambda a, b, c: a + b + c,
    "v_subb_co_u32": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32": lambda a, b, c: b - a - c,
}


@binds(*_CARRIES)
def _bind_carry(wave: Wave, inst: Instruction, machine) -> Step:
    function = _CARRIES[inst.name]
    a, b = source(wave, inst, 0, "u32"), source(wave, inst, 1, "u32")
    target, put = destination(wave, inst, "u32"), _mask_writer(wave, inst)
    takes = any(part in inst.name for part in ("addc", "subb"))
    carry = condition(wave, inst, 2) if takes else lambda: np.zeros(1, bool)
    rows, clamp = [*a.rows, *b.rows], inst.get("clmp")

    def step():
        exact = function(a.read().astype(np.int64), b.read().astype(np.int64), carry())
        out = (exact < 0) | (exact >> 32 != 0)
        value = np.clip(exact, 0, 2**32 - 1) if clamp else exact & 0xFFFFFFFF
        target.write(value.astype(U32))
        put(np.broadcast_to(out, 64))
        wave.propagate(rows, list(target.rows))

    return step


@binds("v_mad_u64_u32", "v_mad_i64_i32")
def _bind_wide_mad(wave: Wave, inst: Instruction, machine) -> Step:
    signed_ = inst.name == "v_mad_i64_i32"
    narrow, wide = ("i32", "i64") if signed_ else ("u32", "u64")
    operands = [source(wave, inst, i, kind) for i, kind in enumerate((narrow, narrow, wide))]
    put = _mask_writer(wave, inst)
    dtype = DTYPES[wide]

    def function(a, b, c):
        product = a.astype(dtype) * b.astype(dtype)
        total = product + c
        # The carry is a bit of the 65-bit sum.
        put(np.broadcast_to((total < product) if not signed_ else (c < 0) != (total < product), 64))
        return total

    return apply(wave, inst, wide, operands, function)


# ---- Comparisons ----

_FLOAT_TESTS = {
    "f": lambda a, b: np.zeros(1, bool),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda a, b: np.ones(1, bool),
}
_INTEGER_TESTS = {
    "f": lambda a, b: np.zeros(1, bool),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "t": lambda a, b: np.ones(1, bool),
}
_TESTS = {f"{test}_{kind}": (kind, f) for kind in ("f16", "f32", "f64") for test, f in _FLOAT_TESTS.items()} | {
    f"{test}_{sign}{bits}": (f"{sign}{bits}", f)
    for sign in "iu"
    for bits in (16, 32, 64)
    for test, f in _INTEGER_TESTS.items()
}


def _bind_test(wave: Wave, inst: Instruction, kinds: tuple[str, str], function: Callable) -> Step:
    a, b = source(wave, inst, 0, kinds[0]), source(wave, inst, 1, kinds[1])
    put, rows = _mask_writer(wave, inst), [*a.rows, *b.rows]
    narrows = inst.name.startswith("v_cmpx")

    def step():
        wave.require(rows, "a comparison")
        lanes = np.broadcast_to(function(a.read(), b.read()), 64) & wave.mask
        put(lanes)
        if narrows:
            wave.set64(126, bits_of(lanes))

    return step


@binds(*(f"v_cmp{x}_{name}" for x in ("", "x") for name in _TESTS))
def _bind_compare(wave: Wave, inst: Instruction, machine) -> Step:
    kind, function = _TESTS[inst.name.split("_", 2)[2]]
    return _bind_test(wave, inst, (kind, kind), function)


def _class_test(kind: str) -> Callable:
    tiny = np.finfo(DTYPES[kind]).tiny
    quiet = {"f16": 0x0200, "f32": 0x00400000, "f64": 0x0008000000000000}[kind]
    unsigned = DTYPES["u" + kind[1:]]

    def test(x, wanted):
        size, negative = np.abs(x), np.signbit(x)
        nan, infinite = np.isnan(x), np.isinf(x)
        denormal, zero = (size < tiny) & (size > 0), size == 0
        normal = ~(nan | infinite | denormal | zero)
        is_quiet = x.view(unsigned) & unsigned.type(quiet) != 0
        classes = [nan & ~is_quiet, nan & is_quiet]
        classes += [kind_ & negative for kind_ in (infinite, normal, denormal, zero)]
        classes += [kind_ & ~negative for kind_ in (zero, denormal, normal, infinite)]
        return np.any([members & (wanted >> U32(i) & U32(1) != 0) for i, members in enumerate(classes)], axis=0)

    return test


@binds(*(f"v_cmp{x}_class_{kind}" for x in ("", "x") for kind in ("f16", "f32", "f64")))
def _bind_class(wave: Wave, inst: Instruction, machine) -> Step:
    kind = inst.name[-3:]
    return _bind_test(wave, inst, (kind, "u32"), _class_test(kind))


# ---- Division ----


def _exponent(x: np.ndarray, kind: str) -> np.ndarray:
    """The biased exponent field."""
    if kind == "f32":
        return (x.view(U32) >> U32(23) & U32(0xFF)).astype(np.int64)
    return (x.view(U64) >> U64(52) & U64(0x7FF)).astype(np.int64)


# The power of two that v_div_scale applies, the gap of exponents at which the quotient nears overflow, and the biased
# exponent up to which a numerator is tiny.
_DIVISION = {"f32": (64, 96, 23), "f64": (128, 768, 53)}


@binds("v_div_scale_f32", "v_div_scale_f64")
def _bind_div_scale(wave: Wave, inst: Instruction, machine) -> Step:
    """Scales a denominator or numerator (whichever src0 repeats) so that the steps of a division stay in range."""
    kind = inst.name[-3:]
    power, spread, small = _DIVISION[kind]
    operands = [source(wave, inst, i, kind) for i in range(3)]
    put = _mask_writer(wave, inst)
    tiny = np.finfo(DTYPES[kind]).tiny

    def function(value, denominator, numerator):
        value, denominator, numerator = (np.broadcast_to(x, 64) for x in (value, denominator, numerator))
        low, high = _exponent(denominator, kind), _exponent(numerator, kind)
        same_low, same_high = value == denominator, value == numerator
        ratio = numerator.astype(np.longdouble) / denominator.astype(np.longdouble)
        inverse_denormal = np.abs(1 / denominator.astype(np.longdouble)) < tiny
        ratio_denormal = np.abs(ratio) < tiny
        zero = (numerator == 0) | (denominator == 0)
        far = high - low >= spread
        denormal = (np.abs(denominator) < tiny) & ~zero
        both = inverse_denormal & ratio_denormal
        up = np.ldexp(value, power)
        scaled = np.select(
            [zero, far, denormal, both, inverse_denormal, ratio_denormal, high <= small],
            [
                np.full(64, np.nan, value.dtype),
                np.where(same_low, up, value),
                up,
                np.where(same_low, up, value),
                np.ldexp(value, -power),
                np.where(same_high, up, value),
                up,
            ],
            value,
        )
        put(~zero & (far | (~denormal & (both | (~inverse_denormal & ratio_denormal)))))
        return scaled.astype(value.dtype)

    return apply(wave, inst, kind, operands, function)


@binds("v_div_fmas_f32", "v_div_fmas_f64")
def _bind_div_fmas(wave: Wave, inst: Instruction, machine) -> Step:
    """The last step of a division: undoes what v_div_scale did where VCC says that it scaled one operand only.

    A large quotient came from a denominator scaled up, a small one from a numerator scaled up.
    """
    kind = inst.name[-3:]
    power, bias = (64, 127) if kind == "f32" else (128, 1023)
    fma = {"f32": fma32, "f64": fma64}[kind]

    def function(a, b, c):
        value = fma(a, b, c)
        back = np.where(_exponent(c, kind) > bias, power, -power)
        return np.where(mask_of(wave.get64(VCC)), _ldexp(value, back), value).astype(value.dtype)

    return apply(wave, inst, kind, [source(wave, inst, i, kind) for i in range(3)], function)


@binds("v_div_fixup_f32", "v_div_fixup_f64", "v_div_fixup_f16")
def _bind_div_fixup(wave: Wave, inst: Instruction, machine) -> Step:
    """The quotient in the cases that the steps of a division get wrong: zeros, infinities, NaN."""
    kind = inst.name[-3:]
    vanishing = {"f16": -26, "f32": -150, "f64": -1075}[kind]

    def function(quotient, denominator, numerator):
        negative = np.signbit(denominator) != np.signbit(numerator)
        nan = np.isnan(denominator) | np.isnan(numerator)
        zeros = (denominator == 0) & (numerator == 0)
        infinities = np.isinf(denominator) & np.isinf(numerator)
        infinite = (denominator == 0) | np.isinf(numerator)
        gap = np.frexp(numerator)[1].astype(np.int64) - np.frexp(denominator)[1]
        zero = np.isinf(denominator) | (numerator == 0) | (gap < vanishing)
        size = np.select([nan | zeros | infinities, infinite, zero], [np.nan, np.inf, 0.0], np.abs(quotient))
        return np.where(negative, -size, size).astype(quotient.dtype)

    return apply(wave, inst, kind, [source(wave, inst, i, kind) for i in range(3)], function)


# ---- Any function of three bits ----


@binds("v_bitop3_b32", "v_bitop3_b16")
def _bind_bitop3(wave: Wave, inst: Instruction, machine) -> Step:
    """Bit i of the truth table is the result for (a, b, c) = the bits of i."""
    table = truth_table(inst)
    kind = "u" + inst.name[-2:]
    reads = [plain_source(wave, inst, inst.operand(f"src{i}"), kind) for i in range(3)]

    def function(a, b, c):
        out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    return apply(wave, inst, kind, reads, function)


def truth_table(inst: Instruction) -> int:
    """BITOP3's table: omod is its bits 7–6, abs its bits 5–3, neg its bits 2–0."""
    return inst.get("omod") << 6 | inst.get("abs") << 3 | inst.get("neg")
