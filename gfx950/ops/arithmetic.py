"""The vector instructions that are functions of their operands: a table, and the arithmetic in it that numpy lacks.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 12 (VOP1, VOP2, VOP3); LLVM's AMDGPU back end for which
instructions take denormal numbers as zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

U32, U64, F32 = np.uint32, np.uint64, np.float32
MIN_NORMAL = np.finfo(np.float32).tiny


# ---- Arithmetic that numpy lacks ----


def _round_to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """float64 sums whose last bit is set where they are inexact, so that rounding once more to float32 is right."""
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64)


def exact_fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a × b + c as float64, rounded to odd."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    return _round_to_odd(np.atleast_1d(total), np.atleast_1d(error))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a × b + c, rounded once."""
    return exact_fma32(a, b, c).astype(np.float32)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray, exponent: np.ndarray | int = 0) -> np.ndarray:
    """float64 (a × b + c) × 2^exponent, rounded once: exactly, a lane at a time."""
    a, b, c, exponent = np.broadcast_arrays(a, b, c, exponent)
    out = np.ldexp(a * b + c, exponent)  # right already where a factor is zero, or an operand is not finite
    exact = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)
    for lane in np.nonzero(exact)[0]:
        x, y, z = (Fraction(float(operand[lane])) for operand in (a, b, c))
        out[lane] = _nearest64((x * y + z) * Fraction(2) ** int(exponent[lane]))
    return out


def _nearest64(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return np.inf if x > 0 else -np.inf


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float16)


def flushed(x: np.ndarray) -> np.ndarray:
    """Denormal float32 numbers become zeros of their sign."""
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(F32(0), x), x)


def _transcendental(function: Callable) -> Callable:
    """A float32 function computed in float64, rounded once; denormals are zeros on the way in and out."""
    return lambda x: flushed(function(flushed(x).astype(np.float64)).astype(np.float32))


def minimum(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a < b) | ((a == b) & np.signbit(a)), a, b)))


def maximum(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a > b) | ((a == b) & np.signbit(b)), a, b)))


def ieee_minimum(a, b):
    """NaN where either operand is one; −0 is below +0."""
    return np.where(np.isnan(a) | np.isnan(b), a + b, minimum(a, b))


def ieee_maximum(a, b):
    return np.where(np.isnan(a) | np.isnan(b), a + b, maximum(a, b))


def _median_of_floats(a, b, c):
    """The smallest where one is NaN."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minimum(minimum(a, b), c), _median(minimum, maximum)(a, b, c))


def _median(low: Callable, high: Callable) -> Callable:
    return lambda a, b, c: high(low(a, b), low(high(a, b), c))


def _to_integer(dtype: type, rounding: Callable = np.trunc) -> Callable:
    info = np.iinfo(dtype)

    def convert(x):
        x = rounding(x.astype(np.float64))
        return np.where(np.isnan(x), 0, np.clip(x, info.min, info.max)).astype(dtype)

    return convert


def ldexp(a: np.ndarray, exponent: np.ndarray) -> np.ndarray:
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


def _count_bits(x):
    return np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4), axis=1).sum(axis=1, dtype=U32)


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
    """A field that reaches past bit 31 is filled with copies of it."""
    width = (width & 31).astype(np.int64)
    field = (a.astype(np.int64) >> (offset & 31)) & ((1 << width) - 1)
    sign = (1 << width) >> 1
    return ((field ^ sign) - sign).astype(np.int32)


def _sign_extend_24(x):
    return (x << U32(8)).view(np.int32).astype(np.int64) >> 8


def _unsigned_24(x):
    return (x & U32(0xFFFFFF)).astype(U64)


def saturating(dtype: type) -> Callable:
    info = np.iinfo(dtype)
    return lambda x: np.clip(x, info.min, info.max).astype(dtype)


# ---- Instructions that are functions of their operands ----


@dataclass(frozen=True)
class Pure:
    """The kind of the result, those of the sources, and the function."""

    result: str
    sources: tuple[str, ...]
    function: Callable


def _table(*groups: tuple[str, str, dict[str, Callable]]) -> dict[str, Pure]:
    return {
        name: Pure(result, tuple(kinds.split()), function)
        for result, kinds, functions in groups
        for name, function in functions.items()
    }


_SHIFT16 = np.uint16(15)

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
        "v_bcnt_u32_b32": lambda a, b: _count_bits(a) + b,
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
        "v_lshlrev_b16": lambda a, b: b << (a & _SHIFT16),
        "v_lshrrev_b16": lambda a, b: b >> (a & _SHIFT16),
    }),
    ("i16", "i16 i16", {
        "v_min_i16": np.minimum,
        "v_max_i16": np.maximum,
        "v_add_i16": lambda a, b: a + b,
        "v_sub_i16": lambda a, b: a - b,
    }),
    ("i16", "u16 i16", {"v_ashrrev_i16": lambda a, b: b >> (a & _SHIFT16).view(np.int16)}),
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
        "v_min_f32": minimum,
        "v_max_f32": maximum,
    }),
    ("f32", "f32 i32", {"v_ldexp_f32": ldexp}),
    ("f32", "f32 f32 f32", {
        "v_fma_f32": fma32,
        "v_min3_f32": lambda a, b, c: minimum(minimum(a, b), c),
        "v_max3_f32": lambda a, b, c: maximum(maximum(a, b), c),
        "v_med3_f32": _median_of_floats,
        "v_minimum3_f32": lambda a, b, c: ieee_minimum(ieee_minimum(a, b), c),
        "v_maximum3_f32": lambda a, b, c: ieee_maximum(ieee_maximum(a, b), c),
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
        "v_min_f64": minimum,
        "v_max_f64": maximum,
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
        "v_min_f16": minimum,
        "v_max_f16": maximum,
    }),
    ("f16", "f16 i16", {"v_ldexp_f16": lambda a, b: ldexp(a, b)}),
    ("f16", "f16 f16 f16", {
        "v_fma_f16": fma16,
        "v_mad_f16": lambda a, b, c: a * b + c,
        "v_min3_f16": lambda a, b, c: minimum(minimum(a, b), c),
        "v_max3_f16": lambda a, b, c: maximum(maximum(a, b), c),
        "v_med3_f16": _median_of_floats,
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
SATURATES = {
    "v_add_u32": (lambda a, b: a.astype(np.int64) + b, np.uint32),
    "v_sub_u32": (lambda a, b: a.astype(np.int64) - b, np.uint32),
    "v_subrev_u32": (lambda a, b: b.astype(np.int64) - a, np.uint32),
    "v_add_i32": (lambda a, b: a.astype(np.int64) + b, np.int32),
    "v_sub_i32": (lambda a, b: a.astype(np.int64) - b, np.int32),
    "v_add_u16": (lambda a, b: a.astype(np.int64) + b, np.uint16),
    "v_sub_u16": (lambda a, b: a.astype(np.int64) - b, np.uint16),
    "v_add_i16": (lambda a, b: a.astype(np.int64) + b, np.int16),
    "v_sub_i16": (lambda a, b: a.astype(np.int64) - b, np.int16),
    "v_subrev_u16": (lambda a, b: b.astype(np.int64) - a, np.uint16),
    "v_sad_u32": (lambda a, b, c: np.abs(a.astype(np.int64) - b) + c, np.uint32),
    "v_mad_u32_u24": (
        lambda a, b, c: _unsigned_24(a).astype(np.int64) * _unsigned_24(b).astype(np.int64) + c,
        np.uint32,
    ),
    "v_mad_i32_i24": (lambda a, b, c: _sign_extend_24(a) * _sign_extend_24(b) + c.view(np.int32), np.int32),
    "v_mad_u32_u16": (lambda a, b, c: a.astype(np.int64) * b + c, np.uint32),
    "v_mad_i32_i16": (lambda a, b, c: a.astype(np.int64) * b + c, np.int32),
    "v_mad_u16": (lambda a, b, c: a.astype(np.int64) * b + c, np.uint16),
    "v_mad_i16": (lambda a, b, c: a.astype(np.int64) * b + c, np.int16),
}
