"""Vector arithmetic (VOP1, VOP2, VOP3) on 64 lanes: steps for the table in arithmetic.py, and what it cannot hold.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 12 (VOP encodings).
"""

from collections.abc import Callable

import numpy as np

from gfx950.decode import VCC, Instruction
from gfx950.findings import UnknownInstructionError
from gfx950.ops import Step, binds
from gfx950.ops.arithmetic import PURE, SATURATES, U32, fma16, fma32, fma64, saturating
from gfx950.ops.operands import (
    DTYPES,
    FLOATS,
    Source,
    constant_bits,
    destination,
    half_of,
    in_mode,
    plain_source,
    row_of,
    source,
    store_row,
)
from gfx950.wave import Wave, bits_of, mask_of


@binds(*PURE)
def _bind_pure(wave: Wave, inst: Instruction, machine) -> Step:
    pure = PURE[inst.name]
    function = pure.function
    if inst.get("clmp") and not {pure.result, *pure.sources} & {*FLOATS}:
        if inst.name not in SATURATES:
            raise UnknownInstructionError(f"{inst.text}: a clamp")
        exact, dtype = SATURATES[inst.name]
        clip = saturating(dtype)
        function = lambda *operands: clip(exact(*operands))  # noqa: E731
    function = in_mode(wave, function, pure.sources, pure.result)
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
    if inst.name in _HALVES_APART:
        return _apply_apart(wave, inst.name, sources, function, target)
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


# 64-bit results of which one half does not depend on the other half of the 64-bit sources: compilers leave that half
# undefined where they need but one. The low half, the high half, or each only on its own.
_HALVES_APART = {
    "v_mad_u64_u32": "low",
    "v_mad_i64_i32": "low",
    "v_lshl_add_u64": "low",
    "v_lshlrev_b64": "low",
    "v_lshrrev_b64": "high",
    "v_ashrrev_i64": "high",
    "v_mov_b64": "each",
}


def _apply_apart(wave: Wave, name: str, sources: list[Source], function: Callable, target) -> Step:
    """As `apply`, for a 64-bit result whose halves are defined apart."""
    rule, reads = _HALVES_APART[name], [s.read for s in sources]
    everything = [row for s in sources for row in s.rows]
    without_high = [row for s in sources for row in s.rows[:1]]
    without_low = [row for s in sources for row in (s.rows[1:] or s.rows)]
    low_rows = without_high if rule in ("low", "each") else everything
    high_rows = without_low if rule in ("high", "each") else everything
    low, high = target.rows

    def step():
        value = function(*(read() for read in reads))
        defined_low, defined_high = wave.lanes_defined(low_rows), wave.lanes_defined(high_rows)
        target.write(value)
        wave.set_defined(low, defined_low)
        wave.set_defined(high, defined_high)

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
        store(read.read(), wave.write_mask)
        wave.propagate(list(read.rows), [target])

    return step


@binds("v_swap_b32")
def _bind_swap(wave: Wave, inst: Instruction, machine) -> Step:
    a, b = row_of(inst.operand("vdst")), row_of(inst.operand("src0"))
    first, second = store_row(wave, a), store_row(wave, b)

    def step():
        old, lanes = wave.vgpr[a].copy(), wave.write_mask
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
    return apply(wave, inst, kind, [a, b, c], in_mode(wave, function, [kind] * 3, kind))


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
    function = fma32 if kind == "f32" else lambda x, y, z: x * y + z
    return apply(wave, inst, kind, operands, in_mode(wave, function, [kind] * 3, kind))


# ---- Carries, and wide multiplication ----


def mask_writer(wave: Wave, inst: Instruction) -> Callable[[np.ndarray], None]:
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
    target, put = destination(wave, inst, "u32"), mask_writer(wave, inst)
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
    put = mask_writer(wave, inst)
    dtype = DTYPES[wide]

    def function(a, b, c):
        product = a.astype(dtype) * b.astype(dtype)
        total = product + c
        # The carry is bit 64 of the 65-bit sum: unsigned it is an overflow, signed the sum's sign.
        wraps = total < product
        put(np.broadcast_to(wraps != ((c < 0) != (total < 0)) if signed_ else wraps, 64))
        return total

    return apply(wave, inst, wide, operands, function)


# ---- Any function of three bits ----


@binds("v_bitop3_b32", "v_bitop3_b16")
def _bind_bitop3(wave: Wave, inst: Instruction, machine) -> Step:
    """Bit i of the truth table is the result for (a, b, c) = the bits of i."""
    table = truth_table(inst)
    kind = "u" + inst.name[-2:]
    reads = [plain_source(wave, inst, inst.operand(f"src{i}"), kind, half_of(inst, i, kind)) for i in range(3)]

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
