"""Number formats in exact arithmetic, one value at a time: what the interpreter's numpy code is compared with.

A float of at most 64 bits is a Python float; what is exact but too wide for one is a Fraction.
"""

import itertools
import math
import random
from dataclasses import dataclass
from fractions import Fraction

Number = int | float | Fraction


@dataclass(frozen=True)
class Format:
    """Floating point: sign, exponent, `mantissa` bits. infinities: the top exponent means infinity and NaN; without
    them, only the top code is a NaN (nan=True), or nothing is, and what is too large becomes the largest."""

    bits: int
    mantissa: int
    infinities: bool = True
    nan: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.bits - self.mantissa - 2)) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        """The code past the largest number."""
        if self.infinities:
            return self.sign - (1 << self.mantissa)
        return self.sign - 1 if self.nan else self.sign

    @property
    def quiet_nan(self) -> int:
        return self.infinity + (1 << (self.mantissa - 1)) if self.infinities else self.infinity

    @property
    def largest(self) -> float:
        return self.decode(self.infinity - 1)

    @property
    def tiny(self) -> Fraction:
        """The smallest normal number."""
        return Fraction(2) ** (1 - self.bias)

    def is_nan(self, code: int) -> bool:
        size = code & (self.sign - 1)
        return size > self.infinity if self.infinities else self.nan and size == self.infinity

    def decode(self, code: int) -> float:
        size, sign = code & (self.sign - 1), -1.0 if code & self.sign else 1.0
        if self.is_nan(code):
            return math.nan
        if self.infinities and size == self.infinity:
            return sign * math.inf
        exponent, fraction = size >> self.mantissa, size & ((1 << self.mantissa) - 1)
        if exponent == 0:
            return sign * math.ldexp(fraction, 1 - self.bias - self.mantissa)
        return sign * math.ldexp(fraction | 1 << self.mantissa, exponent - self.bias - self.mantissa)

    def encode(self, x: Number, *, toward_zero: bool = False, saturate: bool = False) -> int:
        """The code of x, rounded once: to nearest even, or toward zero."""
        if x != x:
            return self.quiet_nan
        sign = self.sign if x < 0 or (x == 0 and math.copysign(1, x) < 0) else 0
        if x in (math.inf, -math.inf):
            return sign | (self.infinity - (saturate or not (self.infinities or self.nan)))
        size = abs(Fraction(x))
        exponent = max(_floor_log2(size), 1 - self.bias)
        steps = size / Fraction(2) ** (exponent - self.mantissa)
        whole, rest = divmod(steps.numerator, steps.denominator)
        if not toward_zero and 2 * rest + (whole & 1) > steps.denominator:
            whole += 1
        code = ((exponent + self.bias - 1) << self.mantissa) + whole
        largest = self.infinity - (toward_zero or saturate or not (self.infinities or self.nan))
        return sign | min(code, largest)


def _floor_log2(x: Fraction) -> int:
    if x == 0:
        return -(1 << 20)
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if x >= Fraction(2) ** guess else guess - 1


F64, F32, F16, BF16 = Format(64, 52), Format(32, 23), Format(16, 10), Format(16, 7)
FP8, BF8, FP4 = Format(8, 3, infinities=False), Format(8, 2), Format(4, 1, infinities=False, nan=False)
FLOATS = {"f64": F64, "f32": F32, "f16": F16, "bf16": BF16, "fp8": FP8, "bf8": BF8, "fp4": FP4}


def width(kind: str) -> int:
    """The bits of an operand: u32, i16, f64, …"""
    return FLOATS[kind].bits if kind in FLOATS else int(kind[1:])


def value_of(kind: str, code: int) -> Number:
    """The number that these bits are in an operand of this kind."""
    code &= (1 << width(kind)) - 1
    if kind in FLOATS:
        return FLOATS[kind].decode(code)
    return signed(code, width(kind)) if kind[0] == "i" else code


def bits_of(kind: str, x: Number) -> int:
    """The bits of a result: a float rounded to the format, an integer modulo 2^bits."""
    return FLOATS[kind].encode(x) if kind in FLOATS else x & ((1 << width(kind)) - 1)


def same(kind: str, ours: int, theirs: int) -> bool:
    """Equal bits, but for which NaN a NaN is."""
    return ours == theirs or (kind in FLOATS and FLOATS[kind].is_nan(ours) and FLOATS[kind].is_nan(theirs))


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def clip(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


# ---- Arithmetic ----


def fma(a: float, b: float, c: float) -> Number:
    """a × b + c exactly, as a Fraction; as a float where the result is a zero, an infinity or NaN."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return exact
    product_negative = math.copysign(1, a) * math.copysign(1, b) < 0
    all_zero = c == 0 and (a == 0 or b == 0)
    return -0.0 if all_zero and product_negative and math.copysign(1, c) < 0 else 0.0


def minimum(a: float, b: float) -> float:
    """Of a number and NaN the number; −0 is below +0."""
    if a != a or b != b:
        return b if a != a else a
    return min(a, b, key=lambda x: (x, math.copysign(1, x)))


def maximum(a: float, b: float) -> float:
    if a != a or b != b:
        return b if a != a else a
    return max(a, b, key=lambda x: (x, math.copysign(1, x)))


def to_integer(x: float, low: int, high: int, rounding=math.trunc) -> int:
    """A conversion: NaN gives 0, what is out of range the nearest bound."""
    if x != x:
        return 0
    return clip(rounding(x), low, high) if math.isfinite(x) else low if x < 0 else high


def divide(a: float, b: float) -> Number:
    """a ÷ b exactly."""
    if a != a or b != b or (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
        return math.nan
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isinf(a) or b == 0:
        return sign * math.inf
    if math.isinf(b) or a == 0:
        return sign * 0.0
    return Fraction(a) / Fraction(b)


# ---- Inputs ----


def edges(kind: str) -> list[int]:
    """The bits of values at which instructions go wrong."""
    bits = width(kind)
    top = 1 << (bits - 1)
    if kind not in FLOATS:
        places = {0, 1, 2, 3, bits // 2 - 1, bits // 2, bits - 2, bits - 1, bits, bits + 1}
        return sorted({*places, *((1 << p) & (2 * top - 1) for p in places), top, top - 1, 2 * top - 1, 2 * top - 2})
    f = FLOATS[kind]
    one, half = f.encode(1.0), f.encode(0.5)
    sizes = [0, 1, 2, (1 << f.mantissa) - 1, 1 << f.mantissa, (1 << f.mantissa) + 1, half - 1, half, half + 1]
    sizes += [one - 1, one, one + 1, f.encode(1.5), f.encode(2.5), f.encode(3.0), f.encode(100.25)]
    sizes += [f.infinity - 2, f.infinity - 1, f.infinity, f.quiet_nan]
    return [size | sign for size in sizes for sign in (0, top)]


def draw(kind: str, rng: random.Random) -> int:
    """The bits of an edge, of anything at all, or of a number of ordinary size."""
    choice = rng.random()
    if choice < 0.35:
        return rng.choice(edges(kind))
    code = rng.getrandbits(width(kind))
    if kind in FLOATS:
        if choice < 0.75:
            return FLOATS[kind].encode(rng.choice((-1, 1)) * 2.0 ** rng.uniform(-8, 8))
        # A signalling NaN is made quiet: what one does depends on a mode.
        return FLOATS[kind].quiet_nan if FLOATS[kind].is_nan(code) else code
    return code >> rng.randrange(width(kind)) if choice < 0.6 else code


def samples(kinds: list[str] | tuple[str, ...], count: int, seed: object) -> list[tuple[int, ...]]:
    """`count` tuples of operands' bits: of one operand, each edge; of floats, zeros and NaN in all combinations."""
    rng = random.Random(str(seed))
    chosen = [tuple(draw(kind, rng) for kind in kinds) for _ in range(count)]
    if len(kinds) == 1:
        first = [(code,) for code in edges(kinds[0])]
    elif all(kind in FLOATS for kind in kinds):
        first = list(itertools.product(*((0, f.sign, f.encode(1.0), f.quiet_nan) for f in map(FLOATS.get, kinds))))
    else:
        first = []
    return [*first, *chosen][:count]


def ulps(kind: str, ours: int, exact: float) -> float:
    """How far a result is from an exact one, in steps of its format."""
    f = FLOATS[kind]
    if f.is_nan(ours) or exact != exact or math.isinf(exact) or math.isinf(f.decode(ours)):
        return 0.0 if same(kind, ours, f.encode(exact)) else math.inf
    step = Fraction(2) ** (max(_floor_log2(abs(Fraction(exact))), 1 - f.bias) - f.mantissa)
    return float(abs(Fraction(f.decode(ours)) - Fraction(exact)) / step)
