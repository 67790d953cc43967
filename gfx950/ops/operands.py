"""Reading and writing the operands of vector instructions: 64 lanes as numpy arrays of an operand's kind.

A kind is a number format: u32, i32, f32, u64, i64, f64, u16, i16, f16, and the same 16 bits as bf16. Encodings bring
modifiers: negation and absolute value (VOP3, DPP, SDWA), a half of a register (VOP3's op_sel), a byte or half with
sign extension (SDWA), another lane's value (DPP), and on the result a factor, a clamp and a part of the register.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 6 (VALU) and 12 (encodings).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gfx950.decode import AGPR, EXECZ, LITERAL, SCC, VCCZ, VGPR, Instruction
from gfx950.findings import UnknownInstructionError
from gfx950.ops.arithmetic import flushed
from gfx950.ops.scalar import inline, signed
from gfx950.wave import KEEPS_INPUTS, KEEPS_RESULTS, LANE, Wave

DTYPES = {
    "u16": np.dtype(np.uint16),
    "i16": np.dtype(np.int16),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "u32": np.dtype(np.uint32),
    "i32": np.dtype(np.int32),
    "f32": np.dtype(np.float32),
    "u64": np.dtype(np.uint64),
    "i64": np.dtype(np.int64),
    "f64": np.dtype(np.float64),
}
FLOATS = ("f16", "bf16", "f32", "f64")
_SLOTS = (("src0", "vsrc0"), ("src1", "vsrc1"), ("src2",))

Read = Callable[[], np.ndarray]


def row_of(code: int) -> int:
    """The row of Wave.vgpr for the operand code of a vector register."""
    return code - VGPR if code < AGPR else code - AGPR + 256


def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """uint64 lanes from two rows of 32 bits."""
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


@dataclass(frozen=True)
class Source:
    """A vector operand: read() gives its lanes, or one value for all; rows are the registers it comes from.

    lanes maps each lane to the one its value comes from, where DPP says so.
    """

    read: Read
    rows: tuple[int, ...] = ()
    lanes: np.ndarray | None = None


def source(wave: Wave, inst: Instruction, slot: int, kind: str) -> Source:
    """Source operand 0, 1 or 2, with the modifiers of its encoding."""
    code = _code(inst, slot)
    if slot == 0 and inst.format.endswith("_DPP16"):
        plain = _dpp_source(wave, inst, code, kind)
    elif inst.format.endswith(("_SDWA", "_SDWA_SDST")) and slot < 2:
        plain = _sdwa_source(wave, inst, code, slot, kind)
    else:
        plain = plain_source(wave, inst, code, kind, half=half_of(inst, slot, kind))
    if kind not in FLOATS:
        return plain
    return _with_sign(inst, slot, plain)


def _code(inst: Instruction, slot: int) -> int:
    fields = _SLOTS[slot]
    field = fields[1] if len(fields) > 1 and inst.has(fields[1]) else fields[0]
    code = inst.operand(field)
    if inst.format.endswith(("_SDWA", "_SDWA_SDST")) and slot < 2 and inst.get(f"s{slot}"):
        code -= VGPR
    return code


def half_of(inst: Instruction, slot: int, kind: str) -> int:
    """Which half of a register a 16-bit source is."""
    if DTYPES[kind].itemsize != 2 or inst.format != "VOP3" or not inst.has("opsel"):
        return 0
    return inst.get("opsel") >> slot & 1


def plain_source(wave: Wave, inst: Instruction, code: int, kind: str, half: int = 0) -> Source:
    """An operand by its code, without modifiers."""
    dtype = DTYPES[kind]
    if code >= VGPR:
        row = row_of(code)
        if dtype.itemsize == 8:
            low, high = wave.vgpr[row], wave.vgpr[row + 1]
            return Source(lambda: pair(low, high).view(dtype), (row, row + 1))
        lanes = wave.vgpr[row]
        if dtype.itemsize == 2:
            lanes = lanes.view(np.uint16)[half::2]
        lanes = lanes.view(dtype)
        return Source(lambda: lanes, (row,))
    constant = constant_bits(inst, code, kind)
    if constant is not None:
        value = np.array([constant >> (16 * half if dtype.itemsize == 2 else 0) & (2 ** (8 * dtype.itemsize) - 1)])
        fixed = value.astype(f"u{dtype.itemsize}").view(dtype)
        return Source(lambda: fixed)
    if code in (SCC, VCCZ, EXECZ):
        raise UnknownInstructionError(f"{inst.text}: a vector operand that reads {code} (SCC, VCCZ or EXECZ)")
    if dtype.itemsize == 8:
        value64 = wave.sgpr[code : code + 2]
        return Source(lambda: np.ascontiguousarray(value64).view(dtype))
    value32 = wave.sgpr[code : code + 1]
    if dtype.itemsize == 2:
        value32 = value32.view(np.uint16)[half : half + 1]
    shared = value32.view(dtype)
    return Source(lambda: shared)


def constant_bits(inst: Instruction, code: int, kind: str) -> int | None:
    """The bits of an inline constant or a literal, in an operand of this kind."""
    bits = 8 * DTYPES[kind].itemsize
    if code == LITERAL:
        if kind == "f64":
            return inst.literal << 32
        return signed(inst.literal) & (2**64 - 1) if kind == "i64" else inst.literal
    if kind == "bf16":
        single = inline(code, 32)
        return single if single is None or code <= 208 else single >> 16
    return inline(code, bits)


def _with_sign(inst: Instruction, slot: int, plain: Source) -> Source:
    if inst.format.startswith("VOP3"):
        negate, absolute = inst.get("neg") >> slot & 1, inst.get("abs") >> slot & 1
    else:
        negate, absolute = inst.get(f"src{slot}_neg"), inst.get(f"src{slot}_abs")
    read = plain.read
    if absolute and negate:
        return Source(lambda: -np.abs(read()), plain.rows, plain.lanes)
    if absolute:
        return Source(lambda: np.abs(read()), plain.rows, plain.lanes)
    if negate:
        return Source(lambda: -read(), plain.rows, plain.lanes)
    return plain


def in_mode(wave: Wave, function: Callable, kinds: Sequence[str], result: str) -> Callable:
    """A function on lanes of these kinds that takes denormal float32 numbers for zero where the wave's mode says so."""
    if not wave.flushes or "f32" not in (*kinds, result):
        return function

    def compute(*values):
        mode = wave.mode
        if not mode & KEEPS_INPUTS:
            values = [flushed(x) if kind == "f32" else x for x, kind in zip(values, kinds, strict=True)]
        value = function(*values)
        return flushed(value) if result == "f32" and not mode & KEEPS_RESULTS else value

    return compute


# ---- DPP: lanes exchanged on the way in ----


def quad_lanes(pattern: int) -> np.ndarray:
    """For each lane the one of its four that two bits of the pattern name."""
    return (LANE & ~3) + np.array([pattern >> 2 * i & 3 for i in range(4)])[LANE & 3]


def dpp_lanes(control: int) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the lane it reads, and whether there is one."""
    row, place = LANE & ~15, LANE & 15
    valid = np.ones(64, bool)
    if control < 0x100:
        return quad_lanes(control), valid
    amount = control & 15
    if 0x101 <= control <= 0x10F:  # row_shl
        return LANE + amount, place + amount < 16
    if 0x111 <= control <= 0x11F:  # row_shr
        return LANE - amount, place >= amount
    if 0x121 <= control <= 0x12F:  # row_ror
        return row + (place - amount & 15), valid
    if control == 0x130:  # wave_shl:1
        return LANE + 1, LANE < 63
    if control == 0x134:  # wave_rol:1
        return LANE + 1 & 63, valid
    if control == 0x138:  # wave_shr:1
        return LANE - 1, LANE > 0
    if control == 0x13C:  # wave_ror:1
        return LANE - 1 & 63, valid
    if control == 0x140:  # row_mirror
        return row + 15 - place, valid
    if control == 0x141:  # row_half_mirror
        return row + (place & 8 | 7 - (place & 7)), valid
    if control == 0x142:  # row_bcast:15
        return row - 1, row > 0
    if control == 0x143:  # row_bcast:31
        return np.full(64, 31), LANE >= 32
    if 0x150 <= control <= 0x15F:  # row_newbcast
        return row + amount, valid
    raise UnknownInstructionError(f"the lane pattern DPP {control:#x}")


def _dpp_source(wave: Wave, inst: Instruction, code: int, kind: str) -> Source:
    plain = plain_source(wave, inst, code, kind)
    lanes, valid = dpp_lanes(inst.get("dpp"))
    lanes = np.where(valid, lanes, 0)
    zero = np.zeros(1, DTYPES[kind])
    read = plain.read
    if valid.all():
        return Source(lambda: read()[lanes], plain.rows, lanes)
    return Source(lambda: np.where(valid, read()[lanes], zero), plain.rows, lanes)


def dpp_enabled(inst: Instruction) -> np.ndarray | None:
    """The lanes a DPP instruction may write; None for all."""
    if not inst.format.endswith("_DPP16"):
        return None
    enabled = (inst.get("row_mask") >> (LANE >> 4) & 1).astype(bool)
    enabled &= (inst.get("bank_mask") >> (LANE >> 2 & 3) & 1).astype(bool)
    if not inst.get("bc"):
        enabled &= dpp_lanes(inst.get("dpp"))[1]
    return None if enabled.all() else enabled


# ---- SDWA: bytes and halves ----

_BYTE_OFFSET = (0, 8, 16, 24, 0, 16, 0)
_PART_MASK = (0xFF, 0xFF, 0xFF, 0xFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF)
DWORD = 6


def _sdwa_source(wave: Wave, inst: Instruction, code: int, slot: int, kind: str) -> Source:
    select, extend = inst.get(f"src{slot}_sel"), inst.get(f"src{slot}_sext")
    dtype = DTYPES[kind]
    if select == DWORD and dtype.itemsize >= 4:
        return plain_source(wave, inst, code, kind)
    plain = plain_source(wave, inst, code, "u32")
    shift, part = np.uint32(_BYTE_OFFSET[select]), np.uint32(_PART_MASK[select])
    width = int(part).bit_length()
    read = plain.read

    def extract():
        value = read() >> shift & part
        if extend and width < 32:
            value = (value ^ np.uint32(1 << width - 1)) - np.uint32(1 << width - 1)
        return value.astype(np.uint16).view(dtype) if dtype.itemsize == 2 else value.view(dtype)

    return Source(extract, plain.rows)


# ---- Results ----


@dataclass(frozen=True)
class Destination:
    """Where a result goes: write(array of the kind) stores the lanes that take part."""

    write: Callable[[np.ndarray], None]
    rows: tuple[int, ...]


# 16-bit instructions that keep the other half of their destination: those new in this generation, and multiply-adds.
# Source: LLVM, GCNSubtarget::zeroesHigh16BitsOfDest: these are not among those that clear it on gfx9.
_KEEPS_HIGH = {
    *("v_mad_f16", "v_mad_u16", "v_mad_i16", "v_mac_f16", "v_fma_f16", "v_div_fixup_f16", "v_madmk_f16", "v_madak_f16"),
    *(f"v_{name}3_{kind}" for name in ("min", "max", "med") for kind in ("f16", "u16", "i16")),
    *("v_add_i16", "v_sub_i16", "v_bitop3_b16"),
}


def destination(wave: Wave, inst: Instruction, kind: str, field: str = "vdst") -> Destination:
    row = row_of(inst.operand(field))
    enabled = dpp_enabled(inst)
    finish = _result_modifier(inst, kind)
    itemsize = DTYPES[kind].itemsize
    if inst.format.endswith("_SDWA"):
        store = _sdwa_store(wave, inst, row, kind)
    elif itemsize == 8:
        store = _store_pair(wave, row)
    elif itemsize == 2:
        store = _store_half(wave, inst, row)
    else:
        store = store_row(wave, row)

    def write(value):
        if finish is not None:
            value = finish(value)
        if enabled is None:
            store(value, wave.write_mask)
        else:
            store(value, enabled & wave.mask)

    return Destination(write, (row, row + 1) if itemsize == 8 else (row,))


def store_row(wave: Wave, row: int):
    target = wave.vgpr[row]

    def store(value, lanes):
        value = value.view(np.uint32)
        if lanes is None:
            target[:] = value
        else:
            np.copyto(target, value, where=lanes)

    return store


def _store_pair(wave: Wave, row: int):
    low, high = store_row(wave, row), store_row(wave, row + 1)

    def store(value, lanes):
        value = value.view(np.uint64)
        low(value.astype(np.uint32), lanes)
        high((value >> np.uint64(32)).astype(np.uint32), lanes)

    return store


def _store_half(wave: Wave, inst: Instruction, row: int):
    whole = store_row(wave, row)
    high = inst.format == "VOP3" and inst.has("opsel") and inst.get("opsel") >> 3 & 1
    if not high and inst.name not in _KEEPS_HIGH:
        return lambda value, lanes: whole(value.view(np.uint16).astype(np.uint32), lanes)
    target = wave.vgpr[row].view(np.uint16)[1 if high else 0 :: 2]

    def store(value, lanes):
        np.copyto(target, value.view(np.uint16), where=True if lanes is None else lanes)

    return store


def _sdwa_store(wave: Wave, inst: Instruction, row: int, kind: str):
    select, unused = inst.get("dst_sel"), inst.get("dst_unused")
    whole, target = store_row(wave, row), wave.vgpr[row]
    shift, part = np.uint32(_BYTE_OFFSET[select]), np.uint32(_PART_MASK[select])
    width = int(part).bit_length()

    def store(value, lanes):
        value = value.view(f"u{value.dtype.itemsize}").astype(np.uint32)
        if select != DWORD:
            value &= part
            if unused == 1:  # the bits above carry the sign
                value = (value ^ np.uint32(1 << width - 1)) - np.uint32(1 << width - 1)
            value = value << shift
            if unused == 2:  # the other bits stay
                value |= target & ~(part << shift)
        whole(value, lanes)

    return store


def clamped(value: np.ndarray) -> np.ndarray:
    """A clamp to 0 … 1; NaN becomes 0."""
    kind = value.dtype.type
    return np.where(np.isnan(value), kind(0), np.clip(value, kind(0), kind(1)))


_OUTPUT_FACTOR = (None, 2.0, 4.0, 0.5)


def _result_modifier(inst: Instruction, kind: str):
    """VOP3's and SDWA's factor and clamp on a floating-point result; None where there is neither."""
    if kind not in FLOATS or not (inst.format.startswith("VOP3") or "_SDWA" in inst.format):
        return None
    factor, clamp = _OUTPUT_FACTOR[inst.get("omod")], inst.get("clmp")
    if not factor and not clamp:
        return None
    dtype = DTYPES[kind].type

    def finish(value):
        if factor:
            value = value * dtype(factor)
        return clamped(value) if clamp else value

    return finish
