"""Needles: inputs in which single tokens carry nearly all of a head's weight, and what a pattern of misses means.

A needle for head h of a sequence is a cache row that points along that head's query. Heads are independent, so one call
looks for sixteen needles a sequence. Nothing here runs a submission.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from reference import NUM_HEADS, pack_input
from task import input_t

# A query's squared length is about 576: a needle's logit is about 29, that of all other tokens together about 10.
GAIN = 1.2
_PAGES = (2, 4, 8, 16, 32, 64, 128)
_SPLITS = (2, 4, 5, 8, 16, 32)
_NAMED = 6  # positions and sequences that a message lists


@dataclass(frozen=True)
class Needle:
    """A token that one head of one sequence must find."""

    sequence: int
    head: int
    position: int


def edges(length: int) -> list[int]:
    """Positions at which kernels go wrong: both ends, and both sides of page, tile and split boundaries."""
    found = {0, 1, 2, 3, *range(length - 4, length)}
    for size in _PAGES:
        for boundary in (size, length // 2 // size * size, length // size * size):
            found |= {boundary - 1, boundary}
    for splits in _SPLITS:
        for boundary in (-(-length // splits), length - length // splits):
            tile = boundary // 16 * 16
            found |= {boundary - 1, boundary, tile - 1, tile, tile + 16}
    return sorted(p for p in found if 0 <= p < length)


def plan_needles(batch: int, length: int, most: int, rng: random.Random) -> list[list[Needle]]:
    """Needles for one call after another: the edges in the first, the last and a random sequence, and other positions
    in sequences taken in turn, up to `most` of them (all, if there are no more)."""
    at_edges = edges(length)
    others = sorted(set(range(length)) - set(at_edges))
    if len(others) > most:
        others = rng.sample(others, most)
    wanted: dict[int, set[int]] = defaultdict(set)
    for position in at_edges:
        for sequence in (0, batch - 1, rng.randrange(batch)):
            wanted[sequence].add(position)
    rng.shuffle(others)
    for i, position in enumerate(others):
        wanted[(i + 1) % batch].add(position)
    calls: list[list[Needle]] = []
    for sequence, positions in sorted(wanted.items()):
        shuffled = rng.sample(sorted(positions), len(positions))
        for i, position in enumerate(shuffled):
            call, head = divmod(i, NUM_HEADS)
            if call == len(calls):
                calls.append([])
            calls[call].append(Needle(sequence, head, position))
    return calls


def with_needles(q: torch.Tensor, kv: torch.Tensor, batch: int, needles: Iterable[Needle]) -> input_t:
    """The input for q (batch, 16, 576) and cache kv (total_kv, 1, 576), the needles' rows replaced."""
    length = kv.shape[0] // batch
    sequences, heads, positions = zip(*((n.sequence, n.head, n.position) for n in needles), strict=True)
    sequence = torch.tensor(sequences, device=q.device)
    kv = kv.clone()
    rows = sequence * length + torch.tensor(positions, device=q.device)
    kv[rows, 0] = q[sequence, torch.tensor(heads, device=q.device)] * GAIN
    return pack_input(q, kv, batch)


def diagnose(tried: Iterable[tuple[int, int]], missed: Iterable[tuple[int, int]], length: int) -> str:
    """What a set of missed (sequence, position) among those tried says of a kernel, in a sentence; "" for no misses."""
    tried, missed = set(tried), set(missed)
    if not missed:
        return ""
    hit = tried - missed
    positions, hit_positions = {p for _, p in missed}, {p for _, p in hit}
    counted = f"{len(missed)} of {len(tried)} needles missed"
    if not hit:
        return f"{counted}: no token is found"
    if positions & hit_positions:
        sequences = {b for b, _ in missed}
        if not sequences & {b for b, _ in hit}:
            return f"{counted}, all those of {_listed('sequence', sequences)} and none of the others"
        return f"{counted}, at {_listed('position', positions)}, which other sequences find"
    return f"{counted}: {_pattern(positions, hit_positions, length)}"


def _pattern(missed: set[int], hit: set[int], length: int) -> str:
    for page in _PAGES:
        if all(p % page == 0 for p in hit) and all(p % page for p in missed):
            return f"only tokens 0, {page}, {2 * page}, … are read: this reads one token a page of {page}"
    first, last = min(missed), max(missed)
    if not any(first <= p <= last for p in hit):
        if last == length - 1:
            count = length - first
            return "the last token of each sequence" if count == 1 else f"the last {count} tokens of each sequence"
        if first == 0:
            return "the first token of each sequence" if last == 0 else f"the first {last + 1} tokens of each sequence"
        return f"token {first}" if first == last else f"tokens {first} … {last}"
    for page in _PAGES:
        places = {p % page for p in missed}
        if len(places) == 1 and not any(p % page in places for p in hit):
            return f"token {places.pop()} of every {page}"
    return f"at {_listed('position', missed)}"


def _listed(noun: str, numbers: set[int]) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:_NAMED]))
    plural = "s" if len(numbers) > 1 else ""
    return f"{noun}{plural} {shown}{', …' if len(numbers) > _NAMED else ''}"
