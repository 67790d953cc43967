"""fresh: nothing of an earlier call is used again: no output, no pointer, no metadata."""

import contextlib
import gc
import math
import random

import torch

from bench.checks.needles import Needle, with_needles
from bench.checks.scope import Outcome, Scope
from bench.worker.subject import Shape, Subject, SubmissionFaultError, count, label, overwrite
from reference import NUM_HEADS
from task import BENCHMARKS, input_t, output_t

ALIVE = 64  # outputs kept at a time: a buffer for each in turn must be longer than that
_BENCHMARK_SHAPES = [(case["batchsize"], case["kvseqlen"]) for case in BENCHMARKS]


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
