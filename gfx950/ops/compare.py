"""Vector comparisons (VOPC): lanes to the bits of a scalar register pair, and to EXEC in the v_cmpx forms.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 12 (VOPC).
"""

from collections.abc import Callable

import numpy as np

from gfx950.decode import EXEC, Instruction
from gfx950.ops import Step, binds
from gfx950.ops.arithmetic import U32
from gfx950.ops.operands import DTYPES, in_mode, source
from gfx950.ops.vector import mask_writer
from gfx950.wave import Wave, bits_of

_FLOAT_TESTS = {
    "f": lambda a, b: np.zeros(1, bool),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda a, b: np.ones(1, bool),
}
_INTEGER_TESTS = {
    "f": lambda a, b: np.zeros(1, bool),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "t": lambda a, b: np.ones(1, bool),
}
_TESTS = {f"{test}_{kind}": (kind, f) for kind in ("f16", "f32", "f64") for test, f in _FLOAT_TESTS.items()} | {
    f"{test}_{sign}{bits}": (f"{sign}{bits}", f)
    for sign in "iu"
    for bits in (16, 32, 64)
    for test, f in _INTEGER_TESTS.items()
}


def _bind_test(wave: Wave, inst: Instruction, kinds: tuple[str, str], function: Callable) -> Step:
    a, b = source(wave, inst, 0, kinds[0]), source(wave, inst, 1, kinds[1])
    put, rows = mask_writer(wave, inst), [*a.rows, *b.rows]
    narrows = inst.name.startswith("v_cmpx")

    def step():
        wave.require(rows, "a comparison")
        lanes = np.broadcast_to(function(a.read(), b.read()), 64) & wave.mask
        put(lanes)
        if narrows:
            wave.set64(EXEC, bits_of(lanes))

    return step


@binds(*(f"v_cmp{x}_{name}" for x in ("", "x") for name in _TESTS))
def _bind_compare(wave: Wave, inst: Instruction, machine) -> Step:
    kind, function = _TESTS[inst.name.split("_", 2)[2]]
    return _bind_test(wave, inst, (kind, kind), in_mode(wave, function, (kind, kind), "mask"))


def _class_test(kind: str) -> Callable:
    tiny = np.finfo(DTYPES[kind]).tiny
    quiet = {"f16": 0x0200, "f32": 0x00400000, "f64": 0x0008000000000000}[kind]
    unsigned = DTYPES["u" + kind[1:]]

    def test(x, wanted):
        size, negative = np.abs(x), np.signbit(x)
        nan, infinite = np.isnan(x), np.isinf(x)
        denormal, zero = (size < tiny) & (size > 0), size == 0
        normal = ~(nan | infinite | denormal | zero)
        is_quiet = x.view(unsigned) & unsigned.type(quiet) != 0
        classes = [nan & ~is_quiet, nan & is_quiet]
        classes += [kind_ & negative for kind_ in (infinite, normal, denormal, zero)]
        classes += [kind_ & ~negative for kind_ in (zero, denormal, normal, infinite)]
        return np.any([members & (wanted >> U32(i) & U32(1) != 0) for i, members in enumerate(classes)], axis=0)

    return test


@binds(*(f"v_cmp{x}_class_{kind}" for x in ("", "x") for kind in ("f16", "f32", "f64")))
def _bind_class(wave: Wave, inst: Instruction, machine) -> Step:
    kind = inst.name[-3:]
    return _bind_test(wave, inst, (kind, "u32"), _class_test(kind))
