"""Vector memory: global, flat and buffer accesses, scratch, LDS, atomics, and direct loads from global memory to LDS.

Source: AMD, "CDNA4 Instruction Set Architecture", chapters 9 (vector memory), 10 (flat and scratch) and 11 (LDS).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gfx950.decode import M0, Instruction
from gfx950.findings import UnknownInstructionError
from gfx950.memory import MASKED_OFFSET, NO_SIZE
from gfx950.ops import Step, binds
from gfx950.ops.operands import pair, row_of
from gfx950.ops.scalar import reader, signed
from gfx950.wave import LANE, LANES, Wave

U32 = np.uint32


@dataclass(frozen=True)
class Element:
    """What one lane moves: bytes in memory; for less than a dword, how they sit in the register.

    half: None for the whole register, else the 16-bit half (0 low, 1 high) that a load fills or a store takes from.
    """

    size: int
    is_signed: bool = False
    half: int | None = None

    @property
    def registers(self) -> int:
        return -(-self.size // 4)

    @property
    def align(self) -> int:
        """Global memory and scratch are addressed in dwords at most."""
        return min(self.size, 4)


_ELEMENTS = {
    "ubyte": Element(1),
    "sbyte": Element(1, True),
    "ushort": Element(2),
    "sshort": Element(2, True),
    "dword": Element(4),
    "dwordx2": Element(8),
    "dwordx3": Element(12),
    "dwordx4": Element(16),
    "byte": Element(1),
    "short": Element(2),
    "byte_d16_hi": Element(1, half=1),
    "short_d16": Element(2, half=0),
    "short_d16_hi": Element(2, half=1),
    "ubyte_d16": Element(1, half=0),
    "ubyte_d16_hi": Element(1, half=1),
    "sbyte_d16": Element(1, True, 0),
    "sbyte_d16_hi": Element(1, True, 1),
}
_LOADS = [name for name in _ELEMENTS if name not in ("byte", "short", "byte_d16_hi")]
_STORES = ["byte", "byte_d16_hi", "short", "short_d16_hi", "dword", "dwordx2", "dwordx3", "dwordx4"]

_LDS_ELEMENTS = {
    "u8": Element(1),
    "i8": Element(1, True),
    "u16": Element(2),
    "i16": Element(2, True),
    "b8": Element(1),
    "b16": Element(2),
    "b32": Element(4),
    "b64": Element(8),
    "b96": Element(12),
    "b128": Element(16),
    "u8_d16": Element(1, half=0),
    "u8_d16_hi": Element(1, half=1),
    "i8_d16": Element(1, True, 0),
    "i8_d16_hi": Element(1, True, 1),
    "u16_d16": Element(2, half=0),
    "u16_d16_hi": Element(2, half=1),
    "b8_d16_hi": Element(1, half=1),
    "b16_d16_hi": Element(2, half=1),
}
_LDS_LOADS = ["u8", "i8", "u16", "i16", "b32", "b64", "b96", "b128"]
_LDS_LOADS += [name for name in _LDS_ELEMENTS if "d16" in name and name[0] in "ui"]
_LDS_STORES = ["b8", "b16", "b32", "b64", "b96", "b128", "b8_d16_hi", "b16_d16_hi"]


def lds_align(size: int) -> int:
    """The alignment an LDS access of this size needs, bytes."""
    return {12: 16}.get(size, size)


def active(wave: Wave) -> np.ndarray:
    return LANE if wave.full else np.nonzero(wave.mask)[0]


def data_row(inst: Instruction, field: str) -> int:
    """The row of a data register, which may be an accumulation register."""
    return row_of(inst.operand(field)) + 256 * inst.get("acc")


def as_words(element: Element, data: np.ndarray) -> np.ndarray:
    """Loaded bytes, uint8 (n, size), as dwords, uint32 (n, registers): less than one is extended to one."""
    if element.size >= 4:
        return np.ascontiguousarray(data).view(U32)
    word = data[:, :1].astype(U32)
    if element.size == 2:
        word |= data[:, 1:].astype(U32) << U32(8)
    if element.is_signed:
        sign = U32(1 << 8 * element.size - 1)
        word = (word ^ sign) - sign
    return word


def deliver(wave: Wave, row: int, element: Element, lanes: np.ndarray, data: np.ndarray, defined=None) -> None:
    """Put loaded bytes, uint8 (lanes, size), into registers; `defined`, bool (lanes, size), tells which are a value."""
    words = as_words(element, data)
    if element.half is not None:
        shift = U32(16 * element.half)
        words = wave.vgpr[row, lanes][:, None] & ~(U32(0xFFFF) << shift) | (words & U32(0xFFFF)) << shift
    partly = defined is not None and not defined.all()
    for i in range(words.shape[1]):
        wave.vgpr[row + i, lanes] = words[:, i]
        known = None
        if partly:
            known = np.ones(LANES, bool)
            known[lanes] = defined[:, 4 * i : 4 * i + 4].all(axis=1)
        wave.set_defined(row + i, known)


def collect(wave: Wave, row: int, element: Element, lanes: np.ndarray) -> np.ndarray:
    """The bytes a store takes from registers: uint8 (lanes, size)."""
    words = wave.vgpr[row : row + element.registers, lanes]
    data = np.ascontiguousarray(words.T).view(np.uint8)
    start = 2 if element.half else 0
    return data[:, start : start + element.size]


def _known(wave: Wave, rows: list[int], size: int, lanes: np.ndarray) -> np.ndarray | None:
    """Which bytes of a store from these registers are a value: bool (lanes, size), None for all."""
    known = [wave.lanes_defined([row]) for row in rows]
    if all(register is None for register in known):
        return None
    everywhere = np.ones(LANES, bool)
    columns = [(everywhere if register is None else register)[lanes] for register in known]
    return np.repeat(np.stack(columns, axis=1), 4, axis=1)[:, :size]


# ---- Addresses ----


def global_address(wave: Wave, inst: Instruction) -> tuple[Callable[[np.ndarray], np.ndarray], list[int]]:
    """A function from lanes to their byte addresses (int64), and the address registers."""
    row = row_of(inst.operand("addr"))
    if inst.format == "FLAT":
        offset = inst.get("offset")
        return lambda lanes: _wide(wave, row, lanes) + offset, [row, row + 1]
    offset, base = signed(inst.get("offset"), 13), inst.operand("saddr")
    if base >= M0:
        return lambda lanes: _wide(wave, row, lanes) + offset, [row, row + 1]

    def address(lanes):
        start = np.array([(wave.get64(base) + offset) % 2**64], np.uint64).view(np.int64)
        return wave.vgpr[row, lanes].astype(np.int64) + start

    return address, [row]


def _wide(wave: Wave, row: int, lanes: np.ndarray) -> np.ndarray:
    return pair(wave.vgpr[row, lanes], wave.vgpr[row + 1, lanes]).view(np.int64)


@dataclass(frozen=True)
class BufferAddress:
    """Byte addresses of a buffer access: at(lanes, size) gives them and which are within num_records."""

    at: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
    rows: list[int]


def buffer_address(wave: Wave, inst: Instruction, machine) -> BufferAddress:
    """Raw buffers: base + soffset + (vaddr) + offset, out of range past num_records; index × stride where idxen.

    The hardware drops accesses out of range. That is a mask, unless num_records is no size and the offset none that
    stands for a mask: then it hides a fault, which is reported.
    """
    code, row = inst.operand("srsrc"), row_of(inst.operand("vaddr"))
    by_offset, by_index, constant = inst.get("offen"), inst.get("idxen"), inst.get("offset")
    scalar = reader(wave, inst, "soffset", 32)
    rows = [row + i for i in range(by_offset + by_index)]
    verb = "reads" if "_load_" in inst.name else "writes"
    s = wave.s

    def at(lanes, size):
        if s[code + 1] >> 31:
            raise UnknownInstructionError(f"{inst.text}: a swizzled buffer")
        base, records = s[code] | (s[code + 1] & 0xFFFF) << 32, s[code + 2]
        varying = np.zeros(lanes.size, np.int64)
        if by_offset:
            varying += wave.vgpr[row + by_index, lanes]
        offset = varying + constant
        inside = offset + scalar() + size <= records
        if by_index:
            stride, index = s[code + 1] >> 16 & 0x3FFF, wave.vgpr[row, lanes].astype(np.int64)
            if stride:
                inside = (index < records) & (offset + size <= stride)
            offset += index * stride
        elif records == NO_SIZE and not inside.all():
            meant = varying == MASKED_OFFSET if by_offset else np.full(lanes.size, scalar() == MASKED_OFFSET)
            machine.memory.report_dropped(verb, base, offset + scalar(), size, lanes, ~inside & ~meant)
        return base + scalar() + offset, inside

    return BufferAddress(at, rows)


# ---- Loads and stores of global memory ----


@binds(*(f"{space}_load_{name}" for space in ("global", "flat") for name in _LOADS))
def _bind_load(wave: Wave, inst: Instruction, machine) -> Step:
    element = _ELEMENTS[inst.name.split("_load_")[1]]
    address, rows = global_address(wave, inst)
    target, memory = data_row(inst, "vdst"), machine.memory

    def step():
        lanes = active(wave)
        wave.require(rows, "an address")
        deliver(wave, target, element, lanes, memory.load(address(lanes), element.size, lanes, element.align))

    return step


@binds(*(f"{space}_store_{name}" for space in ("global", "flat") for name in _STORES))
def _bind_store(wave: Wave, inst: Instruction, machine) -> Step:
    element = _ELEMENTS[inst.name.split("_store_")[1]]
    address, rows = global_address(wave, inst)
    row, memory = data_row(inst, "data"), machine.memory
    data_rows = list(range(row, row + element.registers))

    def step():
        lanes = active(wave)
        wave.require(rows, "an address")
        wave.require(data_rows, "a stored value")
        memory.store(address(lanes), collect(wave, row, element, lanes), lanes, element.align)

    return step


@binds(*(f"buffer_load_{name}" for name in _LOADS))
def _bind_buffer_load(wave: Wave, inst: Instruction, machine) -> Step:
    element = _ELEMENTS[inst.name.split("_load_")[1]]
    buffer, memory = buffer_address(wave, inst, machine), machine.memory
    to_lds = inst.get("lds")
    target = None if to_lds else data_row(inst, "vdata")

    def step():
        lanes = active(wave)
        wave.require(buffer.rows, "an address")
        addresses, inside = buffer.at(lanes, element.size)
        data = np.zeros((lanes.size, element.size), np.uint8)
        data[inside] = memory.load(addresses[inside], element.size, lanes[inside], element.align)
        if to_lds:
            _into_lds(wave, machine, element, data, lanes, inst.get("offset"))
        else:
            deliver(wave, target, element, lanes, data)

    return step


@binds(*(f"buffer_store_{name}" for name in _STORES))
def _bind_buffer_store(wave: Wave, inst: Instruction, machine) -> Step:
    element = _ELEMENTS[inst.name.split("_store_")[1]]
    buffer, memory = buffer_address(wave, inst, machine), machine.memory
    row = data_row(inst, "vdata")
    data_rows = list(range(row, row + element.registers))

    def step():
        lanes = active(wave)
        wave.require(buffer.rows, "an address")
        addresses, inside = buffer.at(lanes, element.size)
        kept = np.zeros(LANES, bool)
        kept[lanes[inside]] = True
        wave.require(data_rows, "a stored value", kept)
        lanes = lanes[inside]
        memory.store(addresses[inside], collect(wave, row, element, lanes), lanes, element.align)

    return step


@binds("buffer_wbl2", "buffer_inv")
def _bind_cache_control(wave: Wave, inst: Instruction, machine) -> Step:
    """Memory here is always coherent."""
    return lambda: None


# ---- Direct loads to LDS ----


def _into_lds(wave: Wave, machine, element: Element, data: np.ndarray, lanes: np.ndarray, offset: int) -> None:
    """Lane i's dwords go to M0 + the instruction's offset + i × size."""
    data = as_words(element, data).view(np.uint8)
    size = data.shape[1]
    addresses = (wave.s[M0] & 0x3FFFF) + offset + lanes * size
    machine.counters.lds_bytes_written += data.size
    wave.lds.store(addresses, data, lanes, wave.index, min(size, 4))


@binds(*(f"global_load_lds_{name}" for name in ("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx3", "dwordx4")))
def _bind_load_to_lds(wave: Wave, inst: Instruction, machine) -> Step:
    element = _ELEMENTS[inst.name.split("_lds_")[1]]
    address, rows = global_address(wave, inst)
    memory, offset = machine.memory, signed(inst.get("offset"), 13)

    def step():
        lanes = active(wave)
        wave.require(rows, "an address")
        data = memory.load(address(lanes), element.size, lanes, element.align)
        _into_lds(wave, machine, element, data, lanes, offset)

    return step


# ---- Scratch ----


def _scratch_offset(wave: Wave, inst: Instruction) -> tuple[Callable, list[int]]:
    constant, base = signed(inst.get("offset"), 13), inst.operand("saddr")
    rows = [row_of(inst.operand("addr"))] if inst.get("sve") else []

    def offset(lanes):
        start = constant + (signed(wave.s[base]) if base < M0 else 0)
        return start + (
            wave.vgpr[rows[0], lanes].view(np.int32).astype(np.int64) if rows else np.zeros(lanes.size, int)
        )

    return offset, rows


@binds(*(f"scratch_load_{name}" for name in _LOADS))
def _bind_scratch_load(wave: Wave, inst: Instruction, machine) -> Step:
    element = _ELEMENTS[inst.name.split("_load_")[1]]
    offset, rows = _scratch_offset(wave, inst)
    target = data_row(inst, "vdst")

    def step():
        lanes = active(wave)
        wave.require(rows, "an address")
        data, defined = wave.scratch.load(offset(lanes), element.size, lanes)
        deliver(wave, target, element, lanes, data, defined)

    return step


@binds(*(f"scratch_store_{name}" for name in _STORES))
def _bind_scratch_store(wave: Wave, inst: Instruction, machine) -> Step:
    element = _ELEMENTS[inst.name.split("_store_")[1]]
    offset, rows = _scratch_offset(wave, inst)
    row = data_row(inst, "data")
    data_rows = list(range(row, row + element.registers))

    def step():
        lanes = active(wave)
        wave.require(rows, "an address")
        data = collect(wave, row, element, lanes)
        known = _known(wave, data_rows, element.size, lanes)
        wave.scratch.store(offset(lanes), data, lanes, np.ones(data.shape, bool) if known is None else known)

    return step


# ---- LDS ----


def _lds_load(wave: Wave, machine, row: int, offset: int, size: int, lanes: np.ndarray):
    addresses = wave.vgpr[row, lanes].astype(np.int64) + offset
    machine.counters.lds_bytes_read += size * lanes.size
    machine.counters.lds_bank_conflicts += wave.lds.bank_conflicts(addresses, size, lanes)
    return wave.lds.load(addresses, size, lanes, wave.index, lds_align(size))


def _lds_store(wave: Wave, machine, row: int, offset: int, data: np.ndarray, lanes: np.ndarray, defined) -> None:
    addresses = wave.vgpr[row, lanes].astype(np.int64) + offset
    machine.counters.lds_bytes_written += data.size
    machine.counters.lds_bank_conflicts += wave.lds.bank_conflicts(addresses, data.shape[1], lanes)
    wave.lds.store(addresses, data, lanes, wave.index, lds_align(data.shape[1]), defined)


@binds(*(f"ds_read_{name}" for name in _LDS_LOADS))
def _bind_lds_load(wave: Wave, inst: Instruction, machine) -> Step:
    element, offset = _LDS_ELEMENTS[inst.name.removeprefix("ds_read_")], inst.lds_offset
    row, target = row_of(inst.operand("addr")), data_row(inst, "vdst")

    def step():
        lanes = active(wave)
        wave.require([row], "an LDS address")
        data, defined = _lds_load(wave, machine, row, offset, element.size, lanes)
        deliver(wave, target, element, lanes, data, defined)

    return step


@binds(*(f"ds_write_{name}" for name in _LDS_STORES))
def _bind_lds_store(wave: Wave, inst: Instruction, machine) -> Step:
    element, offset = _LDS_ELEMENTS[inst.name.removeprefix("ds_write_")], inst.lds_offset
    row, source = row_of(inst.operand("addr")), data_row(inst, "data0")
    rows = list(range(source, source + element.registers))

    def step():
        lanes = active(wave)
        wave.require([row], "an LDS address")
        data = collect(wave, source, element, lanes)
        _lds_store(wave, machine, row, offset, data, lanes, _known(wave, rows, element.size, lanes))

    return step


_TWO = [f"{two}_{bits}" for two in ("2", "2st64") for bits in ("b32", "b64")]


def _two(inst: Instruction) -> tuple[Element, int, int]:
    """The element of a read2 or write2, and its two byte offsets."""
    element = _LDS_ELEMENTS[inst.name.rsplit("_", 1)[1]]
    step = element.size * (64 if "st64" in inst.name else 1)
    return element, inst.get("offset0") * step, inst.get("offset1") * step


@binds(*(f"ds_read{name}" for name in _TWO))
def _bind_lds_load_two(wave: Wave, inst: Instruction, machine) -> Step:
    element, first, second = _two(inst)
    row, target = row_of(inst.operand("addr")), data_row(inst, "vdst")

    def step():
        lanes = active(wave)
        wave.require([row], "an LDS address")
        # Both are read before the destination, which may hold the address, is written.
        loads = [_lds_load(wave, machine, row, offset, element.size, lanes) for offset in (first, second)]
        for i, (data, defined) in enumerate(loads):
            deliver(wave, target + i * element.registers, element, lanes, data, defined)

    return step


@binds(*(f"ds_write{name}" for name in _TWO))
def _bind_lds_store_two(wave: Wave, inst: Instruction, machine) -> Step:
    element, *offsets = _two(inst)
    row = row_of(inst.operand("addr"))
    sources = [data_row(inst, "data0"), data_row(inst, "data1")]

    def step():
        lanes = active(wave)
        wave.require([row], "an LDS address")
        for source, offset in zip(sources, offsets, strict=True):
            known = _known(wave, list(range(source, source + element.registers)), element.size, lanes)
            _lds_store(wave, machine, row, offset, collect(wave, source, element, lanes), lanes, known)

    return step


@binds("ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4")
def _bind_lds_transpose(wave: Wave, inst: Instruction, machine) -> Step:
    """16 lanes read 16 × 8 bytes as a row-major matrix of 16 columns; each of the lanes receives a column."""
    bits, offset = int(inst.name.rsplit("_b", 1)[1]), inst.lds_offset
    row, target = row_of(inst.operand("addr")), data_row(inst, "vdst")
    element = Element(8)

    def step():
        lanes = active(wave)
        wave.require([row], "an LDS address")
        data, defined = _lds_load(wave, machine, row, offset, 8, lanes)
        raw, known = np.zeros((LANES, 8), np.uint8), np.ones(LANES, bool)
        raw[lanes], known[lanes] = data, defined.all(axis=1)
        # A column's values come from all 16 lanes of its group.
        known = np.repeat(known.reshape(4, 16).all(axis=1), 16)[lanes]
        columns = transposed(raw, bits)[lanes]
        deliver(wave, target, element, lanes, columns, np.broadcast_to(known[:, None], columns.shape))

    return step


def transposed(raw: np.ndarray, bits: int) -> np.ndarray:
    """uint8 (64, 8): in each group of 16 lanes, the columns of the matrix of 16 columns that their bytes make up."""
    values = {16: lambda: raw.view(np.uint16), 8: lambda: raw, 4: lambda: np.stack([raw & 15, raw >> 4], -1)}[bits]()
    matrices = values.reshape(4, -1, 16)
    columns = np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(LANES, -1)
    if bits == 4:
        columns = columns[:, 0::2] | columns[:, 1::2] << 4
    return np.ascontiguousarray(columns).view(np.uint8)


# ---- Atomics ----


def _as(dtype: type, function: Callable) -> Callable:
    """function on values of a type, applied to raw unsigned words."""
    return lambda old, new: function(old.view(dtype), new.view(dtype)).astype(dtype).view(old.dtype)


def _packed(dtype: type) -> Callable:
    def add(old, new):
        return (old.view(dtype).astype(np.float32) + new.view(dtype).astype(np.float32)).astype(dtype).view(old.dtype)

    return add


def _float_min(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b)))


def _float_max(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b)))


_INTEGER_ATOMICS: dict[str, Callable] = {
    "swap": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "rsub": lambda old, new: new - old,
    "umin": np.minimum,
    "umax": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, new: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - old.dtype.type(1)),
}
_SIGNED_ATOMICS = {"smin": np.minimum, "smax": np.maximum}

# name in global and buffer instructions: (bytes, function of the old and the given words)
_ATOMICS: dict[str, tuple[int, Callable]] = {
    **{name: (4, function) for name, function in _INTEGER_ATOMICS.items() if name != "rsub"},
    **{f"{name}_x2": (8, function) for name, function in _INTEGER_ATOMICS.items() if name != "rsub"},
    **{name: (4, _as(np.int32, function)) for name, function in _SIGNED_ATOMICS.items()},
    **{f"{name}_x2": (8, _as(np.int64, function)) for name, function in _SIGNED_ATOMICS.items()},
    "add_f32": (4, _as(np.float32, np.add)),
    "add_f64": (8, _as(np.float64, np.add)),
    "min_f64": (8, _as(np.float64, _float_min)),
    "max_f64": (8, _as(np.float64, _float_max)),
    "pk_add_f16": (4, _packed(np.float16)),
    "pk_add_bf16": (4, _packed(ml_dtypes.bfloat16)),
    "cmpswap": (4, None),
    "cmpswap_x2": (8, None),
}

# The same for LDS, by the part of the name that says what is done.
_LDS_ATOMICS: dict[str, tuple[int, Callable]] = {
    **{
        f"{name}_{'b' if name in ('and', 'or', 'xor') else 'u'}{bits}": (bits // 8, _INTEGER_ATOMICS[name])
        for name in ("add", "sub", "rsub", "inc", "dec", "and", "or", "xor")
        for bits in (32, 64)
    },
    **{
        f"{name}_u{bits}": (bits // 8, f) for name, f in (("min", np.minimum), ("max", np.maximum)) for bits in (32, 64)
    },
    **{
        f"{name}_i{bits}": (bits // 8, _as(np.int32 if bits == 32 else np.int64, f))
        for name, f in (("min", np.minimum), ("max", np.maximum))
        for bits in (32, 64)
    },
    **{
        f"{name}_f{bits}": (bits // 8, _as(np.float32 if bits == 32 else np.float64, f))
        for name, f in (("add", np.add), ("min", _float_min), ("max", _float_max))
        for bits in (32, 64)
    },
    "pk_add_f16": (4, _packed(np.float16)),
    "pk_add_bf16": (4, _packed(ml_dtypes.bfloat16)),
    "wrxchg_b32": (4, _INTEGER_ATOMICS["swap"]),
    "wrxchg_b64": (8, _INTEGER_ATOMICS["swap"]),
    "cmpst_b32": (4, None),
    "cmpst_b64": (8, None),
}


def _words(wave: Wave, row: int, size: int, lanes: np.ndarray) -> np.ndarray:
    raw = np.ascontiguousarray(wave.vgpr[row : row + size // 4, lanes].T)
    return raw.view(f"u{size}")[:, 0]


def _in_rounds(addresses: np.ndarray):
    """Indices of accesses in groups in which no address repeats, in lane order."""
    if addresses.size == 0:
        return
    order = np.argsort(addresses, kind="stable")
    same = np.concatenate([[False], addresses[order][1:] == addresses[order][:-1]])
    starts = np.maximum.accumulate(np.where(same, 0, np.arange(same.size)))
    rank = np.empty(same.size, int)
    rank[order] = np.arange(same.size) - starts
    for turn in range(int(rank.max()) + 1):
        yield np.nonzero(rank == turn)[0]


def perform_atomic(load: Callable, store: Callable, addresses, size: int, update: Callable) -> np.ndarray:
    """Read, update and write each address in turn; returns the words read. update(old, indices) gives the new words."""
    old = np.zeros(addresses.size, f"u{size}")
    for turn in _in_rounds(addresses):
        before = load(addresses[turn], turn).view(f"u{size}")[:, 0]
        old[turn] = before
        after = np.ascontiguousarray(update(before, turn))
        store(addresses[turn], after[:, None].view(np.uint8), turn)
    return old


def _updater(function: Callable | None, given: np.ndarray, compare: np.ndarray | None) -> Callable:
    if function is None:
        return lambda old, turn: np.where(old == compare[turn], given[turn], old)
    return lambda old, turn: function(old, given[turn])


def _atomic_step(wave: Wave, inst: Instruction, machine, where: Callable, rows: list[int], field: str) -> Step:
    """A global atomic. where(lanes, size) gives addresses and which of them take part."""
    size, function = _ATOMICS[inst.name.split("_atomic_")[1]]
    row, memory = data_row(inst, field), machine.memory
    exchanges = function is None
    sources = list(range(row, row + size // 4 * (2 if exchanges else 1)))
    target = (data_row(inst, "vdst") if inst.has("vdst") else row) if inst.get("sc0") else None

    def step():
        lanes = active(wave)
        wave.require(rows, "an address")
        wave.require(sources, "an atomic operation")
        addresses, inside = where(lanes, size)
        lanes, addresses = lanes[inside], addresses[inside]
        given = _words(wave, row, size, lanes)
        compare = _words(wave, row + size // 4, size, lanes) if exchanges else None
        old = perform_atomic(
            lambda at, turn: memory.load(at, size, lanes[turn], size),
            lambda at, data, turn: memory.store(at, data, lanes[turn], size),
            addresses,
            size,
            _updater(function, given, compare),
        )
        if target is not None:
            deliver(wave, target, Element(size), lanes, old[:, None].view(np.uint8))

    return step


@binds(*(f"{space}_atomic_{name}" for space in ("global", "flat") for name in _ATOMICS))
def _bind_atomic(wave: Wave, inst: Instruction, machine) -> Step:
    address, rows = global_address(wave, inst)
    return _atomic_step(wave, inst, machine, lambda lanes, size: (address(lanes), slice(None)), rows, "data")


@binds(*(f"buffer_atomic_{name}" for name in _ATOMICS))
def _bind_buffer_atomic(wave: Wave, inst: Instruction, machine) -> Step:
    buffer = buffer_address(wave, inst, machine)
    return _atomic_step(wave, inst, machine, buffer.at, buffer.rows, "vdata")


def _lds_atomic_names() -> list[str]:
    names = []
    for name in _LDS_ATOMICS:
        head, tail = name.rsplit("_", 1)
        names += [f"ds_{head}_rtn_{tail}"] if head == "wrxchg" else [f"ds_{name}", f"ds_{head}_rtn_{tail}"]
    return names


@binds(*_lds_atomic_names())
def _bind_lds_atomic(wave: Wave, inst: Instruction, machine) -> Step:
    """LDS atomics of different waves may meet at one address without a race."""
    size, function = _LDS_ATOMICS[re.sub("_rtn", "", inst.name.removeprefix("ds_"))]
    row, offset = row_of(inst.operand("addr")), inst.lds_offset
    # ds_cmpst compares with data0 and stores data1.
    compare_row = data_row(inst, "data0") if function is None else None
    given_row = data_row(inst, "data1" if function is None else "data0")
    target = data_row(inst, "vdst") if "_rtn" in inst.name else None
    words = size // 4
    sources = [r + i for r in (given_row, compare_row) if r is not None for i in range(words)]

    def step():
        lanes = active(wave)
        wave.require([row], "an LDS address")
        wave.require(sources, "an atomic operation")
        addresses = wave.vgpr[row, lanes].astype(np.int64) + offset
        machine.counters.lds_bytes_read += size * lanes.size
        machine.counters.lds_bytes_written += size * lanes.size
        machine.counters.lds_bank_conflicts += wave.lds.bank_conflicts(addresses, size, lanes, atomic=True)
        compare = None if compare_row is None else _words(wave, compare_row, size, lanes)
        old = perform_atomic(
            lambda at, turn: wave.lds.load(at, size, lanes[turn], wave.index, size, atomic=True)[0],
            lambda at, data, turn: wave.lds.store(at, data, lanes[turn], wave.index, size, atomic=True),
            addresses,
            size,
            _updater(function, _words(wave, given_row, size, lanes), compare),
        )
        if target is not None:
            deliver(wave, target, Element(size), lanes, old[:, None].view(np.uint8))

    return step
