"""tokens: every token counts, by needles at all positions and by a census of random data."""

import random

import torch

from bench.checks.census import take_census
from bench.checks.needles import describe_blur, diagnose, listed, plan_needles, with_needles
from bench.checks.scope import HEAD, Outcome, Scope
from bench.worker.subject import Subject, count, label
from reference import NUM_HEADS, PRECISIONS, exact_attention, relative_l2
from task import input_t, output_t

QUICK_NEEDLES = 400  # positions a shape besides the edges, with --quick
QUICK_LARGE_CALLS = 2  # with needles, on the larger shapes, with --quick: the census covers their tokens
MOST_NAMED = 6  # sequences whose tokens are searched for a pattern
# At a needle, where one token has all the weight, only rounding to bfloat16 is left: relative L2 of a head's row, and
# the largest error of an element relative to the row's root mean square.
SHARP, SHARP_ELEMENT = 0.01, 0.1


def every_token(subject: Subject, scope: Scope) -> Outcome:
    outcome, total, counted = Outcome(), 0, []
    for shape in scope.shapes:
        batch, length = shape
        rng = random.Random(scope.seed + length)
        calls = plan_needles(batch, length, QUICK_NEEDLES if scope.quick else length, rng)
        if scope.quick and shape in scope.large:
            calls = rng.sample(calls, min(len(calls), QUICK_LARGE_CALLS))
        base = subject.draw(shape, scope.seed)
        output = subject.call(base)
        verdict = subject.judge(base, output, standard_normal=False)
        precision = verdict.precision if verdict.ok else subject.precision(shape) or "a16w16"
        if verdict.ok:
            subject.report(f"counting all tokens, {label(shape)}", None)
            findings, share = _census(base, output, precision)
            outcome.findings += [f"{label(shape)}: {finding}" for finding in findings]
            counted.append(share)
        tried, missed, blurred = set(), set(), set()
        for i, needles in enumerate(calls):
            subject.report(f"looking for needles, {label(shape)}", i / len(calls))
            data = with_needles(base, needles)
            output, truth = subject.call(data), exact_attention(data, precision)
            error = relative_l2(output.flatten(0, 1), truth.flatten(0, 1)).nan_to_num(torch.inf).view(batch, NUM_HEADS)
            worst = (output.float() - truth).abs().amax(-1) / truth.square().mean(-1).sqrt().clamp(min=1e-30)
            found = (error < 0.5).tolist()
            sharp = ((error < SHARP) & (worst < SHARP_ELEMENT)).tolist()
            single = [needle for needle in needles if needle.twin is None]
            tried |= {(n.sequence, n.position) for n in single}
            missed |= {(n.sequence, n.position) for n in single if not found[n.sequence][n.head]}
            if verdict.ok:
                fair = (error < HEAD * PRECISIONS[precision].kernel_budget).tolist()
                blurred |= {n for n in needles if not (sharp if n.twin is None else fair)[n.sequence][n.head]}
        total += len(tried)
        if missed:
            outcome.findings.append(f"{label(shape)}: {diagnose(tried, missed, length)}")
        elif blurred:
            outcome.findings.append(f"{label(shape)}: {describe_blur(blurred)}")
    everywhere = "" if scope.quick else ", every position of a sequence"
    outcome.note = f"{total} needles in {count(scope.shapes)}{everywhere}"
    if counted:
        outcome.note += f"; {100 * min(counted):.4g} % or more of all tokens counted in random data"
    return outcome


def _census(data: input_t, output: output_t, precision: str) -> tuple[list[str], float]:
    """What random data says of single tokens, and the share of all that it could tell of."""
    batch, length = data[4]["batch_size"], data[4]["kv_seq_len"]
    census, findings = take_census(data, output, precision), []
    for places, what in ((census.lost, "counted at all"), (census.doubled, "counted once only")):
        if places:
            sequences = sorted({b for b, _ in places})
            others = [b for b in range(batch) if b not in sequences]
            near = {*sequences[:MOST_NAMED], *others[:2]}
            tried = [(b, p) for b in near for p in range(length)]
            pattern = diagnose(tried, [place for place in places if place[0] in near], length, "tokens")
            findings.append(f"tokens not {what} in {listed('sequence', set(sequences))}: {pattern}")
    if census.by_head and not findings:
        b, h, p = census.by_head[0]
        findings.append(
            f"{len(census.by_head)} tokens miscounted by one head, as token {p} of sequence {b} by head {h}"
        )
    return findings, census.judged / (batch * length)
