"""Which results of a contest count: the fastest of a row, and what makes the command fail."""

import math
from collections.abc import Sequence

from bench.contest.rounds import OURS, Result


def rank(result: Result) -> float:
    """The smaller, the better: the time, infinite where it does not count."""
    return math.inf if result.fault else result.median_ns


def best(results: Sequence[Result]) -> dict[tuple[str, tuple[int, int]], Result]:
    """The result to show for a name and shape: the fastest that is right, else any."""
    found: dict[tuple[str, tuple[int, int]], Result] = {}
    for result in results:
        key = result.contestant.name, result.shape
        if key not in found or rank(result) < rank(found[key]):
            found[key] = result
    return found


def failures(results: Sequence[Result]) -> list[Result]:
    """Our results that were wrong or did not run. A space's plans that did not run count only where none was right."""
    right = {(r.shape, r.contestant.name) for r in results if r.fault is None}
    return [
        r
        for r in results
        if r.contestant.kind == OURS
        and r.fault
        and not (r.error and r.contestant.may_fail and (r.shape, r.contestant.name) in right)
    ]
