"""Conversions to and from 16-, 8- and 4-bit floating point, plain and scaled (v_cvt_scalef32_*).

fp8 is OCP e4m3fn, bf8 e5m2, fp4 e2m1. A scale is the exponent of a float32: 2^(its exponent field − 127).
Source: AMD, "CDNA4 Instruction Set Architecture", chapter 12, VOP1 and VOP3 conversions; OCP, "Microscaling Formats".
"""

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from gfx950.decode import Instruction
from gfx950.ops import Step, binds
from gfx950.ops.operands import Source, plain_source, row_of, source, store_row
from gfx950.ops.scalar import FP16_OVERFLOW_BIT
from gfx950.ops.vector import apply
from gfx950.wave import LANES, Wave

U32 = np.uint32
_BYTES = np.arange(256, dtype=np.uint8)
_NARROW = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}
_LARGEST = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in _NARROW.items()}
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP4_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

# Values of all 256 bytes; of an fp4 byte the low nibble's value and the high one's.
DECODE = {name: _BYTES.view(dtype).astype(np.float32) for name, dtype in _NARROW.items()}


def encode(x: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    """float32 to fp8 or bf8 codes, to nearest even; past the largest value, that value or NaN (infinity for bf8)."""
    if saturate:
        x = np.where(np.isnan(x), x, np.clip(x, -_LARGEST[kind], _LARGEST[kind])).astype(np.float32)
    return x.astype(_NARROW[kind]).view(np.uint8).astype(U32)


def encode_fp4(x: np.ndarray) -> np.ndarray:
    """float32 to fp4 codes, to nearest even, saturating at ±6; NaN becomes 6."""
    size = np.abs(np.where(np.isnan(x), np.float32(6), x))
    code = sum((size >= middle if i % 2 else size > middle) for i, middle in enumerate(_FP4_MIDDLES))
    return np.asarray(code, U32) | np.signbit(x).astype(U32) << U32(3)


def _saturates(wave: Wave) -> bool:
    return bool(wave.mode >> FP16_OVERFLOW_BIT & 1)


def _exponent(scale: np.ndarray) -> np.ndarray:
    return (scale.view(U32) >> U32(23) & U32(255)).astype(np.int32) - 127


def _part_writer(wave: Wave, row: int, shift: int, width: int) -> Callable[[np.ndarray], None]:
    """Writes `width` bits of a register at bit `shift`, and keeps the others."""
    store, target = store_row(wave, row), wave.vgpr[row]
    hole = U32(~(((1 << width) - 1) << shift) & 0xFFFFFFFF)

    def write(value):
        store(target & hole | np.broadcast_to(value, LANES) << U32(shift), wave.write_mask)

    return write


def _partial(wave: Wave, inst: Instruction, sources: list[Source], shift: int, width: int, function: Callable) -> Step:
    """The step that writes a part of vdst."""
    row = row_of(inst.operand("vdst"))
    write = _part_writer(wave, row, shift, width)
    rows = [r for s in sources for r in s.rows]

    def step():
        write(function(*(s.read() for s in sources)))
        wave.propagate(rows, [row])

    return step


# ---- 16 bits ----


def _f16_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16).astype(U32)


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(U32)


def _f16_toward_zero(x: np.ndarray) -> np.ndarray:
    half = x.astype(np.float16)
    past = (np.abs(half.astype(np.float32)) > np.abs(x)) & np.isfinite(x)
    return np.where(past, np.nextafter(half, np.float16(0)), half).astype(np.float16).view(np.uint16).astype(U32)


_PACKS = {"v_cvt_pk_f16_f32": _f16_bits, "v_cvt_pk_bf16_f32": _bf16_bits, "v_cvt_pkrtz_f16_f32": _f16_toward_zero}


@binds(*_PACKS)
def _bind_pack(wave: Wave, inst: Instruction, machine) -> Step:
    bits = _PACKS[inst.name]
    operands = [source(wave, inst, slot, "f32") for slot in (0, 1)]
    return apply(wave, inst, "u32", operands, lambda a, b: bits(a) | bits(b) << U32(16))


def _stochastic(x: np.ndarray, noise: np.ndarray, dropped: int) -> np.ndarray:
    """float32 plus noise below the bits that will be kept, the dropped bits then cleared."""
    bits = x.view(U32)
    kept = bits + (noise >> U32(32 - dropped)) & U32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return np.where(np.isfinite(x), kept, bits).view(np.float32)


@binds("v_cvt_sr_bf16_f32", "v_cvt_sr_f16_f32")
def _bind_stochastic_half(wave: Wave, inst: Instruction, machine) -> Step:
    bits, dropped = (_bf16_bits, 16) if "bf16" in inst.name else (_f16_bits, 13)
    operands = [source(wave, inst, 0, "f32"), source(wave, inst, 1, "u32")]
    shift = 16 * (inst.get("opsel") >> 3 & 1)
    return _partial(wave, inst, operands, shift, 16, lambda x, noise: bits(_stochastic(x, noise, dropped)))


# ---- fp8 and bf8, unscaled ----


@binds("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def _bind_pack8(wave: Wave, inst: Instruction, machine) -> Step:
    kind = inst.name[9:12]
    operands = [source(wave, inst, slot, "f32") for slot in (0, 1)]

    def function(a, b):
        saturate = _saturates(wave)
        return encode(a, kind, saturate) | encode(b, kind, saturate) << U32(8)

    return _partial(wave, inst, operands, 16 * (inst.get("opsel") >> 3 & 1), 16, function)


@binds("v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32")
def _bind_stochastic8(wave: Wave, inst: Instruction, machine) -> Step:
    kind = inst.name[9:12]
    operands = [source(wave, inst, 0, "f32"), source(wave, inst, 1, "u32")]
    dropped = 20 if kind == "fp8" else 21

    def function(x, noise):
        return encode(_stochastic(x, noise, dropped), kind, _saturates(wave))

    return _partial(wave, inst, operands, 8 * (inst.get("opsel") >> 2 & 3), 8, function)


@binds("v_cvt_f32_fp8", "v_cvt_f32_bf8")
def _bind_unpack8(wave: Wave, inst: Instruction, machine) -> Step:
    """One byte to float32; SDWA's selection has chosen it where there is one."""
    values = DECODE[inst.name[-3:]]
    return apply(wave, inst, "f32", [source(wave, inst, 0, "u32")], lambda x: values[x & U32(255)])


@binds("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def _bind_unpack8_pair(wave: Wave, inst: Instruction, machine) -> Step:
    values = DECODE[inst.name[-3:]]
    operand = source(wave, inst, 0, "u32")
    row = row_of(inst.operand("vdst"))
    stores = store_row(wave, row), store_row(wave, row + 1)

    def step():
        word, lanes = np.array(operand.read()), wave.write_mask
        stores[0](values[word & U32(255)], lanes)
        stores[1](values[word >> U32(8) & U32(255)], lanes)
        wave.propagate(list(operand.rows), [row, row + 1])

    return step


# ---- Scaled ----

_TO_16_BITS = {"bf16": _bf16_bits, "f16": _f16_bits}
_WIDE = ("bf16", "f16", "f32")
_EIGHT = ("fp8", "bf8")


def _names(pattern: str, first: tuple[str, ...], second: tuple[str, ...]) -> list[str]:
    return [pattern.format(a, b) for a in first for b in second]


@binds(*_names("v_cvt_scalef32_pk_{}_{}", _WIDE, (*_EIGHT, "fp4")))
def _bind_unpack_scaled(wave: Wave, inst: Instruction, machine) -> Step:
    """Two values of a half (8-bit) or of a byte (fp4) of src0, times the scale of src1."""
    wide, narrow = re.fullmatch(r"v_cvt_scalef32_pk_(\w+)_(\w+)", inst.name).groups()
    packed, scale = plain_source(wave, inst, inst.operand("src0"), "u32"), source(wave, inst, 1, "f32")
    select = inst.get("opsel")
    row = row_of(inst.operand("vdst"))
    rows = [*packed.rows, *scale.rows]

    def both() -> list[np.ndarray]:
        word = packed.read()
        if narrow == "fp4":
            byte = word >> U32(8 * (select & 3))
            values = FP4_VALUES[byte & U32(15)], FP4_VALUES[byte >> U32(4) & U32(15)]
        else:
            half = word >> U32(16 * (select & 1))
            values = DECODE[narrow][half & U32(255)], DECODE[narrow][half >> U32(8) & U32(255)]
        power = _exponent(scale.read())
        return [np.broadcast_to(np.ldexp(x, power).astype(np.float32), LANES) for x in values]

    if wide == "f32":
        stores = store_row(wave, row), store_row(wave, row + 1)

        def step():
            low, high = both()
            lanes = wave.write_mask
            stores[0](low, lanes)
            stores[1](high, lanes)
            wave.propagate(rows, [row, row + 1])

        return step
    bits, store = _TO_16_BITS[wide], store_row(wave, row)

    def step16():
        low, high = both()
        store(bits(low) | bits(high) << U32(16), wave.write_mask)
        wave.propagate(rows, [row])

    return step16


@binds(*_names("v_cvt_scalef32_{}_{}", ("f16", "f32"), _EIGHT))
def _bind_unpack_one_scaled(wave: Wave, inst: Instruction, machine) -> Step:
    wide, narrow = re.fullmatch(r"v_cvt_scalef32_(\w+)_(\w+)", inst.name).groups()
    operands = [plain_source(wave, inst, inst.operand("src0"), "u32"), source(wave, inst, 1, "f32")]
    shift = U32(8 * (inst.get("opsel") & 3))

    def value(word, scale):
        return np.ldexp(DECODE[narrow][word >> shift & U32(255)], _exponent(scale)).astype(np.float32)

    if wide == "f32":
        return apply(wave, inst, "f32", operands, value)
    part = 16 * (inst.get("opsel") >> 3 & 1)
    return _partial(wave, inst, operands, part, 16, lambda word, scale: _f16_bits(value(word, scale)))


def _pair_of(wave: Wave, inst: Instruction, wide: str) -> tuple[list[Source], Callable]:
    """The sources of two values (two float32 registers, or one of two halves) and a scale; and how to read them."""
    if wide == "f32":
        operands = [source(wave, inst, 0, "f32"), source(wave, inst, 1, "f32"), source(wave, inst, 2, "f32")]
        return operands, lambda a, b, scale: (a, b, scale)
    dtype = np.float16 if wide == "f16" else ml_dtypes.bfloat16
    operands = [plain_source(wave, inst, inst.operand("src0"), "u32"), source(wave, inst, 1, "f32")]

    def halves(word, scale):
        both = np.broadcast_to(word, LANES).copy().view(dtype).astype(np.float32)
        return both[0::2], both[1::2], scale

    return operands, halves


@binds(*_names("v_cvt_scalef32_pk_{}_{}", (*_EIGHT, "fp4"), _WIDE))
def _bind_pack_scaled(wave: Wave, inst: Instruction, machine) -> Step:
    """Two values divided by the scale, into a half (8-bit) or a byte (fp4) of vdst; the rest stays."""
    narrow, wide = re.fullmatch(r"v_cvt_scalef32_pk_(\w+)_(\w+)", inst.name).groups()
    operands, values = _pair_of(wave, inst, wide)

    def function(*read):
        first, second, scale = values(*read)
        power = -_exponent(scale)
        first, second = np.ldexp(first, power).astype(np.float32), np.ldexp(second, power).astype(np.float32)
        if narrow == "fp4":
            return encode_fp4(first) | encode_fp4(second) << U32(4)
        saturate = _saturates(wave)
        return encode(first, narrow, saturate) | encode(second, narrow, saturate) << U32(8)

    if narrow == "fp4":
        return _partial(wave, inst, operands, 8 * (inst.get("opsel") >> 2 & 3), 8, function)
    return _partial(wave, inst, operands, 16 * (inst.get("opsel") >> 3 & 1), 16, function)
