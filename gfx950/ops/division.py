"""The three instructions that frame a division: scaling, the last multiply-add, and the special cases.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 12 (VOP3), where a division made of them comes out right.
"""

import numpy as np

from gfx950.decode import VCC, Instruction
from gfx950.ops import Step, binds
from gfx950.ops.arithmetic import U32, U64, exact_fma32, fma64
from gfx950.ops.operands import DTYPES, source
from gfx950.ops.vector import apply, mask_writer
from gfx950.wave import Wave, mask_of


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
    """Scales a denominator or numerator (whichever src0 repeats) so that the steps of a division stay in range.

    A denominator whose inverse is denormal is scaled down also where the quotient is denormal, and the quotient scaled
    back by v_div_fmas. (The ISA document scales it up there, to infinity; division would come out wrong.)
    """
    kind = inst.name[-3:]
    power, spread, small = _DIVISION[kind]
    operands = [source(wave, inst, i, kind) for i in range(3)]
    put = mask_writer(wave, inst)
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
        up, down = np.ldexp(value, power), np.ldexp(value, -power)
        scaled = np.select(
            [zero, far, denormal, both, inverse_denormal, ratio_denormal, high <= small],
            [
                np.full(64, np.nan, value.dtype),
                np.where(same_low, up, value),
                up,
                np.where(same_low, down, value),
                down,
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

    def function(a, b, c):
        back = np.where(_exponent(c, kind) > bias, power, -power)
        exponent = np.where(mask_of(wave.get64(VCC)), back, 0)
        if kind == "f64":
            return fma64(a, b, c, exponent)
        return np.ldexp(exact_fma32(a, b, c), exponent).astype(np.float32)  # rounded once, after it is scaled

    return apply(wave, inst, kind, [source(wave, inst, i, kind) for i in range(3)], function)


@binds("v_div_fixup_f32", "v_div_fixup_f64", "v_div_fixup_f16")
def _bind_div_fixup(wave: Wave, inst: Instruction, machine) -> Step:
    """The quotient where the steps of a division get it wrong: zeros, infinities, NaN, and far out of range."""
    kind = inst.name[-3:]
    vanishing, overflowing = {"f16": (-26, 17), "f32": (-150, 129), "f64": (-1075, 1025)}[kind]

    def function(quotient, denominator, numerator):
        negative = np.signbit(denominator) != np.signbit(numerator)
        nan = np.isnan(denominator) | np.isnan(numerator)
        zeros = (denominator == 0) & (numerator == 0)
        infinities = np.isinf(denominator) & np.isinf(numerator)
        gap = np.frexp(numerator)[1].astype(np.int64) - np.frexp(denominator)[1]
        far = (gap > overflowing) & ~np.isinf(denominator) & (numerator != 0)
        infinite = (denominator == 0) | np.isinf(numerator) | far
        zero = np.isinf(denominator) | (numerator == 0) | (gap < vanishing)
        size = np.select([nan | zeros | infinities, infinite, zero], [np.nan, np.inf, 0.0], np.abs(quotient))
        return np.where(negative, -size, size).astype(quotient.dtype)

    return apply(wave, inst, kind, [source(wave, inst, i, kind) for i in range(3)], function)
