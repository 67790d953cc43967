"""The official protocol as numbers: limits, statistics, the stop rule, and what is known of a case afterwards.

How a call is made, checked and timed is session.py's and timing.py's business.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.basics import Mode
from reference import ExactVerdict, OfficialVerdict
from task import TestSpec


@dataclass(frozen=True)
class Limits:
    """When to stop timing: after `calls`, once mean × calls passes `budget_ns`, or after `wall_ns` in all."""

    calls: int
    budget_ns: float
    wall_ns: float = 120e9


MIN_CALLS = 3
PRECISE_ENOUGH = 0.001  # standard error over mean
SEED_STEP = 13  # between two calls of a leaderboard run

TIMED = {Mode.BENCHMARK: Limits(1000, 50e9), Mode.LEADERBOARD: Limits(100, 30e9)}
WARM_UP = {Mode.BENCHMARK: Limits(100, 1e8), Mode.LEADERBOARD: Limits(100, 1e7)}


@dataclass(frozen=True)
class Stats:
    """Of a list of times, in nanoseconds; std is the sample's, err the standard error of the mean."""

    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float

    @classmethod
    def of(cls, times: list[float]) -> "Stats":
        """Raises ValueError for fewer than two times, which have no standard deviation."""
        runs = len(times)
        if runs < 2:
            raise ValueError(f"statistics need two times or more, got {runs}")
        mean, std = statistics.fmean(times), statistics.stdev(times)
        return cls(runs, mean, std, std / math.sqrt(runs), float(min(times)), float(max(times)))


def measure(time_a_call: Callable[[], float], limits: Limits, now: Callable[[], float] = time.perf_counter_ns) -> Stats:
    """Time calls, three at the least, until the mean is precise enough or a limit is reached. All in nanoseconds."""
    start = now()
    times = [time_a_call() for _ in range(MIN_CALLS)]
    while not _enough(stats := Stats.of(times), limits, now() - start):
        times.append(time_a_call())
    return stats


def _enough(stats: Stats, limits: Limits, elapsed_ns: float) -> bool:
    return (
        stats.runs >= limits.calls
        or stats.err < PRECISE_ENOUGH * stats.mean
        or stats.mean * stats.runs > limits.budget_ns
        or elapsed_ns > limits.wall_ns
    )


@dataclass(frozen=True)
class Job:
    """One case to do. exact: also the exact gates and, where the submission has one, its strict mode.

    table: run that table's plan. limits: for the timing modes.
    """

    mode: Mode
    args: TestSpec
    exact: bool = True
    table: str | None = None
    limits: Limits | None = None


@dataclass(frozen=True)
class CaseResult:
    """What is known of a case; None where a step did not happen.

    cache: the kv_data entry that the submission says it reads or, if it says nothing, was found to. first_call_ns: the
    checked call, which pays for whatever a first call sets up. error: what was raised, or how the worker ended.
    """

    official: OfficialVerdict | None = None
    exact: ExactVerdict | None = None
    cache: str | None = None
    first_call_ns: float | None = None
    stats: Stats | None = None
    profile: str | None = None
    error: str | None = None

    @property
    def failures(self) -> list[str]:
        """A sentence for each thing that is wrong."""
        verdicts = {"official check": self.official, "exact check": self.exact}
        wrong = [f"{name}: {verdict.message}" for name, verdict in verdicts.items() if verdict and not verdict.ok]
        return [self.error, *wrong] if self.error else wrong

    @property
    def ok(self) -> bool:
        return not self.failures
