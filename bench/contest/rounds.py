"""One shape of `mla compare`: several contestants called in turn on the same fresh data, timed and checked.

Each round draws new data and calls every contestant once, starting with another one than the round before, so that
whatever changes on the machine changes for all. The first round is not timed. Its outputs are checked, and the last
round's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.contest.peers import Bind, Start
from bench.worker.protocol import SEED_STEP
from bench.worker.timing import Clock
from reference import PRECISIONS, exact_attention, generate_input, relative_l2, worst_of
from submission import Plan
from task import TestSpec, input_t, output_t

OURS, PEER = "ours", "peer"
Report = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Contestant:
    """What is timed on a shape.

    name: its row in the table of results, the same for all shapes; the plans of a space share one. kind: OURS or PEER.
    precision: what it reads, a key of PRECISIONS. version: of the package it comes in. start: see peers.py. plan,
    table: for one of ours, its plan and the table that names it. may_fail: whether it is one of a space of plans, some
    of which cannot run.
    """

    name: str
    kind: str
    precision: str
    version: str
    start: Start
    table: str | None = None
    plan: Plan | None = None
    may_fail: bool = False

    @property
    def cache(self) -> str:
        return PRECISIONS[self.precision].cache


@dataclass
class Result:
    """What a contestant has shown on a shape: nanoseconds of each timed call; relative L2 of the worst sequence against
    attention over what it reads (gate A) and over the bf16 cache (gate B); and the error that ended it."""

    args: TestSpec
    contestant: Contestant
    times_ns: list[float] = field(default_factory=list)
    gate_a: float | None = None
    gate_b: float | None = None
    error: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(batch size, KV length)."""
        return self.args["batchsize"], self.args["kvseqlen"]

    @property
    def median_ns(self) -> float | None:
        return self.percentile_ns(50)

    def percentile_ns(self, percent: float) -> float | None:
        """None where an error ended it."""
        return None if self.error or not self.times_ns else float(np.percentile(self.times_ns, percent))

    @property
    def fault(self) -> str | None:
        """Why its time does not count: its error, or a gate that it missed. Peers are held to gate B alone, since how
        they round on the way is their own choice."""
        if self.error:
            return self.error
        budget = PRECISIONS[self.contestant.precision]
        if self.contestant.kind == OURS and not self.gate_a <= budget.kernel_budget:
            return f"gate A: {self.gate_a:.4g}, budget {budget.kernel_budget}"
        if not self.gate_b <= budget.format_budget:
            return f"gate B: {self.gate_b:.4g}, budget {budget.format_budget}"
        return None


def hold(
    contestants: Sequence[Contestant],
    args: TestSpec,
    rounds: int,
    clock: Clock,
    device: torch.device,
    report: Report,
) -> list[Result]:
    """Time `rounds` calls of each contestant on a shape; one result for each, in their order. What a contestant raises
    is kept in its result, and ends its part alone."""
    entrants = [_Entrant(contestant, args) for contestant in contestants]
    for number in range(rounds + 1):
        report("drawing data and timing", number / (rounds + 1))
        try:
            data = generate_input(**{**args, "seed": args["seed"] + number * SEED_STEP}, device=device)
        except Exception as error:  # nobody's fault, or that of a contestant that broke the device
            for entrant in entrants:
                entrant.fail(error, "drawing the data: ")
            break
        if number == 0:
            for entrant in entrants:
                entrant.start(data)
        first = number % max(1, len(entrants))
        outputs = [
            (entrant, entrant.call(data, clock, timed=number > 0))
            for entrant in entrants[first:] + entrants[:first]
            if entrant.result.error is None
        ]
        if number in (0, rounds):
            _check(data, outputs, report)
        del data, outputs
    return [entrant.result for entrant in entrants]


class _Entrant:
    """A contestant that takes part: what it has started, and its result so far."""

    def __init__(self, contestant: Contestant, args: TestSpec):
        self.result = Result(args, contestant)
        self._bind: Bind | None = None

    def fail(self, error: BaseException, where: str = "") -> None:
        if self.result.error is None:
            first_line = next(iter(str(error).splitlines()), "")
            self.result.error = f"{where}{type(error).__name__}: {first_line}"

    def start(self, data: input_t) -> None:
        try:
            self._bind = self.result.contestant.start(data)
        except (Exception, SystemExit) as error:
            self.fail(error)

    def call(self, data: input_t, clock: Clock, *, timed: bool) -> output_t | None:
        """The output, None if it failed."""
        try:
            output, nanoseconds = clock.time(self._bind(data), data)
            if not isinstance(output, torch.Tensor):
                raise TypeError(f"it returned {type(output).__name__}, expected a tensor")
        except (Exception, SystemExit) as error:
            self.fail(error)
            return None
        if timed:
            self.result.times_ns.append(nanoseconds)
        return output

    def judge(self, output: output_t, read: torch.Tensor, truth: torch.Tensor) -> None:
        """Let the output count: the result keeps the largest errors seen."""
        try:
            if output.shape != truth.shape:
                raise ValueError(f"the output has shape {tuple(output.shape)}, expected {tuple(truth.shape)}")
            self.result.gate_a = max(worst_of(relative_l2(output, read)), self.result.gate_a or 0.0)
            self.result.gate_b = max(worst_of(relative_l2(output, truth)), self.result.gate_b or 0.0)
        except Exception as error:
            self.fail(error, "checking: ")


def _check(data: input_t, outputs: Sequence[tuple[_Entrant, output_t | None]], report: Report) -> None:
    """Hold each output to float32 attention over what its contestant reads, and over the bf16 cache."""
    report("checking", None)
    exact: dict[str, torch.Tensor] = {}
    for entrant, output in outputs:
        if output is None:
            continue
        try:
            for precision in ("a16w16", entrant.result.contestant.precision):
                if precision not in exact:
                    exact[precision] = exact_attention(data, precision)
        except Exception as error:
            entrant.fail(error, "checking: ")
            continue
        entrant.judge(output, exact[entrant.result.contestant.precision], exact["a16w16"])
