"""What each instruction does. A binder takes a wave and an instruction and returns the function that executes it.

A step returns None to go on with the next instruction, an instruction index to jump to, or BARRIER or END.
Binding happens once for each wave slot and instruction, so that a step only computes.
"""

import importlib
from collections.abc import Callable

from gfx950.decode import Instruction
from gfx950.wave import Wave

BARRIER, END = -1, -2

Step = Callable[[], int | None]
Binder = Callable[[Wave, Instruction, "object"], Step]

BINDERS: dict[str, Binder] = {}

_MODULES = ("scalar", "vector", "compare", "division", "packed", "convert", "crosslane", "matrix", "memory")


def load_all() -> None:
    """Fill BINDERS."""
    for name in _MODULES:
        importlib.import_module(f"gfx950.ops.{name}")


def binds(*names: str) -> Callable[[Binder], Binder]:
    """Register a binder for these mnemonics (without encoding suffix)."""

    def register(binder: Binder) -> Binder:
        for name in names:
            if name in BINDERS:
                raise ValueError(f"{name} is defined twice")
            BINDERS[name] = binder
        return binder

    return register
