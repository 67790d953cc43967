"""Scalar instructions: SOP1, SOP2, SOPC, SOPK, SOPP and scalar memory. Values are Python integers.

Source: AMD, "CDNA4 Instruction Set Architecture", chapters 5 and 12 (SALU), 8 (scalar memory).
"""

import struct

import numpy as np

from gfx950.decode import EXEC, EXECZ, LITERAL, SCC, VCC, VCCZ, Instruction
from gfx950.findings import KernelFaultError, UnknownInstructionError
from gfx950.memory import MASKED_OFFSET, NO_SIZE
from gfx950.ops import BARRIER, END, Step, binds
from gfx950.wave import KEEPS_DENORMALS, Wave, unsupported_mode

M32, M64 = 2**32 - 1, 2**64 - 1
_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189535)
_SCALAR_LANE = np.zeros(1, np.int64)


def inline(code: int, bits: int) -> int | None:
    """An inline constant's bits, None for another operand: integers sign-extended, floats in the operand's width."""
    if 128 <= code <= 208:
        return (code - 128 if code <= 192 else 192 - code) & (2**bits - 1)
    if 240 <= code <= 248:
        pattern = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}[bits]
        return struct.unpack(pattern[1], struct.pack(pattern[0], _FLOATS[code - 240]))[0]
    return None


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def reader(wave: Wave, inst: Instruction, field: str, bits: int):
    """A function that returns a scalar operand as an unsigned integer of `bits` bits."""
    code = inst.operand(field)
    constant = inline(code, bits)
    if code == LITERAL:
        constant = inst.literal if bits == 32 else signed(inst.literal) & M64
    if constant is not None:
        return lambda: constant
    if code == SCC:
        return lambda: wave.scc
    if code == VCCZ:
        return lambda: int(wave.get64(VCC) == 0)
    if code == EXECZ:
        return lambda: int(not wave.mask.any())
    if 235 <= code <= 238:  # the LDS and scratch apertures: nothing here is mapped into the flat address space
        return lambda: 0
    s = wave.s
    return (lambda: wave.get64(code)) if bits == 64 else (lambda: s[code])


def writer(wave: Wave, inst: Instruction, bits: int):
    code = inst.operand("sdst")
    if bits == 64:
        return lambda value: wave.set64(code, value)
    if code < 126:
        s = wave.s

        def write(value):
            s[code] = value & M32

        return write
    return lambda value: wave.set32(code, value)


def _bitfield(bits: int, extend: bool):
    def extract(value, control):
        offset, width = control & (bits - 1), control >> 16 & 0x7F
        width = min(width, bits - offset)
        field = value >> offset & ((1 << width) - 1)
        return signed(field, width) if extend and width else field

    return extract


def _find_first(value: int) -> int:
    return (value & -value).bit_length() - 1 if value else M32


def _leading(bits: int):
    return lambda a: bits - a.bit_length() if a else M32


def _leading_sign(bits: int):
    def count(a):
        a = signed(a, bits)
        a = ~a if a < 0 else a
        return bits - a.bit_length() if a else M32

    return count


def _reverse(bits: int):
    return lambda a: int(f"{a:0{bits}b}"[::-1], 2)


# SCC after an instruction: unchanged, or whether the result is not zero.
KEEP, NONZERO = 0, 1

# name: (bits of the destination, bits of each source, SCC, function)
_ONE = {
    "s_mov_b32": (32, 32, KEEP, lambda a: a),
    "s_mov_b64": (64, 64, KEEP, lambda a: a),
    "s_not_b32": (32, 32, NONZERO, lambda a: ~a & M32),
    "s_not_b64": (64, 64, NONZERO, lambda a: ~a & M64),
    "s_brev_b32": (32, 32, KEEP, _reverse(32)),
    "s_brev_b64": (64, 64, KEEP, _reverse(64)),
    "s_bcnt0_i32_b32": (32, 32, NONZERO, lambda a: 32 - a.bit_count()),
    "s_bcnt0_i32_b64": (32, 64, NONZERO, lambda a: 64 - a.bit_count()),
    "s_bcnt1_i32_b32": (32, 32, NONZERO, lambda a: a.bit_count()),
    "s_bcnt1_i32_b64": (32, 64, NONZERO, lambda a: a.bit_count()),
    "s_ff0_i32_b32": (32, 32, KEEP, lambda a: _find_first(~a & M32)),
    "s_ff0_i32_b64": (32, 64, KEEP, lambda a: _find_first(~a & M64)),
    "s_ff1_i32_b32": (32, 32, KEEP, _find_first),
    "s_ff1_i32_b64": (32, 64, KEEP, _find_first),
    "s_flbit_i32_b32": (32, 32, KEEP, _leading(32)),
    "s_flbit_i32_b64": (32, 64, KEEP, _leading(64)),
    "s_flbit_i32": (32, 32, KEEP, _leading_sign(32)),
    "s_flbit_i32_i64": (32, 64, KEEP, _leading_sign(64)),
    "s_sext_i32_i8": (32, 32, KEEP, lambda a: signed(a & 0xFF, 8)),
    "s_sext_i32_i16": (32, 32, KEEP, lambda a: signed(a & 0xFFFF, 16)),
    "s_abs_i32": (32, 32, NONZERO, lambda a: abs(signed(a)) & M32),
    "s_bitreplicate_b64_b32": (64, 32, KEEP, lambda a: sum((a >> i & 1) * (3 << 2 * i) for i in range(32))),
    "s_quadmask_b32": (32, 32, NONZERO, lambda a: sum(1 << i for i in range(8) if a >> 4 * i & 15)),
    "s_quadmask_b64": (64, 64, NONZERO, lambda a: sum(1 << i for i in range(16) if a >> 4 * i & 15)),
    "s_wqm_b32": (32, 32, NONZERO, lambda a: sum(15 << 4 * i for i in range(8) if a >> 4 * i & 15)),
    "s_wqm_b64": (64, 64, NONZERO, lambda a: sum(15 << 4 * i for i in range(16) if a >> 4 * i & 15)),
}

_LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}

# name: (bits of the destination, of the first and of the second source, SCC, function)
_TWO = {
    "s_lshl_b32": (32, 32, 32, NONZERO, lambda a, b: a << (b & 31)),
    "s_lshl_b64": (64, 64, 32, NONZERO, lambda a, b: a << (b & 63)),
    "s_lshr_b32": (32, 32, 32, NONZERO, lambda a, b: a >> (b & 31)),
    "s_lshr_b64": (64, 64, 32, NONZERO, lambda a, b: a >> (b & 63)),
    "s_ashr_i32": (32, 32, 32, NONZERO, lambda a, b: signed(a) >> (b & 31)),
    "s_ashr_i64": (64, 64, 32, NONZERO, lambda a, b: signed(a, 64) >> (b & 63)),
    "s_bfm_b32": (32, 32, 32, KEEP, lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "s_bfm_b64": (64, 32, 32, KEEP, lambda a, b: ((1 << (a & 63)) - 1) << (b & 63)),
    "s_mul_i32": (32, 32, 32, KEEP, lambda a, b: a * b),
    "s_mul_hi_u32": (32, 32, 32, KEEP, lambda a, b: a * b >> 32),
    "s_mul_hi_i32": (32, 32, 32, KEEP, lambda a, b: signed(a) * signed(b) >> 32),
    "s_bfe_u32": (32, 32, 32, NONZERO, _bitfield(32, False)),
    "s_bfe_i32": (32, 32, 32, NONZERO, _bitfield(32, True)),
    "s_bfe_u64": (64, 64, 32, NONZERO, _bitfield(64, False)),
    "s_bfe_i64": (64, 64, 32, NONZERO, _bitfield(64, True)),
    "s_absdiff_i32": (32, 32, 32, NONZERO, lambda a, b: abs(signed(a - b & M32))),
    "s_pack_ll_b32_b16": (32, 32, 32, KEEP, lambda a, b: (b & 0xFFFF) << 16 | a & 0xFFFF),
    "s_pack_lh_b32_b16": (32, 32, 32, KEEP, lambda a, b: b & 0xFFFF0000 | a & 0xFFFF),
    "s_pack_hh_b32_b16": (32, 32, 32, KEEP, lambda a, b: b & 0xFFFF0000 | a >> 16),
} | {
    f"s_{name}_b{bits}": (bits, bits, bits, NONZERO, function) for name, function in _LOGIC.items() for bits in (32, 64)
}


@binds(*_ONE)
def _bind_one(wave: Wave, inst: Instruction, machine) -> Step:
    bits, source_bits, rule, function = _ONE[inst.name]
    read, write = reader(wave, inst, "ssrc0", source_bits), writer(wave, inst, bits)
    limit = 2**bits - 1

    def step():
        value = function(read()) & limit
        write(value)
        if rule == NONZERO:
            wave.scc = int(value != 0)

    return step


@binds(*_TWO)
def _bind_two(wave: Wave, inst: Instruction, machine) -> Step:
    bits, first, second, rule, function = _TWO[inst.name]
    a, b, write = reader(wave, inst, "ssrc0", first), reader(wave, inst, "ssrc1", second), writer(wave, inst, bits)
    limit = 2**bits - 1

    def step():
        value = function(a(), b()) & limit
        write(value)
        if rule == NONZERO:
            wave.scc = int(value != 0)

    return step


def _overflows(value: int) -> int:
    return int(not -(2**31) <= value < 2**31)


# name: function of both sources and SCC → (value, new SCC)
_WITH_SCC = {
    "s_add_u32": lambda a, b, c: (a + b, a + b >> 32),
    "s_sub_u32": lambda a, b, c: (a - b, int(b > a)),
    "s_addc_u32": lambda a, b, c: (a + b + c, a + b + c >> 32),
    "s_subb_u32": lambda a, b, c: (a - b - c, int(b + c > a)),
    "s_add_i32": lambda a, b, c: (a + b, _overflows(signed(a) + signed(b))),
    "s_sub_i32": lambda a, b, c: (a - b, _overflows(signed(a) - signed(b))),
    "s_min_i32": lambda a, b, c: (min(signed(a), signed(b)), int(signed(a) < signed(b))),
    "s_max_i32": lambda a, b, c: (max(signed(a), signed(b)), int(signed(a) >= signed(b))),
    "s_min_u32": lambda a, b, c: (min(a, b), int(a < b)),
    "s_max_u32": lambda a, b, c: (max(a, b), int(a >= b)),
    "s_cselect_b32": lambda a, b, c: (a if c else b, c),
    "s_cselect_b64": lambda a, b, c: (a if c else b, c),
} | {f"s_lshl{n}_add_u32": lambda a, b, c, n=n: ((a << n) + b, int((a << n) + b > M32)) for n in (1, 2, 3, 4)}


@binds(*_WITH_SCC)
def _bind_with_scc(wave: Wave, inst: Instruction, machine) -> Step:
    bits = 64 if inst.name.endswith("b64") else 32
    a, b, write = reader(wave, inst, "ssrc0", bits), reader(wave, inst, "ssrc1", bits), writer(wave, inst, bits)
    function = _WITH_SCC[inst.name]

    def step():
        value, wave.scc = function(a(), b(), wave.scc)
        write(value)

    return step


@binds("s_cmov_b32", "s_cmov_b64")
def _bind_cmov(wave: Wave, inst: Instruction, machine) -> Step:
    bits = int(inst.name[-2:])
    read, write = reader(wave, inst, "ssrc0", bits), writer(wave, inst, bits)

    def step():
        if wave.scc:
            write(read())

    return step


@binds(*(f"s_bitset{n}_b{bits}" for n in (0, 1) for bits in (32, 64)))
def _bind_bitset(wave: Wave, inst: Instruction, machine) -> Step:
    bits, value = int(inst.name[-2:]), int(inst.name[8])
    code = inst.operand("sdst")
    read, write = reader(wave, inst, "ssrc0", 32), writer(wave, inst, bits)

    def step():
        old = wave.get64(code) if bits == 64 else wave.s[code]
        bit = 1 << (read() & (bits - 1))
        write(old | bit if value else old & ~bit)

    return step


_SAVEEXEC = {
    **_LOGIC,
    "andn1": lambda a, b: ~a & b,
    "orn1": lambda a, b: ~a | b,
}


@binds(*(f"s_{name}_saveexec_b64" for name in _SAVEEXEC))
def _bind_saveexec(wave: Wave, inst: Instruction, machine) -> Step:
    function = _SAVEEXEC[inst.name.split("_")[1]]
    read, write = reader(wave, inst, "ssrc0", 64), writer(wave, inst, 64)

    def step():
        source, old = read(), wave.get64(EXEC)
        write(old)
        value = function(source, old) & M64
        wave.set64(EXEC, value)
        wave.scc = int(value != 0)

    return step


@binds("s_andn1_wrexec_b64", "s_andn2_wrexec_b64")
def _bind_wrexec(wave: Wave, inst: Instruction, machine) -> Step:
    function = _SAVEEXEC[inst.name.split("_")[1]]
    read, write = reader(wave, inst, "ssrc0", 64), writer(wave, inst, 64)

    def step():
        value = function(read(), wave.get64(EXEC)) & M64
        wave.set64(EXEC, value)
        write(value)
        wave.scc = int(value != 0)

    return step


_COMPARE = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
_COMPARE_TYPES = ("i32", "u32", "u64")


@binds(*(f"s_cmp_{c}_{t}" for c in _COMPARE for t in _COMPARE_TYPES if t != "u64" or c in ("eq", "lg")))
def _bind_compare(wave: Wave, inst: Instruction, machine) -> Step:
    _, _, name, kind = inst.name.split("_")
    function, bits = _COMPARE[name], int(kind[1:])
    a, b = reader(wave, inst, "ssrc0", bits), reader(wave, inst, "ssrc1", bits)
    if kind == "i32":

        def step():
            wave.scc = int(function(signed(a()), signed(b())))

    else:

        def step():
            wave.scc = int(function(a(), b()))

    return step


@binds(*(f"s_bitcmp{n}_b{bits}" for n in (0, 1) for bits in (32, 64)))
def _bind_bitcmp(wave: Wave, inst: Instruction, machine) -> Step:
    bits, wanted = int(inst.name[-2:]), int(inst.name[8])
    a, b = reader(wave, inst, "ssrc0", bits), reader(wave, inst, "ssrc1", 32)

    def step():
        wave.scc = int(a() >> (b() & (bits - 1)) & 1 == wanted)

    return step


@binds(*(f"s_cmpk_{c}_{t}" for c in _COMPARE for t in ("i32", "u32")))
def _bind_compare_constant(wave: Wave, inst: Instruction, machine) -> Step:
    _, _, name, kind = inst.name.split("_")
    function, code, raw, s = _COMPARE[name], inst.operand("sdst"), inst.get("simm16"), wave.s
    if kind == "i32":
        constant = signed(raw, 16)

        def step():
            wave.scc = int(function(signed(s[code]), constant))

    else:

        def step():
            wave.scc = int(function(s[code], raw))

    return step


@binds("s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32")
def _bind_with_constant(wave: Wave, inst: Instruction, machine) -> Step:
    code, constant = inst.operand("sdst"), signed(inst.get("simm16"), 16)
    name = inst.name

    def step():
        old = signed(wave.s[code])
        if name == "s_addk_i32":
            wave.scc = _overflows(old + constant)
            wave.set32(code, old + constant)
        elif name == "s_mulk_i32":
            wave.set32(code, old * constant)
        elif name == "s_movk_i32" or wave.scc:
            wave.set32(code, constant)

    return step


# ---- Hardware registers ----

MODE_REGISTER = 1
FP16_OVERFLOW_BIT = 23  # MODE.FP16_OVFL: conversions to fp16 and fp8 saturate


def _hardware_register(inst: Instruction) -> tuple[int, int, int]:
    raw = inst.get("simm16")
    return raw & 0x3F, raw >> 6 & 0x1F, (raw >> 11) + 1


@binds("s_setreg_b32", "s_setreg_imm32_b32")
def _bind_setreg(wave: Wave, inst: Instruction, machine) -> Step:
    register, offset, size = _hardware_register(inst)
    field = ((1 << size) - 1) << offset
    if inst.name == "s_setreg_imm32_b32":
        literal = inst.literal
        read = lambda: literal  # noqa: E731
    else:
        code = inst.operand("sdst")
        read = lambda: wave.s[code]  # noqa: E731

    def step():
        if register != MODE_REGISTER:
            return
        mode = wave.mode & ~field | read() << offset & field
        problem = unsupported_mode(mode)
        if not wave.flushes and mode & KEEPS_DENORMALS != KEEPS_DENORMALS:
            problem = f"denormal float32 numbers taken for zero from here on (MODE {mode:#x})"
        if problem:
            raise UnknownInstructionError(f"{machine.describe()}: no semantics yet for {problem}")
        wave.mode = mode

    return step


@binds("s_getreg_b32")
def _bind_getreg(wave: Wave, inst: Instruction, machine) -> Step:
    register, offset, size = _hardware_register(inst)
    write = writer(wave, inst, 32)

    def step():
        write((wave.mode if register == MODE_REGISTER else 0) >> offset & ((1 << size) - 1))

    return step


# ---- Control ----


@binds("s_nop", "s_waitcnt", "s_sleep", "s_setprio", "s_icache_inv", "s_wakeup", "s_sethalt", "s_sendmsg")
@binds("s_dcache_inv", "s_dcache_wb", "s_dcache_inv_vol", "s_dcache_wb_vol", "s_incperflevel", "s_decperflevel")
@binds("s_ttracedata", "s_set_valu_coexec_mode")
def _bind_nothing(wave: Wave, inst: Instruction, machine) -> Step:
    return lambda: None


@binds("s_endpgm")
def _bind_end(wave: Wave, inst: Instruction, machine) -> Step:
    return lambda: END


@binds("s_barrier")
def _bind_barrier(wave: Wave, inst: Instruction, machine) -> Step:
    return lambda: BARRIER


@binds("s_trap")
def _bind_trap(wave: Wave, inst: Instruction, machine) -> Step:
    def step():
        raise KernelFaultError(f"{machine.describe()} is a trap: an assertion of the kernel failed")

    return step


_CONDITIONS = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not wave.scc,
    "s_cbranch_scc1": lambda wave: wave.scc,
    "s_cbranch_vccz": lambda wave: not wave.get64(VCC),
    "s_cbranch_vccnz": lambda wave: wave.get64(VCC),
    "s_cbranch_execz": lambda wave: not wave.mask.any(),
    "s_cbranch_execnz": lambda wave: wave.mask.any(),
}


@binds(*_CONDITIONS)
def _bind_branch(wave: Wave, inst: Instruction, machine) -> Step:
    condition = _CONDITIONS[inst.name]
    target = machine.branch_target(inst, signed(inst.get("simm16"), 16))
    return lambda: target if condition(wave) else None


@binds("s_getpc_b64")
def _bind_getpc(wave: Wave, inst: Instruction, machine) -> Step:
    write, following = writer(wave, inst, 64), machine.code_address + inst.pc + inst.size
    return lambda: write(following)


@binds("s_setpc_b64", "s_swappc_b64")
def _bind_setpc(wave: Wave, inst: Instruction, machine) -> Step:
    read = reader(wave, inst, "ssrc0", 64)
    calls = inst.name == "s_swappc_b64"
    write = writer(wave, inst, 64) if calls else lambda value: None
    following = machine.code_address + inst.pc + inst.size

    def step():
        target = read()
        write(following)
        if calls:
            wave.called_from = inst.pc
        return machine.index_of(target)

    return step


@binds("s_call_b64")
def _bind_call(wave: Wave, inst: Instruction, machine) -> Step:
    write, following = writer(wave, inst, 64), machine.code_address + inst.pc + inst.size
    target = machine.branch_target(inst, signed(inst.get("simm16"), 16))

    def step():
        write(following)
        wave.called_from = inst.pc
        return target

    return step


@binds("s_memtime", "s_memrealtime")
def _bind_time(wave: Wave, inst: Instruction, machine) -> Step:
    code = inst.operand("sdata")
    return lambda: wave.set64(code, machine.executed())


# ---- Scalar memory ----


def _scalar_offset(wave: Wave, inst: Instruction):
    offset = signed(inst.get("offset") & 0x1FFFFF, 21) if inst.get("imm") else 0
    if inst.get("soffset_en"):
        code = inst.operand("soffset")
        return lambda: offset + wave.s[code]
    if not inst.get("imm"):
        code = inst.get("offset") & 0x7F
        return lambda: wave.s[code]
    return lambda: offset


@binds(*(f"s_load_dword{n}" for n in ("", "x2", "x4", "x8", "x16")))
def _bind_load(wave: Wave, inst: Instruction, machine) -> Step:
    count = int(inst.name.partition("dwordx")[2] or 1)
    destination, base = inst.operand("sdata"), inst.operand("sbase")
    offset, memory = _scalar_offset(wave, inst), machine.memory

    def step():
        address = np.array([(wave.get64(base) + offset()) & ~3 & M64], np.uint64).view(np.int64)
        words = memory.load(address, 4 * count, _SCALAR_LANE, 4).view(np.uint32)[0]
        for i, word in enumerate(words.tolist()):
            wave.set32(destination + i, word)

    return step


@binds(*(f"s_buffer_load_dword{n}" for n in ("", "x2", "x4", "x8", "x16")))
def _bind_buffer_load(wave: Wave, inst: Instruction, machine) -> Step:
    count = int(inst.name.partition("dwordx")[2] or 1)
    destination, base = inst.operand("sdata"), inst.operand("sbase")
    offset, memory = _scalar_offset(wave, inst), machine.memory

    def step():
        start, records = wave.get64(base) & (2**48 - 1), wave.s[base + 2]
        first = offset() & ~3
        if records == NO_SIZE and first + 4 * count > records and first != MASKED_OFFSET:
            memory.report_dropped("reads", start, np.array([first]), 4 * count, _SCALAR_LANE, np.ones(1, bool))
        for i in range(count):
            at = first + 4 * i
            word = 0
            if at + 4 <= records:
                word = int(memory.load(np.array([start + at]), 4, _SCALAR_LANE, 4).view(np.uint32)[0, 0])
            wave.set32(destination + i, word)

    return step
