"""What every check takes and gives: how much to try, and what was found; and the tolerances that several share."""

import math
from dataclasses import dataclass, field

from bench.worker.subject import Shape
from reference import relative_l2
from task import output_t

QUICK_TOKENS = 300_000  # --quick leaves out larger shapes
# A shape of at most this many tokens is called many times over, with --quick and without.
REPEATED_TOKENS = {True: 40_000, False: QUICK_TOKENS}
STILL = 0.002  # relative L2 by which an output may move without a reason: a kernel that is not deterministic
HEAD = 2  # times gate A's budget: how far one head of a sequence may be off


@dataclass(frozen=True)
class Scope:
    """How much to try: shapes, the seed all data follows from, --quick, and the table whose plans are run."""

    shapes: tuple[Shape, ...]
    seed: int
    quick: bool = False
    table: str | None = None

    @property
    def small(self) -> list[Shape]:
        """The shapes that are cheap to repeat; the smallest if none is."""
        fitting = [shape for shape in self.shapes if math.prod(shape) <= REPEATED_TOKENS[self.quick]]
        return fitting or [min(self.shapes, key=math.prod)]

    @property
    def large(self) -> list[Shape]:
        """The other shapes: what is repeated is tried on them once."""
        return [shape for shape in self.shapes if shape not in self.small]

    @property
    def some_large(self) -> list[Shape]:
        """With --quick the smallest of them."""
        return sorted(self.large, key=math.prod)[:1] if self.quick else self.large


@dataclass
class Outcome:
    """What a check found: a sentence for each fault, and a note of what was tried and seen."""

    findings: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.findings


def differs(output: output_t, clean: output_t) -> bool:
    """Whether an output is another one than `clean`; NaN is."""
    return not relative_l2(output, clean.float()).max().item() <= STILL
