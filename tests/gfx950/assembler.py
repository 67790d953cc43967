"""Tiny programs around the instructions under test: registers filled from memory, instructions run, registers stored.

Instructions are encoded with tinygrad's tables of bit fields. A program runs once for each workgroup, which is a wave
of 64 lanes with its own register values, so that one run tries an instruction on many inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tinygrad.renderer.amd.dsl import BitField, Reg
from tinygrad.runtime.autogen.amd.cdna import ins

import gfx950
from gfx950.arguments import Argument
from gfx950.loader import CodeObject, Descriptor

LANES = 64
VCC, M0, EXEC, LITERAL = 106, 124, 126, 255
SCC = -1  # stands for the condition bit among the scalar registers
RESERVED_SGPR = 80  # the program around the instructions uses s80 to s99, and v254 and v255
MEMORY_POINTER = 90  # s[90:91]: the address of `memory`
_IN, _OUT, _TEMP, _KEPT_SCC, _KEPT_EXEC, _KERNARG = 92, 94, 89, 88, 86, 98
_LANE_OFFSET, _ROW = 255, 254


def v(number: int) -> Reg:
    return Reg(256 + number, 1)


def s(number: int) -> Reg:
    """A scalar register, or any operand by its code below 256."""
    return Reg(number, 1)


def constant(value: float) -> Reg:
    """An inline constant: an integer from -16 to 64, or one of the floats that have a code."""
    floats = {0.5: 240, -0.5: 241, 1.0: 242, -1.0: 243, 2.0: 244, -2.0: 245, 4.0: 246, -4.0: 247}
    if isinstance(value, float):
        return Reg(floats[value], 1)
    assert -16 <= value <= 64
    return Reg(128 + value if value >= 0 else 192 - value, 1)


def opcode(form: str, name: str) -> object | None:
    """tinygrad's opcode for a mnemonic in an encoding; None where that encoding lacks it."""
    field = getattr(ins, form).op
    for suffix in ("", "_E32", "_E64"):
        member = getattr(field._enum, name.upper() + suffix, None)
        if member is not None and (field.allowed is None or member in field.allowed):
            return member
    return None


def encode(form: str, name: str, **fields: object) -> bytes:
    """An instruction in the encoding `form` (VOP2, VOP3, DS, …) from its fields; the others have their defaults."""
    kind, raw = getattr(ins, form), 0
    fields["op"] = opcode(form, name)
    assert fields["op"] is not None, f"{name} has no encoding {form}"
    for field_name, field in kind._fields:
        value = fields.pop(field_name, None)
        plain_number = isinstance(value, Reg) and type(field) is BitField  # the scales of a scaled MFMA
        raw = field.set(raw, value.offset if plain_number else value)
    assert not fields, f"{form} has no fields {sorted(fields)}"
    return raw.to_bytes(kind._base_size, "little")


# ---- Instructions that programs are made of ----


def s_mov(target: int, source: int) -> bytes:
    return encode("SOP1", "s_mov_b32", sdst=s(target), ssrc0=s(source))


def s_set(target: int, value: int) -> bytes:
    """A scalar register gets a 32-bit constant."""
    return encode("SOP1_LIT", "s_mov_b32", sdst=s(target), ssrc0=s(LITERAL), literal=value & 0xFFFFFFFF)


def v_mov(target: int, source: Reg) -> bytes:
    return encode("VOP1", "v_mov_b32", vdst=v(target), src0=source)


def v_set(target: int, value: int) -> bytes:
    return encode("VOP1_LIT", "v_mov_b32", vdst=v(target), src0=s(LITERAL), literal=value & 0xFFFFFFFF)


def barrier() -> bytes:
    return encode("SOPP", "s_barrier")


def _advance(pointer: int, count: int) -> bytes:
    return encode("SOP2_LIT", "s_add_u32", sdst=s(pointer), ssrc0=s(pointer), ssrc1=s(LITERAL), literal=count) + encode(
        "SOP2", "s_addc_u32", sdst=s(pointer + 1), ssrc0=s(pointer + 1), ssrc1=constant(0)
    )


def _advance_by_group(pointer: int, stride: int) -> bytes:
    return (
        encode("SOP2_LIT", "s_mul_i32", sdst=s(_TEMP), ssrc0=s(2), ssrc1=s(LITERAL), literal=stride)
        + encode("SOP2", "s_add_u32", sdst=s(pointer), ssrc0=s(pointer), ssrc1=s(_TEMP))
        + encode("SOP2", "s_addc_u32", sdst=s(pointer + 1), ssrc0=s(pointer + 1), ssrc1=constant(0))
    )


def _load_pointers(target: int, name: str, offset: int) -> bytes:
    return encode("SMEM", name, sdata=s(target), sbase=s(_KERNARG), imm=1, offset=offset)


def _fill_vector(row: int) -> bytes:
    is_accumulator, number = divmod(row, 256)
    return encode(
        "GLOBAL", "global_load_dword", vdst=v(number), addr=v(_LANE_OFFSET), saddr=s(_IN), acc=is_accumulator
    ) + _advance(_IN, 4 * LANES)


def _store_vector(row: int) -> bytes:
    is_accumulator, number = divmod(row, 256)
    return encode(
        "GLOBAL", "global_store_dword", data=v(number), addr=v(_LANE_OFFSET), saddr=s(_OUT), acc=is_accumulator
    ) + _advance(_OUT, 4 * LANES)


def _fill_scalar(code: int, place: int) -> bytes:
    load = encode("SMEM", "s_load_dword", sdata=s(_TEMP), sbase=s(_IN), imm=1, offset=4 * place)
    if code == SCC:
        return load + encode("SOPC", "s_cmp_lg_u32", ssrc0=s(_TEMP), ssrc1=constant(0))
    return load + s_mov(code, _TEMP)


def _store_scalar(code: int) -> bytes:
    kept = {SCC: _KEPT_SCC, EXEC: _KEPT_EXEC, EXEC + 1: _KEPT_EXEC + 1}.get(code, code)
    return v_mov(_ROW, s(kept)) + _store_vector(_ROW)


_vector, _scalar = v, s  # `run` has parameters of those names


class Assembled(CodeObject):
    """A code object without an ELF file behind it."""

    @property
    def source_lines(self) -> dict[int, str]:
        return {}


KEEPS_DENORMALS = 0xF0  # in the MODE register: of all formats


def code_object(
    text: bytes, *, arguments: int, lds: int = 0, scratch: int = 0, waves: int = 1, mode: int = KEEPS_DENORMALS
) -> CodeObject:
    """A kernel that takes so many pointers; the kernarg pointer is in s[0:1], the workgroup's number in s2."""
    kernarg, group_id = 1 << 3, 1 << 7
    return Assembled(
        name="test",
        elf=b"",
        descriptor=Descriptor(lds, scratch, 8 * arguments, 0, mode << 12, group_id, kernarg, 0, 0),
        arguments=tuple(Argument(f"argument {i}", 8 * i, 8, "global_buffer") for i in range(arguments)),
        metadata={},
        text=(0, len(text)),
        base=0,
        image=text,
        lds_size=lds,
        num_waves=waves,
    )


@dataclass(frozen=True)
class Outcome:
    """Registers after a run: v by row (accumulation registers from 256), uint32 lanes of all groups one after the
    other; s by code, one integer a group."""

    v: dict[int, np.ndarray]
    s: dict[int, list[int]]
    result: gfx950.Result

    def pair(self, row: int) -> np.ndarray:
        """A 64-bit result."""
        return self.v[row].astype(np.uint64) | self.v[row + 1].astype(np.uint64) << np.uint64(32)

    def mask(self, code: int) -> list[bool]:
        """A pair of scalar registers as one bool for each lane of each group."""
        words = [low | high << 32 for low, high in zip(self.s[code], self.s[code + 1], strict=True)]
        return [bool(word >> lane & 1) for word in words for lane in range(LANES)]

    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.result.findings}


Lanes = Sequence[int] | np.ndarray


def _column(values: Lanes | int, count: int) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(values, np.uint32), count))


def run(
    program: bytes | Iterable[bytes],
    *,
    v: Mapping[int, Lanes] | None = None,
    s: Mapping[int, int | Sequence[int]] | None = None,
    read_v: Sequence[int] = (),
    read_s: Sequence[int] = (),
    memory: object = None,
    lds: int = 0,
    scratch: int = 0,
    mode: int = KEEPS_DENORMALS,
    faulty: bool = False,
) -> Outcome:
    """Run a program with registers set before, and give those named by read_v and read_s.

    v: row → lanes, a multiple of 64 (one group each) or one value for all. s: code (or SCC, VCC, EXEC, M0 and their
    upper halves) → a value, or one for each group. memory: an array or Uninitialised, whose address is s[90:91].
    Unless the program is faulty, the run has to be free of findings.
    """
    body = program if isinstance(program, bytes) else b"".join(program)
    v, s = dict(v or {}), dict(s or {})
    assert all(row % 256 < _ROW for row in (*v, *read_v))
    assert not any(RESERVED_SGPR <= code < VCC for code in (*s, *read_s))
    codes = sorted(s, key=lambda code: code == SCC)  # the condition bit last: nothing may disturb it
    groups = max([1, *(np.size(lanes) // LANES for lanes in v.values()), *(np.size(value) for value in s.values())])
    given = np.concatenate([
        *(_column(v[row], groups * LANES).reshape(groups, LANES) for row in v),
        *(_column(s[code], groups)[:, None] for code in codes),
        np.zeros((groups, 1), np.uint32),  # so that there is a buffer to pass
    ], axis=1)  # fmt: skip
    taken = np.zeros((groups, len(read_v) + len(read_s) + 1, LANES), np.uint32)
    text = b"".join([
        s_mov(_KERNARG, 0) + s_mov(_KERNARG + 1, 1),
        _load_pointers(_IN, "s_load_dwordx4", 0) + _load_pointers(MEMORY_POINTER, "s_load_dwordx2", 16),
        _advance_by_group(_IN, given[0].nbytes) + _advance_by_group(_OUT, taken[0].nbytes),
        encode("VOP2", "v_lshlrev_b32", vdst=_vector(_LANE_OFFSET), src0=constant(2), vsrc1=_vector(0)),
        *map(_fill_vector, v),
        *(_fill_scalar(code, place) for place, code in enumerate(codes)),
        body,
        encode("SOP2", "s_cselect_b32", sdst=_scalar(_KEPT_SCC), ssrc0=constant(1), ssrc1=constant(0)),
        s_mov(_KEPT_EXEC, EXEC) + s_mov(_KEPT_EXEC + 1, EXEC + 1),
        s_set(EXEC, -1) + s_set(EXEC + 1, -1),
        *map(_store_vector, read_v),
        *map(_store_scalar, read_s),
        encode("SOPP", "s_endpgm"),
    ])  # fmt: skip
    buffers = [given, taken, np.zeros(4, np.uint32) if memory is None else memory]
    code = code_object(text, arguments=3, lds=lds, scratch=scratch, mode=mode)
    result = gfx950.run(code, groups, buffers)
    if not faulty:
        assert result.ok, "\n".join(map(str, result.findings))
    vectors = {row: taken[:, i].reshape(-1) for i, row in enumerate(read_v)}
    numbers = {code: taken[:, len(read_v) + i, 0].tolist() for i, code in enumerate(read_s)}
    return Outcome(vectors, numbers, result)
