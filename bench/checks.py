"""The checks of `mla verify`, as they run inside the worker process: each asks one thing of a submission.

A check takes a Subject (the submission on a device) and a Scope (how much to try) and returns an Outcome. What a failed
check means for a kernel stands beside it in CHECKS.
"""

import ast
import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.loading import Submission, describe_error
from bench.needles import describe_blur, diagnose, plan_needles, with_needles
from reference import (
    NUM_HEADS,
    PRECISIONS,
    V_HEAD_DIM,
    ExactVerdict,
    check_exact,
    exact_attention,
    generate_input,
    pack_input,
    relative_l2,
)
from task import BENCHMARKS, TestSpec, input_t, output_t

Shape = tuple[int, int]  # (batch size, KV length)
_BENCHMARK_SHAPES = [(case["batchsize"], case["kvseqlen"]) for case in BENCHMARKS]

QUICK_TOKENS = 300_000  # --quick leaves out larger shapes
# A shape of at most this many tokens is called many times over, with --quick and without.
REPEATED_TOKENS = {True: 70_000, False: QUICK_TOKENS}
QUICK_NEEDLES = 1000  # positions a shape besides the edges, with --quick
REPEATS = 20
STILL = 0.002  # relative L2 by which an output may move without a reason: a kernel that is not deterministic
SHARED = 0.005  # relative error that all outputs of a kernel may share
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
        fitting = [shape for shape in self.shapes if shape[0] * shape[1] <= REPEATED_TOKENS[self.quick]]
        return fitting or [min(self.shapes, key=lambda shape: shape[0] * shape[1])]

    @property
    def large(self) -> list[Shape]:
        """The other shapes: what is repeated is tried on them once."""
        return [shape for shape in self.shapes if shape not in self.small]


@dataclass
class Outcome:
    """What a check found: a sentence for each fault, and a note of what was tried and seen."""

    findings: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.findings


class SubmissionFaultError(Exception):
    """The submission raised, or returned what no caller can use; the message is the finding."""


class Subject:
    """A submission on a device, called as the server calls it: custom_kernel(data), no strict mode."""

    def __init__(self, submission: Submission, device: torch.device, table: str | None, report: Callable):
        self.device = device
        self.path = submission.path
        self.report = report
        self._submission = submission
        self._table = table

    def draw(self, shape: Shape, seed: int) -> input_t:
        return generate_input(shape[0], 1, shape[1], seed, device=self.device)

    def precision(self, shape: Shape) -> str | None:
        """What the file says it reads at a shape, None where it says nothing."""
        plan = self._submission.plan_info(*shape, self._table, self.device)
        return plan.precision if plan else None

    def call(self, data: input_t) -> output_t:
        """Its output. Raises SubmissionFaultError for an exception, an output of another kind than the task's, or an
        input that was written to: the truth is made from it afterwards."""
        batch, length = data[4]["batch_size"], data[4]["kv_seq_len"]
        case = TestSpec(batchsize=batch, qseqlen=1, kvseqlen=length, seed=0)
        before = _checksums(data)
        try:
            output = self._submission.kernel(case, self._table, self.device, strict=False)(data)
        except (Exception, SystemExit) as error:
            raise SubmissionFaultError(f"raises {describe_error(error, self.path)}") from error
        if not isinstance(output, torch.Tensor):
            raise SubmissionFaultError(f"returns {type(output).__name__}, expected a tensor")
        changed = sum(a != b for a, b in zip(before, _checksums(data), strict=True))
        if changed:
            raise SubmissionFaultError(f"{_name((batch, length))}: {changed} of the input tensors were written to")
        expected = ((batch, NUM_HEADS, V_HEAD_DIM), torch.bfloat16, data[0].device)
        got = (tuple(output.shape), output.dtype, output.device)
        if got != expected:
            raise SubmissionFaultError(f"returns {_kind(got)}, expected {_kind(expected)}")
        return output

    def judge(self, data: input_t, output: output_t, *, standard_normal: bool = True) -> ExactVerdict:
        shape = data[4]["batch_size"], data[4]["kv_seq_len"]
        return check_exact(data, output, self.precision(shape), standard_normal=standard_normal)


def _checksums(data: input_t) -> list[int]:
    """A number for each tensor of an input, which any ordinary write changes."""
    sums = []
    for tensor in tensors_of(data):
        raw = tensor.contiguous().view(torch.uint8).flatten()
        words = raw[: raw.numel() // 4 * 4].view(torch.int32)
        sums.append(words.sum(dtype=torch.int64) + raw[words.numel() * 4 :].sum(dtype=torch.int64))
    return torch.stack(sums).tolist()


def _kind(parts: tuple) -> str:
    return f"{parts[0]} {str(parts[1]).removeprefix('torch.')} on {parts[2]}"


def _name(shape: Shape) -> str:
    return f"{shape[0]} × {shape[1]}"


def _count(shapes: Sequence[Shape]) -> str:
    return f"{len(shapes)} shape{'s' * (len(shapes) != 1)}"


# ---- 1. Exact ----


def exact(subject: Subject, scope: Scope) -> Outcome:
    outcome, worst, formats = Outcome(), 0.0, set()
    for i, shape in enumerate(scope.shapes):
        data = subject.draw(shape, scope.seed + i)
        output = subject.call(data)
        verdict = subject.judge(data, output)
        worst = max(worst, verdict.kernel_error)
        if verdict.ok:
            formats.add(verdict.precision)
            if shape in scope.small:
                outcome.findings += [f"{_name(shape)}: {bias}" for bias in _biases(data, output, verdict.precision)]
        else:
            outcome.findings.append(f"{_name(shape)}: {verdict.message}")
        del data
    read = f", reads as {', '.join(sorted(formats))}" if formats else ""
    outcome.note = f"{_count(scope.shapes)}, worst gate A {worst:.4f}{read}"
    return outcome


def _biases(data: input_t, output: output_t, precision: str) -> list[str]:
    """Errors that all outputs share, too small for gate A on each: a factor, and a softmax scale that is off.

    Rounding has no such direction: over thousands of outputs its share in one is far below SHARED.
    """
    truth = exact_attention(data, precision)
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
    outcome, total = Outcome(), 0
    for shape in scope.shapes:
        batch, length = shape
        rng = random.Random(scope.seed + length)
        calls = plan_needles(batch, length, QUICK_NEEDLES if scope.quick else length, rng)
        base = subject.draw(shape, scope.seed)
        verdict = subject.judge(base, subject.call(base))
        precision = verdict.precision if verdict.ok else subject.precision(shape) or "a16w16"
        tried, missed, blurred = set(), set(), set()
        for i, needles in enumerate(calls):
            subject.report(f"looking for needles, {_name(shape)}", i / len(calls))
            data = with_needles(base[0], base[1]["bf16"], batch, needles)
            output, truth = subject.call(data), exact_attention(data, precision)
            error = relative_l2(output.flatten(0, 1), truth.flatten(0, 1)).nan_to_num(torch.inf).view(batch, NUM_HEADS)
            worst = (output.float() - truth).abs().amax(-1) / truth.square().mean(-1).sqrt().clamp(min=1e-30)
            found = (error < 0.5).tolist()
            sharp = ((error < SHARP) & (worst < SHARP_ELEMENT)).tolist()
            single = [needle for needle in needles if needle.twin is None]
            tried |= {(n.sequence, n.position) for n in single}
            missed |= {(n.sequence, n.position) for n in single if not found[n.sequence][n.head]}
            if verdict.ok:
                fair = (error < 2 * PRECISIONS[precision].kernel_budget).tolist()
                blurred |= {n for n in needles if not (sharp if n.twin is None else fair)[n.sequence][n.head]}
        total += len(tried)
        if missed:
            outcome.findings.append(f"{_name(shape)}: {diagnose(tried, missed, length)}")
        elif blurred:
            outcome.findings.append(f"{_name(shape)}: {describe_blur(blurred)}")
    outcome.note = f"{total} needles in {_count(scope.shapes)}" + (
        "" if scope.quick else ", every position of a sequence"
    )
    return outcome


# ---- 3. No stray reads ----


def no_stray_reads(subject: Subject, scope: Scope) -> Outcome:
    outcome, tried = Outcome(), 0
    for shape in scope.small:
        data = subject.draw(shape, scope.seed)
        clean = subject.call(data)
        for what, others in _poisoned_surroundings(data):
            tried += 1
            if _moved(subject.call(others), clean):
                outcome.findings.append(f"{_name(shape)}: the output changes with {what}")
        for sequence in _some_sequences(shape[0], scope):
            tried += 1
            output = subject.call(_with_others_poisoned(data, sequence))
            if _moved(output[sequence : sequence + 1], clean[sequence : sequence + 1]):
                outcome.findings.append(f"{_name(shape)}: sequence {sequence} changes with the rows of other sequences")
    for shape in scope.large:
        tried += 1
        data = subject.draw(shape, scope.seed)
        clean, sequence = subject.call(data)[-1:].clone(), shape[0] - 1
        if _moved(subject.call(_with_others_poisoned(data, sequence))[-1:], clean):
            outcome.findings.append(f"{_name(shape)}: sequence {sequence} changes with the rows of other sequences")
        del data
    outcome.note = f"{tried} poisoned inputs in {_count(scope.shapes)}"
    return outcome


def _moved(output: output_t, clean: output_t) -> bool:
    return not relative_l2(output, clean.float()).max().item() <= STILL


def _some_sequences(batch: int, scope: Scope) -> list[int]:
    """All sequences in turn; with --quick, or of many, the ends and three between."""
    if batch <= (4 if scope.quick else 64):
        return list(range(batch))
    return sorted({0, 1, batch // 3, batch // 2, batch - 1})


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
            "fp8": (_inside(values, fp8), scale),
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


def _with_others_poisoned(data: input_t, sequence: int) -> input_t:
    """NaN in the cache rows of all sequences but one; the scale of the fp8 cache stays."""
    q, kv_data, *rest = data
    length = data[4]["kv_seq_len"]
    mine = slice(sequence * length, (sequence + 1) * length)

    def only_mine(tensor: torch.Tensor, nan: int, bits: torch.dtype) -> torch.Tensor:
        poisoned = torch.full_like(tensor.view(bits), nan)
        poisoned[mine] = tensor.view(bits)[mine]
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
        problems = (_new_tensors, _same_tensors, _reused_memory, _same_total, _after_another_device)
        for i, problem in enumerate(problems):
            findings = problem(subject, shape, scope.seed + 10 * i)
            outcome.findings += [f"{_name(shape)}: {finding}" for finding in findings]
    for shape in scope.large:
        outcome.findings += [f"{_name(shape)}: {finding}" for finding in _same_tensors(subject, shape, scope.seed)]
    outcome.note = f"{_count(scope.shapes)}: new tensors, overwritten ones, reused memory, other lengths"
    return outcome


def _wrong(subject: Subject, data: input_t, output: output_t, when: str) -> list[str]:
    verdict = subject.judge(data, output)
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


def _same_tensors(subject: Subject, shape: Shape, seed: int) -> list[str]:
    """Overwritten past torch's version counters, as a kernel writes."""
    data, other = subject.draw(shape, seed), subject.draw(shape, seed + 1)
    subject.call(data)
    for mine, new in zip(tensors_of(data), tensors_of(other), strict=True):
        mine.data.view(torch.uint8).copy_(new.view(torch.uint8))
    del other, mine, new
    return _wrong(subject, data, subject.call(data), "new values in the same tensors")


def _reused_memory(subject: Subject, shape: Shape, seed: int) -> list[str]:
    findings = []
    for i in range(3):
        gc.collect()
        data = subject.draw(shape, seed + i)
        findings += _wrong(subject, data, subject.call(data), "after earlier data was dropped")
        del data
    return findings


def _same_total(subject: Subject, shape: Shape, seed: int) -> list[str]:
    """Another batch of as many tokens, and back; beside a benchmark shape only another benchmark, if there is one."""
    batch, length = shape
    findings = []
    if shape in _BENCHMARK_SHAPES:
        others = [s for s in _BENCHMARK_SHAPES if s != shape and s[0] * s[1] == batch * length]
    else:
        others = [(2 * batch, length // 2) if length % 2 == 0 else (1, batch * length)]
    for other in (*others, shape):
        data = subject.draw(other, seed)
        findings += _wrong(subject, data, subject.call(data), f"{_name(other)} beside others of as many tokens")
    return findings


def _after_another_device(subject: Subject, shape: Shape, seed: int) -> list[str]:
    """The same shape on every other device first, where it may as well be refused, then here."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    here = subject.draw(shape, seed)
    for device in devices:
        if device != here[0].device:
            with contextlib.suppress(SubmissionFaultError):
                subject.call(generate_input(shape[0], 1, shape[1], seed + 1, device=device))
    return _wrong(subject, here, subject.call(here), "after a call on another device") if len(devices) > 1 else []


def tensors_of(data: object) -> Iterator[torch.Tensor]:
    """All tensors of an input, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from tensors_of(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from tensors_of(value)


# ---- 5. Hard numbers ----


def _outlier_channel(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kv = kv.clone()
    kv[..., 77] *= 1000
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


# Each takes q and the cache, standard normal, and keeps |q| ≤ 448, the range of the runners that cast q with scale 1.
HARD: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "logits to about ±80": lambda q, kv: (q * 18, kv),
    "q at ±448, the edge of fp8": _to_peak,
    "one channel 1000 times the others": _outlier_channel,
    "all keys equal": _equal_keys,
    "all values negative": lambda q, kv: (q, -kv.abs()),
    "all logits near −120": lambda q, kv: (q.abs() * 8, -kv.abs()),
    "a cache of denormals": lambda q, kv: (q, (kv.float() * 2.0**-130).to(kv.dtype)),
    "a cache of zeros": lambda q, kv: (q, torch.zeros_like(kv)),
    "a cache scale of 1e-12": lambda q, kv: (q, (kv.float() * 4e-10 / 5).to(kv.dtype)),
    "a cache scale of 1e4": lambda q, kv: (q / 16, (kv.float() * 4.48e6 / 5).to(kv.dtype)),
    "half of everything −0": _negative_zeros,
}


def hard_numbers(subject: Subject, scope: Scope) -> Outcome:
    outcome, worst = Outcome(), 0.0
    for shape in scope.small:
        q, kv_data, *_ = subject.draw(shape, scope.seed)
        for what, change in HARD.items():
            subject.report(f"{what}, {_name(shape)}", None)
            data = pack_input(*change(q, kv_data["bf16"]), shape[0])
            output = subject.call(data)
            if not torch.isfinite(output).all():
                outcome.findings.append(f"{_name(shape)}, {what}: NaN or infinity in the output")
                continue
            verdict = subject.judge(data, output, standard_normal=False)
            worst = max(worst, verdict.kernel_error / PRECISIONS[verdict.precision].kernel_budget)
            if not verdict.ok:
                outcome.findings.append(f"{_name(shape)}, {what}: {verdict.message}")
    outcome.note = f"{len(HARD)} kinds in {_count(scope.small)}, |q| ≤ 448, at most {worst:.0%} of gate A's budget"
    return outcome


# ---- 6. Deterministic ----


def deterministic(subject: Subject, scope: Scope) -> Outcome:
    """Bit-identical over calls. A spread within STILL is stated and no fault; a larger one is."""
    outcome, spread = Outcome(), 0.0
    for shape in scope.small:
        data = subject.draw(shape, scope.seed)
        first = subject.call(data)
        for _ in range(REPEATS - 1):
            again = subject.call(data)
            if not torch.equal(again.view(torch.int16), first.view(torch.int16)):
                spread = max(spread, relative_l2(again, first.float()).nan_to_num(torch.inf).max().item())
                if not spread <= STILL:
                    outcome.findings.append(f"{_name(shape)}: two calls on the same data differ by {spread:.2g}")
                    break
    identical = "bit-identical" if spread == 0.0 else f"spread up to {spread:.2g} (relative L2)"
    outcome.note = f"{REPEATS} calls in {_count(scope.small)}: {identical}"
    return outcome


# ---- 7. Inputs untouched ----


def inputs_untouched(subject: Subject, scope: Scope) -> Outcome:
    outcome = Outcome()
    for shape in scope.small:
        data = subject.draw(shape, scope.seed)
        before = [tensor.view(torch.uint8).clone() for tensor in tensors_of(data)]
        config, names = dict(data[4]), list(data[1])
        subject.call(data)
        changed = sum(not torch.equal(t.view(torch.uint8), b) for t, b in zip(tensors_of(data), before, strict=True))
        if changed:
            outcome.findings.append(f"{_name(shape)}: {changed} of the input tensors were written to")
        if config != data[4] or names != list(data[1]):
            outcome.findings.append(f"{_name(shape)}: config or kv_data was changed")
    outcome.note = f"every tensor and the config, in {_count(scope.small)}"
    return outcome


# ---- 8. Rules of the upload ----

_HEADER = ("#!POPCORN leaderboard amd-mixed-mla", "#!POPCORN gpu MI355X")
_FORBIDDEN = "stream"
_MOST_BYTES = 1_000_000
_ON_THE_SERVER = {"aiter", "numpy", "task", "torch", "triton"}


def upload_rules(subject: Subject, scope: Scope) -> Outcome:
    return check_upload(subject.path)


def check_upload(path: Path) -> Outcome:
    """What the server checks before it runs a file, and imports that it does not have."""
    raw = path.read_bytes()
    outcome = Outcome(note=f"{len(raw):,} bytes: size, encoding, letters, header, imports")
    if len(raw) > _MOST_BYTES:
        outcome.findings.append(f"{len(raw):,} bytes, at most {_MOST_BYTES:,} are taken")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        outcome.findings.append(f"not UTF-8: {error}")
        return outcome
    lines = [i for i, line in enumerate(text.splitlines(), 1) if _FORBIDDEN in line.lower()]
    if lines:
        outcome.findings.append(
            f"the letters {_FORBIDDEN!r} in line {', '.join(map(str, lines))}: the server refuses them"
        )
    head = text.splitlines()[:20]
    outcome.findings += [f"the header line {line!r} is missing" for line in _HEADER if line not in head]
    absent = sorted(imports_of(text) - set(sys.stdlib_module_names) - _ON_THE_SERVER)
    if absent:
        outcome.findings.append(f"imports {', '.join(absent)}, which the server may not have")
    return outcome


def imports_of(source: str) -> set[str]:
    """The top-level packages that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


# ---- The list ----


@dataclass(frozen=True)
class Check:
    """A check, what it is called, and what its failing means."""

    title: str
    means: str
    function: Callable[[Subject, Scope], Outcome]


CHECKS: dict[str, Check] = {
    "exact": Check(
        "exact", "the answer is not attention over the whole cache, whatever the official check says", exact
    ),
    "tokens": Check("every token counts", "some tokens are never read, or others in their place", every_token),
    "strays": Check(
        "no stray reads", "rows that belong to nobody, or to other sequences, get into the answer", no_stray_reads
    ),
    "fresh": Check("fresh work", "an output, a pointer or metadata of an earlier call is used again", fresh_work),
    "hard": Check("hard numbers", "overflow, underflow or a missing maximum, which real data will meet", hard_numbers),
    "repeat": Check("deterministic", "a race, or memory that nobody wrote", deterministic),
    "inputs": Check("inputs untouched", "the caller's tensors are written to: its next call differs", inputs_untouched),
    "upload": Check("rules of the upload", "the server will refuse the file, or fail to load it", upload_rules),
}


def run_check(name: str, subject: Subject, scope: Scope) -> Outcome:
    """Carry out one check; what the submission raises is a finding."""
    try:
        return CHECKS[name].function(subject, scope)
    except SubmissionFaultError as fault:
        return Outcome([str(fault)], "stopped at the first fault")
