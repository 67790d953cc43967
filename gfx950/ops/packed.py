"""Packed arithmetic (VOP3P): two 32-bit or two 16-bit values a lane, and the mixed-precision multiply-adds and dots.

op_sel chooses, for each source, the half that the low result uses, op_sel_hi the one for the high result; neg and
neg_hi negate them. Source: AMD, "CDNA4 Instruction Set Architecture", chapter 6.9 (packed math) and 12 (VOP3P).
"""

from collections.abc import Callable

import numpy as np

from gfx950.decode import VGPR, Instruction
from gfx950.findings import UnknownInstructionError
from gfx950.ops import Step, binds
from gfx950.ops.arithmetic import U32, fma16, fma32, ieee_maximum, ieee_minimum, maximum, minimum
from gfx950.ops.operands import DTYPES, clamped, constant_bits, in_mode, plain_source, row_of, source, store_row
from gfx950.ops.vector import apply
from gfx950.wave import LANES, Wave


def _selects(inst: Instruction, slot: int) -> tuple[int, int]:
    """Which half of a source the low and the high result use."""
    high = inst.get("opsel_hi2", 1) if slot == 2 else inst.get("opsel_hi") >> slot & 1
    return inst.get("opsel") >> slot & 1, high


def _registers_pair(wave: Wave, inst: Instruction, slot: int) -> tuple[tuple[np.ndarray, np.ndarray], list[int]]:
    """Both 32-bit halves of a 64-bit source, as uint32 lanes or one value for all, and its vector registers."""
    code = inst.operand(f"src{slot}")
    if code >= VGPR:
        row = row_of(code)
        return (wave.vgpr[row], wave.vgpr[row + 1]), [row, row + 1]
    constant = constant_bits(inst, code, "u32")
    if constant is not None:
        if any(_selects(inst, slot)) and constant:
            raise UnknownInstructionError(f"{inst.text}: the high half of a constant in packed 32-bit arithmetic")
        value = np.array([constant], U32)
        return (value, value), []
    return (wave.sgpr[code : code + 1], wave.sgpr[code + 1 : code + 2]), []


def _signs(inst: Instruction, slot: int) -> tuple[int, int]:
    return inst.get("neg") >> slot & 1, inst.get("neg_hi") >> slot & 1


_PAIRS = {"v_pk_fma_f32": (3, fma32), "v_pk_mul_f32": (2, lambda a, b: a * b), "v_pk_add_f32": (2, lambda a, b: a + b)}


@binds(*_PAIRS)
def _bind_pairs(wave: Wave, inst: Instruction, machine) -> Step:
    count, function = _PAIRS[inst.name]
    function = in_mode(wave, function, ["f32"] * count, "f32")
    results = ([], []), ([], [])  # of the low and the high result: operands, and the registers they come from
    for slot in range(count):
        halves, used = _registers_pair(wave, inst, slot)
        for (reads, rows), select, negate in zip(results, _selects(inst, slot), _signs(inst, slot), strict=True):
            reads.append(_signed_view(halves[select], negate))
            rows += used[select : select + 1]
    (low, low_rows), (high, high_rows) = results
    row = row_of(inst.operand("vdst"))
    stores = store_row(wave, row), store_row(wave, row + 1)
    clamp = clamped if inst.get("clmp") else lambda x: x

    def step():
        lanes = wave.write_mask
        first = clamp(function(*(read() for read in low)))
        second = clamp(function(*(read() for read in high)))
        defined = wave.lanes_defined(high_rows)
        stores[0](first, lanes)
        stores[1](second, lanes)
        wave.propagate(low_rows, [row])
        wave.set_defined(row + 1, defined)

    return step


def _signed_view(words: np.ndarray, negate: int) -> Callable[[], np.ndarray]:
    values = words.view(np.float32)
    return (lambda: -values) if negate else (lambda: values)


@binds("v_pk_mov_b32")
def _bind_pair_move(wave: Wave, inst: Instruction, machine) -> Step:
    (first, rows0), (second, rows1) = (_registers_pair(wave, inst, slot) for slot in (0, 1))
    low, high = first[inst.get("opsel") & 1], second[inst.get("opsel") >> 1 & 1]
    source0 = rows0[inst.get("opsel") & 1 : (inst.get("opsel") & 1) + 1]
    source1 = rows1[inst.get("opsel") >> 1 & 1 : (inst.get("opsel") >> 1 & 1) + 1]
    row = row_of(inst.operand("vdst"))
    stores = store_row(wave, row), store_row(wave, row + 1)

    def step():
        lanes, kept = wave.write_mask, high.copy()
        defined = wave.lanes_defined(source1)
        stores[0](low, lanes)
        wave.propagate(source0, [row])
        stores[1](kept, lanes)
        wave.set_defined(row + 1, defined)

    return step


# ---- Two 16-bit values ----

_shift = np.uint16(15)
_HALVES: dict[str, tuple[str, int, Callable]] = {
    "v_pk_fma_f16": ("f16", 3, fma16),
    "v_pk_add_f16": ("f16", 2, lambda a, b: a + b),
    "v_pk_mul_f16": ("f16", 2, lambda a, b: a * b),
    "v_pk_min_f16": ("f16", 2, minimum),
    "v_pk_max_f16": ("f16", 2, maximum),
    "v_pk_minimum3_f16": ("f16", 3, lambda a, b, c: ieee_minimum(ieee_minimum(a, b), c)),
    "v_pk_maximum3_f16": ("f16", 3, lambda a, b, c: ieee_maximum(ieee_maximum(a, b), c)),
    "v_pk_mad_i16": ("i16", 3, lambda a, b, c: a * b + c),
    "v_pk_mad_u16": ("u16", 3, lambda a, b, c: a * b + c),
    "v_pk_mul_lo_u16": ("u16", 2, lambda a, b: a * b),
    "v_pk_add_i16": ("i16", 2, lambda a, b: a + b),
    "v_pk_sub_i16": ("i16", 2, lambda a, b: a - b),
    "v_pk_add_u16": ("u16", 2, lambda a, b: a + b),
    "v_pk_sub_u16": ("u16", 2, lambda a, b: a - b),
    "v_pk_lshlrev_b16": ("u16", 2, lambda a, b: b << (a & _shift)),
    "v_pk_lshrrev_b16": ("u16", 2, lambda a, b: b >> (a & _shift)),
    "v_pk_ashrrev_i16": ("i16", 2, lambda a, b: b >> (a & np.int16(15))),
    "v_pk_max_i16": ("i16", 2, np.maximum),
    "v_pk_min_i16": ("i16", 2, np.minimum),
    "v_pk_max_u16": ("u16", 2, np.maximum),
    "v_pk_min_u16": ("u16", 2, np.minimum),
}


def _word(wave: Wave, inst: Instruction, slot: int, floating: bool) -> tuple[np.ndarray, list[int]]:
    """A 32-bit source of two halves; a constant's float is in the low half, with zeros above."""
    code = inst.operand(f"src{slot}")
    if code >= VGPR:
        row = row_of(code)
        return wave.vgpr[row], [row]
    constant = constant_bits(inst, code, "f16" if floating and code >= 240 else "u32")
    if constant is not None:
        return np.array([constant], U32), []
    return wave.sgpr[code : code + 1], []


@binds(*_HALVES)
def _bind_halves(wave: Wave, inst: Instruction, machine) -> Step:
    kind, count, function = _HALVES[inst.name]
    if inst.get("clmp") and kind != "f16":
        raise UnknownInstructionError(f"{inst.text}: saturating packed 16-bit arithmetic")
    dtype = DTYPES[kind]
    low, high, rows = [], [], []
    for slot in range(count):
        word, used = _word(wave, inst, slot, kind == "f16")
        rows += used
        halves = word.view(np.uint16)
        for operands, select, negate in zip((low, high), _selects(inst, slot), _signs(inst, slot), strict=True):
            operands.append((halves[select::2].view(dtype), negate and kind == "f16"))
    row = row_of(inst.operand("vdst"))
    store = store_row(wave, row)
    clamp = clamped if inst.get("clmp") else lambda x: x

    def half(operands):
        value = clamp(function(*(-x if negate else x for x, negate in operands)))
        return value.astype(dtype).view(np.uint16).astype(U32)

    def step():
        store(half(low) | half(high) << U32(16), wave.write_mask)
        wave.propagate(rows, [row])

    return step


# ---- Products of halves, summed in 32 bits ----


def _dot(kind: str, inst: Instruction) -> Callable:
    dtype = DTYPES[kind]
    wide = np.float32 if kind in ("f16", "bf16") else np.int64

    def function(a, b, c):
        a, b = (np.broadcast_to(x, LANES).copy().view(dtype).astype(wide).reshape(LANES, 2) for x in (a, b))
        if wide is np.float32:
            c, first, second = c.view(np.float32), a[:, 0] * b[:, 0], a[:, 1] * b[:, 1]
            total = first + second + c if inst.name == "v_dot2_f32_bf16" else c + first + second
            return total.astype(np.float32).view(U32)
        return ((a * b).sum(axis=1) + c.view(np.int32)).astype(U32)

    return function


def _byte_dot(dtype: type) -> Callable:
    def function(a, b, c):
        a, b = (np.broadcast_to(x, LANES).copy().view(dtype).astype(np.int64).reshape(LANES, 4) for x in (a, b))
        return ((a * b).sum(axis=1) + c.view(np.int32)).astype(U32)

    return function


_DOTS = {
    "v_dot2_f32_f16": lambda inst: _dot("f16", inst),
    "v_dot2_f32_bf16": lambda inst: _dot("bf16", inst),
    "v_dot2_i32_i16": lambda inst: _dot("i16", inst),
    "v_dot2_u32_u16": lambda inst: _dot("u16", inst),
    "v_dot4_i32_i8": lambda inst: _byte_dot(np.int8),
    "v_dot4_u32_u8": lambda inst: _byte_dot(np.uint8),
    "v_dot2c_f32_f16": lambda inst: _dot("f16", inst),
    "v_dot2c_f32_bf16": lambda inst: _dot("bf16", inst),
    "v_dot2c_i32_i16": lambda inst: _dot("i16", inst),
    "v_dot4c_i32_i8": lambda inst: _byte_dot(np.int8),
}


@binds(*_DOTS)
def _bind_dot(wave: Wave, inst: Instruction, machine) -> Step:
    if inst.get("neg") or inst.get("neg_hi") or inst.get("clmp") or inst.format.endswith("_SDWA"):
        raise UnknownInstructionError(f"{inst.text}: a dot product with modifiers")
    operands = [source(wave, inst, 0, "u32"), source(wave, inst, 1, "u32")]
    third = inst.operand("src2") if inst.format == "VOP3P" else inst.operand("vdst")
    operands.append(plain_source(wave, inst, third, "u32"))
    return apply(wave, inst, "u32", operands, _DOTS[inst.name](inst))


@binds("v_mad_mix_f32", "v_mad_mixlo_f16", "v_mad_mixhi_f16")
def _bind_mix(wave: Wave, inst: Instruction, machine) -> Step:
    """a × b + c in float32, each source a float32 or, where op_sel_hi says so, a half that op_sel chooses."""
    reads, rows, kinds = [], [], []
    for slot in range(3):
        select, is_half = _selects(inst, slot)
        word, used = _word(wave, inst, slot, bool(is_half))
        rows += used
        kinds.append("f16" if is_half else "f32")
        values = word.view(np.float16)[select::2] if is_half else word.view(np.float32)
        reads.append((values, inst.get("neg") >> slot & 1, inst.get("neg_hi") >> slot & 1))
    row = row_of(inst.operand("vdst"))
    store, halves = store_row(wave, row), wave.vgpr[row].view(np.uint16)
    function = in_mode(wave, fma32, kinds, inst.name[-3:])
    part = {"v_mad_mix_f32": None, "v_mad_mixlo_f16": 0, "v_mad_mixhi_f16": 1}[inst.name]

    def operand(values, negate, absolute):
        x = values.astype(np.float32)
        x = np.abs(x) if absolute else x
        return -x if negate else x

    def step():
        value = function(*(operand(*read) for read in reads))
        if inst.get("clmp"):
            value = clamped(value)
        if part is None:
            store(value, wave.write_mask)
        else:
            np.copyto(halves[part::2], value.astype(np.float16).view(np.uint16), where=wave.mask)
        wave.propagate(rows, [row])

    return step
