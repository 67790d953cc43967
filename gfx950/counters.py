"""What a run did, in numbers: instructions, bytes, bank conflicts, matrix products; and the least time they allow."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gfx950.decode import Instruction

# Published rates of an MI355X. Source: AMD Instinct MI355X datasheet (memory, matrix, clock); CDNA4 white paper (LDS).
MEMORY_BYTES_PER_S = 8e12
CLOCK_HZ = 2.4e9
COMPUTE_UNITS = 256
LDS_BYTES_PER_CLOCK = 128  # per compute unit
# Floating-point operations per second of the whole device, dense, by the wider operand of the product.
MATRIX_FLOPS = {"f64": 78.6e12, "f32": 157.3e12, "bf16": 2.5e15, "f16": 2.5e15, "fp8": 5e15, "fp4": 10e15, "i8": 5e15}


@dataclass(frozen=True)
class BufferCounters:
    """Traffic with one argument: bytes as the instructions ask for them, and how many different bytes those are."""

    name: str
    size: int
    bytes_read: int
    distinct_bytes_read: int
    bytes_written: int
    distinct_bytes_written: int


@dataclass
class Counters:
    """Totals over the grid.

    instructions: executed instructions by class of work, one for each wave. mnemonics: the same by name.
    mfma: matrix instructions by name. buffers: one entry for each tensor argument, in order.
    global_bytes: distinct bytes read and distinct bytes written, what memory must move at least; arguments that overlap
    count once.
    lds_bank_conflicts: extra passes beyond one for each group of lanes that could fill the 64 banks once.
    """

    workgroups: int = 0
    waves: int = 0
    instructions: Counter = field(default_factory=Counter)
    mnemonics: Counter = field(default_factory=Counter)
    mfma: Counter = field(default_factory=Counter)
    buffers: list[BufferCounters] = field(default_factory=list)
    global_bytes: int = 0
    lds_bytes_read: int = 0
    lds_bytes_written: int = 0
    lds_bank_conflicts: int = 0
    matrix_flops: Counter = field(default_factory=Counter)

    def count(self, hits: Iterable[tuple[Instruction, int]]) -> None:
        """Add how often each instruction was executed."""
        for inst, times in hits:
            self.instructions[inst.category] += times
            self.mnemonics[inst.name] += times
            if inst.category == "matrix":
                self.mfma[inst.name] += times
                kind, flops = matrix_work(inst)
                self.matrix_flops[kind] += flops * times

    def computed_time(self) -> dict[str, float]:
        """Seconds that each published rate allows at best, all compute units busy. Computed, not measured."""
        return least_seconds(self.global_bytes, self.matrix_flops, self.lds_bytes_read + self.lds_bytes_written)


def least_seconds(memory_bytes: float, matrix_flops: Mapping[str, float], lds_bytes: float) -> dict[str, float]:
    """The least time that memory, matrix units and LDS need for that much work, each at its published rate."""
    return {
        "memory": memory_bytes / MEMORY_BYTES_PER_S,
        "matrix": sum(flops / MATRIX_FLOPS[kind] for kind, flops in matrix_flops.items()),
        "lds": lds_bytes / (LDS_BYTES_PER_CLOCK * CLOCK_HZ * COMPUTE_UNITS),
    }


def matrix_work(inst: Instruction) -> tuple[str, int]:
    """The kind of operand whose rate applies, and the floating-point operations of one instruction."""
    shape = next(part for part in inst.name.split("_") if part.count("x") == 2)
    m, n, k = (int(x) for x in shape.split("x"))
    tail = inst.name.split(shape + "_")[1]
    if tail == "f8f6f4":
        kind = "fp4" if inst.get("cbsz") == inst.get("blgp") == 4 else "fp8"
    else:
        kind = tail.split("_")[-1].replace("bf8", "fp8")
    return kind, 2 * m * n * k
