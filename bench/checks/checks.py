"""The checks of `mla verify`, as they run inside the worker process: each asks one thing of a submission.

A check takes a Subject (the submission on a device) and a Scope (how much to try) and returns an Outcome. What a failed
check means for a kernel stands beside it in CHECKS.
"""

import contextlib
import gc
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.checks.census import take_census
from bench.checks.needles import Needle, describe_blur, diagnose, listed, plan_needles, with_needles
from bench.checks.upload import upload_faults
from bench.worker.subject import Shape, Subject, SubmissionFaultError, count, label, overwrite
from reference import NUM_HEADS, PRECISIONS, ExactVerdict, exact_attention, pack_input, relative_l2, worst_of
from task import BENCHMARKS, input_t, output_t

_BENCHMARK_SHAPES = [(case["batchsize"], case["kvseqlen"]) for case in BENCHMARKS]

QUICK_TOKENS = 300_000  # --quick leaves out larger shapes
# A shape of at most this many tokens is called many times over, with --quick and without.
REPEATED_TOKENS = {True: 40_000, False: QUICK_TOKENS}
QUICK_NEEDLES = 400  # positions a shape besides the edges, with --quick
QUICK_LARGE_CALLS = 2  # with needles, on the larger shapes, with --quick: the census covers their tokens
REPEATS = 20
ALIVE = 64  # outputs kept at a time: a buffer for each in turn must be longer than that
STILL = 0.002  # relative L2 by which an output may move without a reason: a kernel that is not deterministic
HEAD = 2  # times gate A's budget: how far one head of a sequence may be off
SHARED = 0.005  # relative error that all outputs of a kernel may share
MOST_NAMED = 6  # sequences whose tokens are searched for a pattern
# At a needle, where one token has all the weight, only rounding to bfloat16 is left: relative L2 of a head's row, and
# the largest error of an element relative to the row's root mean square.
SHARP, SHARP_ELEMENT = 0.01, 0.1


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


# ---- 1. Exact ----


def exact(subject: Subject, scope: Scope) -> Outcome:
    outcome, worst, formats = Outcome(), 0.0, set()
    for i, shape in enumerate(scope.shapes):
        data, output, verdict = _judged(subject, shape, scope.seed + i)
        worst = max(worst, verdict.kernel_error)
        if verdict.ok:
            formats.add(verdict.precision)
            truth = exact_attention(data, verdict.precision)
            faults = _heads_off(output, truth, verdict.precision)
            if shape in scope.small:
                faults += _biases(data, output, truth, verdict.precision)
            outcome.findings += [f"{label(shape)}: {fault}" for fault in faults]
        else:
            outcome.findings.append(f"{label(shape)}: {verdict.message}")
        del data
    read = f", reads as {', '.join(sorted(formats))}" if formats else ""
    outcome.note = f"{count(scope.shapes)}, worst gate A {worst:.4f}{read}"
    return outcome


def _judged(subject: Subject, shape: Shape, seed: int) -> tuple[input_t, output_t, ExactVerdict]:
    """Fresh data, an output and what both gates say of it.

    Rounding the cache to fp8 can by itself move a sequence past gate B's budget (0.050 was seen, once in thousands):
    where gate A holds and gate B does not, another draw decides.
    """
    for draw in range(2):
        data = subject.draw(shape, seed + 1000 * draw)
        output = subject.call(data)
        verdict = subject.judge(data, output)
        if verdict.ok or not subject.judge(data, output, standard_normal=False).ok:
            break
    return data, output, verdict


def _heads_off(output: output_t, truth: torch.Tensor, precision: str) -> list[str]:
    """Heads that lack what their sequence as a whole can lose within gate A."""
    budget = HEAD * PRECISIONS[precision].kernel_budget
    errors = relative_l2(output.flatten(0, 1), truth.flatten(0, 1)).view(-1, NUM_HEADS)
    off = (errors > budget).nonzero().tolist()
    return [f"head {h} of sequence {b} is off by {errors[b, h]:.3g}, a head may be by {budget}" for b, h in off[:3]]


def _biases(data: input_t, output: output_t, truth: torch.Tensor, precision: str) -> list[str]:
    """Errors that all outputs share, too small for gate A on each: a factor, and a softmax scale that is off.

    Rounding has no such direction: over thousands of outputs its share in one is far below SHARED.
    """
    *rest, config = data
    hotter = exact_attention((*rest, config | {"sm_scale": config["sm_scale"] * (1 + SHARED)}), precision)
    error = (output.float() - truth).flatten().double()
    factor = (error @ truth.flatten().double() / truth.double().square().sum()).item()
    slope = (hotter - truth).flatten().double()
    scale = SHARED * (error @ slope / slope.square().sum().clamp(min=1e-300)).item()
    found = {"outputs are": factor, "the softmax scale is": scale}
    return [f"{what} {1 + value:.4f} times what they should be" for what, value in found.items() if abs(value) > SHARED]


# ---- 2. Every token counts ----


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


# ---- 3. No stray reads ----


def no_stray_reads(subject: Subject, scope: Scope) -> Outcome:
    outcome, tried = Outcome(), 0
    for shape in scope.small:
        data = subject.draw(shape, scope.seed)
        clean = subject.call(data)
        for what, others in _poisoned_surroundings(data):
            tried += 1
            if _moved(subject.call(others), clean):
                outcome.findings.append(f"{label(shape)}: the output changes with {what}")
        tried += _poison_others(subject, shape, data, clean, shape[0].bit_length(), outcome)
    for shape in scope.some_large:
        data = subject.draw(shape, scope.seed)
        tried += _poison_others(subject, shape, data, subject.call(data).clone(), 1, outcome)
        del data
    outcome.note = f"{tried} poisoned inputs in {count([*scope.small, *scope.some_large])}"
    return outcome


def _poison_others(subject: Subject, shape: Shape, data: input_t, clean: output_t, bits: int, outcome: Outcome) -> int:
    """Poison the sequences whose number has a bit, then those that have not, a bit at a time; returns how many calls
    that took. With all bits every sequence is poisoned once beside each other one; with one bit, beside its neighbours.
    """
    numbers, moved, calls = torch.arange(shape[0], device=subject.device), set(), 0
    for bit in range(bits):
        for chosen in (numbers >> bit & 1 == 0, numbers >> bit & 1 == 1):
            if chosen.any() and not chosen.all():
                calls += 1
                output = subject.call(_with_others_poisoned(data, chosen))
                still = relative_l2(output[chosen], clean[chosen].float()) <= STILL
                moved |= set(numbers[chosen][~still].tolist())
    if moved:
        plural = "s" * (len(moved) == 1)
        outcome.findings.append(
            f"{label(shape)}: {listed('sequence', moved)} change{plural} with the rows of other sequences"
        )
    return calls


def _moved(output: output_t, clean: output_t) -> bool:
    return not relative_l2(output, clean.float()).max().item() <= STILL


_BF16_NAN, _FP8_NAN, _E8M0_NAN = 0x7FC0, 0x7F, 0xFF


def _poisoned_surroundings(data: input_t) -> Iterator[tuple[str, input_t]]:
    """The same values as slices of larger storage that is NaN, then huge; and mxfp4 scales padded with NaN."""
    q, kv_data, *rest = data
    values, scale = kv_data["fp8"]
    codes, scales = kv_data["mxfp4"]
    fills = {
        "NaN in the rows before and after the cache": (torch.nan, torch.nan, _E8M0_NAN),
        "huge values in the rows before and after the cache": (3e38, 448.0, 254),
    }
    for what, (bf16, fp8, e8m0) in fills.items():
        surrounded = {
            "bf16": _inside(kv_data["bf16"], bf16),
            "fp8": (_inside(values, fp8), _inside(scale, bf16)),
            "mxfp4": (_inside(codes.view(torch.uint8), 0x77).view(codes.dtype), _padded(scales, e8m0)),
        }
        qo_indptr, kv_indptr, config = rest
        around = _inside(qo_indptr, -(2**31)), _inside(kv_indptr, 2**31 - 1)
        yield what, (_inside(q, bf16), surrounded, *around, config)


def _inside(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    kind = tensor.dtype if tensor.dtype == torch.int32 else torch.float32
    storage = torch.full((tensor.shape[0] + 512, *tensor.shape[1:]), fill, device=tensor.device, dtype=kind)
    storage = storage.to(tensor.dtype)
    storage[256:-256] = tensor
    return storage[256:-256]


def _padded(scales: torch.Tensor, fill: int) -> torch.Tensor:
    """In aiter's padded layout: rows up to a multiple of 256, columns up to one of 8."""
    rows, columns = scales.shape
    storage = torch.full((-(-rows // 256) * 256, -(-columns // 8) * 8), fill, dtype=torch.uint8)
    storage = storage.to(scales.device)
    storage[:rows, :columns] = scales.view(torch.uint8)
    return storage.view(scales.dtype)


def _with_others_poisoned(data: input_t, chosen: torch.Tensor) -> input_t:
    """NaN in the cache rows of all sequences but the chosen, a bool for each; the scale of the fp8 cache stays."""
    q, kv_data, *rest = data
    mine = chosen.repeat_interleave(data[4]["kv_seq_len"])

    def only_mine(tensor: torch.Tensor, nan: int, bits: torch.dtype) -> torch.Tensor:
        poisoned = tensor.view(bits).clone()
        poisoned[: len(mine)].masked_fill_(~mine.view(-1, *[1] * (tensor.dim() - 1)), nan)
        return poisoned.view(tensor.dtype)

    values, scale = kv_data["fp8"]
    codes, scales = kv_data["mxfp4"]
    poisoned = {
        "bf16": only_mine(kv_data["bf16"], _BF16_NAN, torch.int16),
        "fp8": (only_mine(values, _FP8_NAN, torch.uint8), scale),
        "mxfp4": (codes, only_mine(scales, _E8M0_NAN, torch.uint8)),
    }
    return q, poisoned, *rest


# ---- 4. Fresh work ----


def fresh_work(subject: Subject, scope: Scope) -> Outcome:
    outcome = Outcome()
    for shape in scope.small:
        # Each with seeds of its own: what an earlier one left behind must never be the right answer by chance.
        problems = (_new_tensors, _same_tensors, _reused_memory, _other_lengths)
        for i, problem in enumerate(problems):
            findings = problem(subject, shape, scope.seed + 10 * i)
            outcome.findings += [f"{label(shape)}: {finding}" for finding in findings]
    for shape in scope.some_large:
        outcome.findings += [f"{label(shape)}: {finding}" for finding in _same_tensors(subject, shape, scope.seed)]
    smallest = min(scope.small, key=math.prod)
    outcome.findings += [f"{label(smallest)}: {finding}" for finding in _many_alive(subject, smallest, scope.seed)]
    outcome.note = (
        f"{count([*scope.small, *scope.some_large])}: new tensors, overwritten ones, reused memory, other lengths"
    )
    return outcome


def _wrong(subject: Subject, data: input_t, output: output_t, when: str) -> list[str]:
    verdict = subject.judge(data, output, standard_normal=False)
    return [] if verdict.ok else [f"{when}: {verdict.message}"]


def _new_tensors(subject: Subject, shape: Shape, seed: int) -> list[str]:
    cases = [subject.draw(shape, seed + i) for i in range(3)]
    outputs = [subject.call(data) for data in cases]
    copies = [output.clone() for output in outputs]
    findings = []
    for data, output in zip(cases, outputs, strict=True):
        findings += _wrong(subject, data, output, "several outputs alive")
    if len({output.data_ptr() for output in outputs}) < len(outputs):
        findings.append("two outputs alive share their memory")
    subject.call(subject.draw(shape, seed + 3))
    if not all(torch.equal(a, b) for a, b in zip(outputs, copies, strict=True)):
        findings.append("an output changes when custom_kernel is called again")
    return findings


def _many_alive(subject: Subject, shape: Shape, seed: int) -> list[str]:
    data = subject.draw(shape, seed)
    addresses = [output.data_ptr() for output in [subject.call(data) for _ in range(ALIVE)]]
    return [f"of {ALIVE} outputs alive some share their memory"] if len(set(addresses)) < ALIVE else []


def _same_tensors(subject: Subject, shape: Shape, seed: int) -> list[str]:
    """All values new, then one row of the cache alone: what an output is kept by must hang on every row."""
    data, rng = subject.draw(shape, seed), random.Random(seed)
    subject.call(data)
    overwrite(data, subject.draw(shape, seed + 1))
    findings = _wrong(subject, data, subject.call(data), "new values in the same tensors")
    needle = Needle(rng.randrange(shape[0]), rng.randrange(NUM_HEADS), rng.randrange(shape[1]))
    overwrite(data, with_needles(data, [needle]))
    verdict = subject.judge(data, subject.call(data), standard_normal=False)
    return findings if verdict.ok else [*findings, f"one new row of the cache in the same tensors: {verdict.message}"]


def _reused_memory(subject: Subject, shape: Shape, seed: int) -> list[str]:
    findings = []
    for i in range(2):
        gc.collect()
        data = subject.draw(shape, seed + i)
        findings += _wrong(subject, data, subject.call(data), "after earlier data was dropped")
        del data
    return findings


def _other_lengths(subject: Subject, shape: Shape, seed: int) -> list[str]:
    """Shapes that share the total of tokens or the batch, and back; beside a benchmark shape only another benchmark."""
    batch, length = shape
    if shape in _BENCHMARK_SHAPES:
        others = [s for s in _BENCHMARK_SHAPES if s != shape and s[0] * s[1] == batch * length]
    else:
        others = [(2 * batch, length // 2) if length % 2 == 0 else (1, batch * length), (batch, -(-length // 2))]
    findings = []
    for other in (*others, shape):
        data = subject.draw(other, seed)
        findings += _wrong(subject, data, subject.call(data), f"{label(other)} after other shapes")
    return findings


def after_another_device(subject: Subject, scope: Scope) -> Outcome:
    """Each shape on every other device first, where it may as well be refused, then here.

    For a process that has not called the submission yet, and that may die of such a call. Where there is no other
    device, torch's "meta" is one: tensors without memory.
    """
    outcome, here = Outcome(), subject.device
    others = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    others = [device for device in others if device != here] or [torch.device("meta")]
    for shape in scope.small:
        data = subject.draw(shape, scope.seed)
        for device in others:
            with contextlib.suppress(Exception, SystemExit):
                subject.kernel(_moved_to(device, data))
        if not _usable(here):
            outcome.note = f"a call on {others[-1]} ends all work on {here}: what it leaves behind was not looked at"
            return outcome
        when = f"{label(shape)}, after a call on {' and '.join(map(str, others))}"
        try:
            outcome.findings += _wrong(subject, data, subject.call(data), when)
        except SubmissionFaultError as fault:
            outcome.findings.append(f"{when}: {fault}")
    outcome.note = f"another device ({', '.join(map(str, others))})"
    return outcome


def _moved_to(device: torch.device, data: object) -> object:
    if isinstance(data, torch.Tensor):
        # As bytes: not every device copies every type.
        return data.view(torch.uint8).to(device).view(data.dtype) if data.element_size() == 1 else data.to(device)
    if isinstance(data, dict):
        return {key: _moved_to(device, value) for key, value in data.items()}
    return tuple(_moved_to(device, value) for value in data) if isinstance(data, tuple) else data


def _usable(device: torch.device) -> bool:
    """Whether the device still computes: a GPU does not, in a process that has made it touch what is not its own."""
    try:
        return torch.ones(1, device=device).item() == 1
    except RuntimeError:
        return False


# ---- 5. Hard numbers ----


def _outlier_channel(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kv = kv.clone()
    kv[..., 77] *= 1000
    return q, kv


def _denormal_values(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A key-only channel that sets the fp8 cache's scale and meets a zero in q."""
    q, kv = q.clone(), kv.clone()
    q[..., 550] = 0
    kv[..., 550] *= 10_000
    return q, kv


def _equal_keys(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q, kv[:1].expand_as(kv).contiguous()


def _negative_zeros(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kv = kv.clone()
    kv[::2] = -0.0
    q = q.clone()
    q[:, ::2] = -0.0
    return q, kv


def _to_peak(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (q.float() * (448 / q.abs().amax().float())).to(q.dtype), kv


def _large(kv: torch.Tensor) -> torch.Tensor:
    return (kv.float() * 4.48e6 / 5).to(kv.dtype)


def _one_dim_a_head(q: torch.Tensor) -> torch.Tensor:
    """Head h meets one dim of the cache, with the least normal number of fp8."""
    only = torch.zeros_like(q)
    heads = torch.arange(NUM_HEADS, device=q.device)
    only[:, heads, heads * 36] = 2.0**-6
    return only


# float32 holds a logit to a relative 2^-24; beyond this that is no longer small beside gate A.
MAX_LOGIT = 4000
# Each takes q and the cache, standard normal, and keeps |q| ≤ 448, the range of the runners that cast q with scale 1,
# and |logits| ≤ MAX_LOGIT.
HARD: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "logits to about ±80": lambda q, kv: (q * 18, kv),
    "q at ±448, the edge of fp8": _to_peak,
    "one channel 1000 times the others": _outlier_channel,
    "all values denormal in fp8": _denormal_values,
    "all keys equal": _equal_keys,
    "all values negative": lambda q, kv: (q, -kv.abs()),
    "all logits near −120": lambda q, kv: (q.abs() * 8, -kv.abs()),
    "a cache of denormals": lambda q, kv: (q, (kv.float() * 2.0**-130).to(kv.dtype)),
    "a cache of zeros": lambda q, kv: (q, torch.zeros_like(kv)),
    "a cache scale of 1e-12": lambda q, kv: (q, (kv.float() * 4e-10 / 5).to(kv.dtype)),
    "a cache scale of 1e4": lambda q, kv: (q / 9e5, _large(kv)),
    "a cache scale of 1e4, logits to ±2500": lambda q, kv: (_one_dim_a_head(q), _large(kv)),
    "half of everything −0": _negative_zeros,
}


def hard_numbers(subject: Subject, scope: Scope) -> Outcome:
    outcome, worst = Outcome(), 0.0
    for shape in scope.small:
        q, kv_data, *_ = subject.draw(shape, scope.seed)
        for what, change in HARD.items():
            subject.report(f"{what}, {label(shape)}", None)
            data = pack_input(*change(q, kv_data["bf16"]), shape[0])
            output = subject.call(data)
            if not torch.isfinite(output).all():
                outcome.findings.append(f"{label(shape)}, {what}: NaN or infinity in the output")
                continue
            verdict = subject.judge(data, output, standard_normal=False)
            worst = max(worst, verdict.kernel_error / PRECISIONS[verdict.precision].kernel_budget)
            if not verdict.ok:
                outcome.findings.append(f"{label(shape)}, {what}: {verdict.message}")
    outcome.note = f"{len(HARD)} kinds in {count(scope.small)}, |q| ≤ 448, at most {worst:.0%} of gate A's budget"
    return outcome


# ---- 6. Deterministic ----


def deterministic(subject: Subject, scope: Scope) -> Outcome:
    """Bit-identical over calls, and whatever memory held before. A spread within STILL is stated and no fault."""
    outcome, spread, waits = Outcome(), 0.0, 0
    on_gpu = subject.device.type == "cuda"
    shapes = scope.shapes if on_gpu else scope.small  # a CPU takes minutes over the others
    for shape in shapes:
        data = subject.draw(shape, scope.seed)
        first = subject.call(data)
        for _ in range(REPEATS - 1):
            again = subject.call(data)
            if not torch.equal(again.view(torch.int16), first.view(torch.int16)):
                spread = max(spread, worst_of(relative_l2(again, first.float())))
                if not spread <= STILL:
                    outcome.findings.append(f"{label(shape)}: two calls on the same data differ by {spread:.2g}")
                    break
        with contextlib.suppress(SubmissionFaultError), _Unwritten():
            if _moved(subject.call(data), first):
                outcome.findings.append(f"{label(shape)}: the output changes with what unwritten memory holds")
        if on_gpu:
            waits = max(waits, subject.waits(data))
    identical = "bit-identical" if spread == 0.0 else f"spread up to {spread:.2g} (relative L2)"
    outcome.note = f"{REPEATS} calls in {count(shapes)}: {identical}"
    if waits:
        outcome.note += f"; a warm call makes the host wait for the GPU {waits} times"
    return outcome


class _Unwritten(TorchDispatchMode):
    """Within the block, memory that torch hands out unwritten holds NaN, and −1 in integers."""

    _OPERATORS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name.removeprefix("aten::") in self._OPERATORS:
            bytes_of = torch.empty(0, dtype=torch.uint8, device=result.device)
            bytes_of.set_(result.untyped_storage()).fill_(0xFF)
        return result


# ---- 7. Inputs untouched ----


def inputs_untouched(subject: Subject, scope: Scope) -> Outcome:
    """What is watched in every call of every check, larger shapes included."""
    for shape in scope.small:
        subject.call(subject.draw(shape, scope.seed))
    return Outcome(note=f"every tensor and the config, in {count(scope.small)}")


# ---- 8. Rules of the upload ----


def upload_rules(subject: Subject, scope: Scope) -> Outcome:
    size = subject.path.stat().st_size
    return Outcome(upload_faults(subject.path), f"{size:,} bytes: size, encoding, letters, header, imports")


# ---- The list ----


@dataclass(frozen=True)
class Check:
    """A check, what it is called, and what its failing means. apart: a part of it for a process of its own; calls:
    whether it calls the submission at all."""

    title: str
    means: str
    function: Callable[[Subject, Scope], Outcome]
    apart: Callable[[Subject, Scope], Outcome] | None = None
    calls: bool = True


CHECKS: dict[str, Check] = {
    "exact": Check(
        "exact", "the answer is not attention over the whole cache, whatever the official check says", exact
    ),
    "tokens": Check("every token counts", "some tokens are never read, or others in their place", every_token),
    "strays": Check(
        "no stray reads", "rows that belong to nobody, or to other sequences, get into the answer", no_stray_reads
    ),
    "fresh": Check(
        "fresh work",
        "an output, a pointer or metadata of an earlier call is used again",
        fresh_work,
        after_another_device,
    ),
    "hard": Check("hard numbers", "overflow, underflow or a missing maximum, which real data will meet", hard_numbers),
    "repeat": Check("deterministic", "a race, or memory that nobody wrote", deterministic),
    "inputs": Check("inputs untouched", "the caller's tensors are written to: its next call differs", inputs_untouched),
    "upload": Check(
        "rules of the upload", "the server will refuse the file, or fail to load it", upload_rules, calls=False
    ),
}


def run_check(name: str, subject: Subject, scope: Scope, *, apart: bool = False) -> Outcome:
    """Carry out one check, or the part of it that is for a process of its own; what the submission raises is a
    finding."""
    check = CHECKS[name]
    try:
        return (check.apart if apart else check.function)(subject, scope)
    except SubmissionFaultError as fault:
        return Outcome([str(fault)], "stopped at the first fault")
