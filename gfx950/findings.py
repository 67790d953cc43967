"""What the sanitizer reports, and the errors that end a run."""

from collections.abc import Callable
from dataclasses import dataclass, field

OUT_OF_BOUNDS = "out-of-bounds"
UNINITIALISED = "uninitialised"
RACE = "race"
MISALIGNED = "misaligned"
KINDS = (OUT_OF_BOUNDS, UNINITIALISED, RACE, MISALIGNED)


class Gfx950Error(Exception):
    """Anything that keeps gfx950 from running a kernel."""


class CodeObjectError(Gfx950Error, ValueError):
    """A file that holds no kernel this machine can run, or arguments that do not fit it."""


class UnknownInstructionError(Gfx950Error):
    """An instruction without semantics here; the message names it, its address and the kernel."""


class KernelFaultError(Gfx950Error):
    """The kernel can't go on: a jump out of its code, an endless loop, a barrier that is never complete."""


@dataclass(frozen=True)
class Place:
    """Where in a run something happened."""

    instruction: str
    pc: int  # bytes from the start of the code section
    workgroup: tuple[int, int, int]
    wave: int
    source: str | None  # "file:line" where the line table has it

    def __str__(self) -> str:
        source = f", {self.source}" if self.source else ""
        return f"{self.instruction} at {self.pc:#x}{source}, workgroup {self.workgroup}, wave {self.wave}"


@dataclass
class Finding:
    """One fault of the kernel, at the first place it showed; `count` is how often the same instruction showed it.

    lane: the first lane concerned, None for a scalar access. address: the byte address in global memory or in LDS,
    None for a register.
    """

    kind: str
    message: str
    instruction: str
    pc: int
    workgroup: tuple[int, int, int]
    wave: int
    lane: int | None = None
    address: int | None = None
    source: str | None = None
    count: int = 1

    def __str__(self) -> str:
        place = Place(self.instruction, self.pc, self.workgroup, self.wave, self.source)
        lane = f", lane {self.lane}" if self.lane is not None else ""
        again = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.message}; {place}{lane}{again}"


@dataclass
class Findings:
    """Collects findings, one for each kind and instruction. `where` tells where the run stands."""

    where: Callable[[], Place]
    _found: dict[tuple[str, int], Finding] = field(default_factory=dict)

    def report(self, kind: str, message: str, lane: int | None = None, address: int | None = None) -> None:
        place = self.where()
        seen = self._found.get((kind, place.pc))
        if seen is not None:
            seen.count += 1
            return
        self._found[kind, place.pc] = Finding(kind, message, **vars(place), lane=lane, address=address)

    def list(self) -> list[Finding]:
        return list(self._found.values())
