"""Needles: inputs in which single tokens carry nearly all of a head's weight, and what a pattern of misses means.

A needle for head h of a sequence is a cache row that points along that head's query. Heads are independent, so one call
looks for sixteen needles a sequence. A needle with a twin shares the weight with another token, of another value: what
is counted twice, or half, shows. Nothing here runs a submission.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from reference import NUM_HEADS, QK_HEAD_DIM, quantize_fp8, quantize_mxfp4
from task import input_t

# A query's squared length is about 576: a needle's logit is about 29, that of all other tokens together about 10.
GAIN = 1.2
_PAGES = (2, 4, 8, 16, 32, 64, 128)
_SPLITS = (2, 4, 5, 8, 16, 32)
_GRANULARITY = 16  # tokens: what aiter's splits are multiples of
_LEAST_RANDOM = 256  # positions that are no edge of anything
_NAMED = 6  # positions and sequences that a message lists


@dataclass(frozen=True)
class Needle:
    """A token that one head of one sequence must find, alone or beside the token `twin`."""

    sequence: int
    head: int
    position: int
    twin: int | None = None


def ends(length: int) -> list[int]:
    """Both ends, and both sides of the first, the middle and the last page boundary of each size."""
    found = {0, 1, 2, 3, *range(length - 4, length)}
    for size in _PAGES:
        for boundary in (size, length // 2 // size * size, length // size * size):
            found |= {boundary - 1, boundary}
    return sorted(p for p in found if 0 <= p < length)


def edges(length: int) -> list[int]:
    """Positions at which kernels go wrong: the ends, and both sides of every boundary between splits, even ones and
    those of whole tiles. `joints` has every tile's."""
    found = set(ends(length))
    for splits in _SPLITS:
        even = -(-length // splits)
        units = -(-length // _GRANULARITY)
        tiles = -(-units // splits) * _GRANULARITY
        for size in (even, tiles):
            for boundary in range(size, length, size):
                found |= {boundary - 1, boundary}
    return sorted(p for p in found if 0 <= p < length)


def joints(length: int) -> list[int]:
    """Both sides of every multiple of 16: the edges of all tiles and of pages of 16 tokens and more."""
    return [p for p in range(length) if p % _GRANULARITY in (0, _GRANULARITY - 1)]


def plan_needles(batch: int, length: int, most: int, rng: random.Random) -> list[list[Needle]]:
    """Needles for one call after another: the ends in the first, the last and a random sequence and for every head;
    each edge once alone and once with a twin, and other positions, in sequences taken in turn: all, if they are no more
    than `most`, else each joint and a random choice."""
    at_edges = edges(length)
    others = sorted(set(range(length)) - set(at_edges))
    if len(others) > most:
        at_joints = [p for p in joints(length) if p not in set(at_edges)]
        rest = sorted(set(others) - set(at_joints))
        others = at_joints + rng.sample(rest, min(len(rest), max(most - len(at_joints), _LEAST_RANDOM)))
    wanted: set[Needle] = set()
    turns: dict[int, int] = defaultdict(lambda: rng.randrange(NUM_HEADS))

    def want(sequence: int, position: int, twin: int | None = None) -> None:
        """For the next head of the sequence: taken in turn, the heads need the fewest calls."""
        turns[sequence] += 1
        wanted.add(Needle(sequence, turns[sequence] % NUM_HEADS, position, twin))

    for i, position in enumerate(at_edges):
        want((i + 1) % batch, position)
        if length > 1:
            want(i % batch, position, (position + rng.randrange(1, length)) % length)
    for i, position in enumerate(ends(length)):
        for sequence in {0, batch - 1, rng.randrange(batch)}:
            want(sequence, position)
        for head in range(NUM_HEADS):
            wanted.add(Needle((i + head) % batch, head, position))
    for i, position in enumerate(others):
        want((i + 1) % batch, position)
    shuffled = sorted(wanted, key=lambda n: (n.sequence, n.head, n.position, n.twin is None))
    rng.shuffle(shuffled)
    return _in_calls(shuffled)


def _in_calls(needles: list[Needle]) -> list[list[Needle]]:
    """Needles dealt to calls so that in each a sequence's head, and a sequence's token, is taken once."""
    calls: list[list[Needle]] = []
    taken: list[set[tuple[int, str, int]]] = []
    first: dict[tuple[int, int], int] = defaultdict(int)  # of a sequence's head, the call after its last one
    for needle in needles:
        tokens = {needle.position, needle.twin} - {None}
        claims = {(needle.sequence, "head", needle.head), *((needle.sequence, "token", t) for t in tokens)}
        call = first[needle.sequence, needle.head]
        while call < len(calls) and claims & taken[call]:
            call += 1
        if call == len(calls):
            calls.append([])
            taken.append(set())
        calls[call].append(needle)
        taken[call] |= claims
        first[needle.sequence, needle.head] = call + 1
    return calls


def with_needles(base: input_t, needles: Iterable[Needle]) -> input_t:
    """`base` with the needles' rows replaced in the cache, a copy; q and config are shared."""
    q, kv_data, *rest = base
    length, kv, replaced = rest[-1]["kv_seq_len"], kv_data["bf16"].clone(), []

    def at(numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=q.device)

    for single in (True, False):
        chosen = [n for n in needles if (n.twin is None) == single]
        if not chosen:
            continue
        sequence = at(n.sequence for n in chosen)
        along = q[sequence, at(n.head for n in chosen)] * GAIN
        rows = sequence * length + at(n.position for n in chosen)
        replaced.append(rows)
        if single:
            kv[rows, 0] = along
        else:
            across = _across(along.float(), kv[rows, 0].float())
            kv[rows, 0] = (along.float() + across).to(kv.dtype)
            twins = sequence * length + at(n.twin for n in chosen)
            kv[twins, 0] = (along.float() - across).to(kv.dtype)
            replaced.append(twins)
    return q, {"bf16": kv, "fp8": quantize_fp8(kv), "mxfp4": _requantised(kv, kv_data["mxfp4"], replaced)}, *rest


def _requantised(
    kv: torch.Tensor, mxfp4: tuple[torch.Tensor, torch.Tensor], replaced: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """kv in mxfp4, given what it was but for the rows replaced: no row's code depends on another row."""
    rows = torch.cat(replaced)
    codes, scales = (t.view(torch.uint8).clone() for t in mxfp4)
    new_codes, new_scales = (t.view(torch.uint8) for t in quantize_mxfp4(kv[rows]))
    blocks = QK_HEAD_DIM // 32
    codes[rows] = new_codes
    scales[rows, :blocks] = new_scales[: len(rows), :blocks]
    return codes.view(mxfp4[0].dtype), scales.view(mxfp4[1].dtype)


def _across(along: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The part of `other` that is orthogonal to `along`, as long as it: it changes a row's value, not its logit."""
    other = other - along * (other * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)
    return other * (along.norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True).clamp(min=1e-30))


def describe_blur(blurred: Iterable[Needle]) -> str:
    """What to say of needles that were found, but with values that rounding does not explain."""
    blurred = list(blurred)
    twins = [n for n in blurred if n.twin is not None]
    if len(twins) == len(blurred):
        positions = listed("position", {n.position for n in twins})
        return f"of two tokens with equal weight one counts more than the other, at {positions}"
    heads, positions = {n.head for n in blurred}, {n.position for n in blurred if n.twin is None}
    return f"needles are found with wrong values, for {listed('head', heads)}, at {listed('position', positions)}"


def diagnose(
    tried: Iterable[tuple[int, int]], missed: Iterable[tuple[int, int]], length: int, noun: str = "needles"
) -> str:
    """What a set of missed (sequence, position) among those tried says of a kernel, in a sentence; "" for no misses."""
    tried, missed = set(tried), set(missed)
    if not missed:
        return ""
    hit = tried - missed
    positions, hit_positions = {p for _, p in missed}, {p for _, p in hit}
    counted = f"{len(missed)} of {len(tried)} {noun} missed"
    if not hit:
        return f"{counted}: no token is found"
    if positions & hit_positions:
        sequences = {b for b, _ in missed}
        if not sequences & {b for b, _ in hit}:
            return f"{counted}, all those of {listed('sequence', sequences)} and none of the others"
        return f"{counted}, at {listed('position', positions)}, which other sequences find"
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
    return f"at {listed('position', missed)}"


def listed(noun: str, numbers: set[int]) -> str:
    """A few of the numbers, in order, after their noun."""
    shown = ", ".join(map(str, sorted(numbers)[:_NAMED]))
    plural = "s" if len(numbers) > 1 else ""
    return f"{noun}{plural} {shown}{', …' if len(numbers) > _NAMED else ''}"
