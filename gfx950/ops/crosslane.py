"""Values that move between lanes, and between a lane and the scalar registers.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 6 (readlane, permlane) and 11 (LDS permutes).
"""

from collections.abc import Callable

import numpy as np

from gfx950.decode import Instruction
from gfx950.findings import UnknownInstructionError
from gfx950.ops import Step, binds
from gfx950.ops.operands import plain_source, quad_lanes, row_of, source, store_row
from gfx950.ops.scalar import inline
from gfx950.wave import LANE, LANES, Wave, mask_of

U32 = np.uint32
_BELOW_LOW = [mask_of((1 << min(lane, 32)) - 1)[:32] for lane in range(LANES)]
_BELOW_HIGH = [mask_of((1 << max(lane - 32, 0)) - 1)[:32] for lane in range(LANES)]


def _only(lane: int) -> np.ndarray:
    return np.equal(LANE, lane)


def _lane_select(wave: Wave, inst: Instruction) -> Callable[[], int]:
    if inst.name == "v_readfirstlane_b32":
        return lambda: int(wave.mask.argmax())
    code = inst.operand("src1")
    constant = inline(code, 32)
    return (lambda: constant & 63) if constant is not None else (lambda: wave.s[code] & 63)


@binds("v_readfirstlane_b32", "v_readlane_b32")
def _bind_readlane(wave: Wave, inst: Instruction, machine) -> Step:
    read, code, select = source(wave, inst, 0, "u32"), inst.operand("vdst"), _lane_select(wave, inst)
    # In the short encoding the destination field is 8 bits of a scalar register's number.
    target = code - 256 if code >= 256 else code

    def step():
        lane = select()
        wave.require(list(read.rows), "a value read into a scalar register", _only(lane))
        wave.set32(target, int(np.broadcast_to(read.read(), LANES)[lane]))

    return step


@binds("v_writelane_b32")
def _bind_writelane(wave: Wave, inst: Instruction, machine) -> Step:
    read = plain_source(wave, inst, inst.operand("src0"), "u32")
    row, select = row_of(inst.operand("vdst")), _lane_select(wave, inst)

    def step():
        lane = select()
        wave.vgpr[row, lane] = read.read()[0]
        wave.define(row, _only(lane))

    return step


def _counts_below(wave: Wave, inst: Instruction, below: list[np.ndarray]) -> Step:
    mask, start = source(wave, inst, 0, "u32"), source(wave, inst, 1, "u32")
    row = row_of(inst.operand("vdst"))
    store = store_row(wave, row)
    weights = np.array(below).astype(U32)

    def step():
        bits = np.broadcast_to(mask.read(), LANES)[:, None] >> np.arange(32, dtype=U32) & U32(1)
        store((bits * weights).sum(axis=1).astype(U32) + start.read(), wave.write_mask)
        wave.propagate([*mask.rows, *start.rows], [row])

    return step


@binds("v_mbcnt_lo_u32_b32")
def _bind_mbcnt_low(wave: Wave, inst: Instruction, machine) -> Step:
    return _counts_below(wave, inst, _BELOW_LOW)


@binds("v_mbcnt_hi_u32_b32")
def _bind_mbcnt_high(wave: Wave, inst: Instruction, machine) -> Step:
    return _counts_below(wave, inst, _BELOW_HIGH)


@binds("v_permlane16_swap_b32", "v_permlane32_swap_b32")
def _bind_permlane_swap(wave: Wave, inst: Instruction, machine) -> Step:
    """In each group of 2n lanes, the lower half of src0 and the upper half of vdst trade places; EXEC is ignored."""
    n = 16 if "16" in inst.name else 32
    first, second = row_of(inst.operand("src0")), row_of(inst.operand("vdst"))
    lower = LANE[LANE & n == 0]
    upper = lower + n

    def step():
        a, b = wave.vgpr[first], wave.vgpr[second]
        a[lower], b[upper] = b[upper], a[lower]
        defined_a, defined_b = wave.lanes_defined([first]), wave.lanes_defined([second])
        if defined_a is None and defined_b is None:
            return
        everywhere = np.ones(LANES, bool)
        defined_a = everywhere.copy() if defined_a is None else defined_a
        defined_b = everywhere.copy() if defined_b is None else defined_b
        defined_a[lower], defined_b[upper] = defined_b[upper], defined_a[lower]
        wave.set_defined(first, defined_a, everywhere)
        wave.set_defined(second, defined_b, everywhere)

    return step


@binds("ds_bpermute_b32", "ds_permute_b32")
def _bind_permute(wave: Wave, inst: Instruction, machine) -> Step:
    address, data, target = (row_of(inst.operand(field)) for field in ("addr", "data0", "vdst"))
    offset = inst.lds_offset
    store = store_row(wave, target)

    def step():
        wave.require([address], "a lane number")
        lanes = (wave.vgpr[address].astype(np.int64) + offset >> 2) & 63
        known = wave.lanes_defined([data])
        known = np.ones(LANES, bool) if known is None else known
        out, defined = np.zeros(LANES, U32), np.ones(LANES, bool)
        if inst.name == "ds_bpermute_b32":
            out = np.where(wave.mask[lanes], wave.vgpr[data][lanes], U32(0))
            defined = np.where(wave.mask[lanes], known[lanes], True)
        else:
            active = np.nonzero(wave.mask)[0]
            out[lanes[active]] = wave.vgpr[data][active]
            defined[lanes[active]] = known[active]
        store(out, wave.write_mask)
        wave.set_defined(target, None if defined.all() else defined)

    return step


def swizzle_lanes(pattern: int) -> np.ndarray:
    """The lane that each lane reads under ds_swizzle's offset: a quad permutation, or and/or/xor of 5 bits."""
    if pattern & 0x8000:
        if pattern >> 8 != 0x80:
            raise UnknownInstructionError(f"the lane pattern swizzle {pattern:#x}")
        return quad_lanes(pattern)
    keep, set_, flip = pattern & 31, pattern >> 5 & 31, pattern >> 10 & 31
    return LANE & 32 | ((LANE & 31 & keep | set_) ^ flip)


@binds("ds_swizzle_b32")
def _bind_swizzle(wave: Wave, inst: Instruction, machine) -> Step:
    data, target = row_of(inst.operand("addr")), row_of(inst.operand("vdst"))
    lanes = swizzle_lanes(inst.lds_offset)
    store = store_row(wave, target)

    def step():
        known = wave.lanes_defined([data])
        out = np.where(wave.mask[lanes], wave.vgpr[data][lanes], U32(0))
        store(out, wave.write_mask)
        wave.set_defined(target, None if known is None else known[lanes] | ~wave.mask[lanes])

    return step
