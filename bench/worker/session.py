"""What happens inside the worker process: draw a case, call the submission, check it, time it.

The exact gates and the strict mode are ours and only for the checked call; everything else is the official protocol.
One case's data is held at a time, twice: the submission's copy, and one it cannot have touched, for the checks.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench import environment
from bench.basics import Mode
from bench.checks.checks import run_check
from bench.checks.scope import Outcome, Scope
from bench.environment import usable_device
from bench.modules import describe_error
from bench.worker.loading import PlanInfo, load
from bench.worker.protocol import SEED_STEP, CaseResult, Job, Stats, measure
from bench.worker.subject import Subject
from bench.worker.timing import clock_for
from reference import (
    NUM_HEADS,
    PRECISIONS,
    V_HEAD_DIM,
    ExactVerdict,
    OfficialVerdict,
    check_exact,
    generate_input,
    official_verdict,
    progress_to,
    ref_kernel,
)
from task import TestSpec, input_t, output_t

_PROFILE_ROWS = 20

Report = Callable[[str, float | None], None]  # what is being done, and the share done where it is known


@dataclass(frozen=True)
class Setting:
    """Where and how cases will run: the environment, the clock's description, and each case's plan where it is told."""

    environment: dict[str, str | None]
    clock: str
    plans: list[PlanInfo | None]


class _TimedCallFailedError(Exception):
    """A timed call of a leaderboard run gave a wrong output."""

    def __init__(self, verdict: OfficialVerdict):
        super().__init__(verdict.message)
        self.verdict = verdict


class Session:
    """A submission on a device. Every method can be asked for by the parent; arguments and results hold no tensors."""

    def __init__(self, submission: Path, device: str | None, report: Report):
        """Raises UserError for a device that is not there or a file that is no submission."""
        self._device = usable_device(device)
        self._submission = load(submission)
        self._clock = clock_for(self._device)
        self._report = report

    def describe(self, cases: Sequence[TestSpec], table: str | None) -> Setting:
        """Raises UserError for a table that the submission does not have."""
        if table is not None:
            self._submission.check_table(table)
        plans = [self._plan(case, table) for case in cases]
        return Setting(environment.describe(self._device), self._clock.description, plans)

    def warm_up(self, job: Job) -> None:
        """Time calls on a case and forget them. What goes wrong here shows again when the case is run."""
        try:
            with progress_to(self._report):
                self._time_same(job, self._draw(job.args))
        except (Exception, SystemExit):
            return

    def run(self, job: Job) -> CaseResult:
        """Do one case. Whatever the submission raises is in the result."""
        run = {
            Mode.TEST: self._test,
            Mode.BENCHMARK: self._benchmark,
            Mode.LEADERBOARD: self._leaderboard,
            Mode.PROFILE: self._profile,
        }[job.mode]
        try:
            with progress_to(self._report):
                return run(job)
        except (Exception, SystemExit) as error:
            hint = _OUT_OF_MEMORY if _is_out_of_memory(error) else ""
            return CaseResult(error=describe_error(error, self._submission.path) + hint)

    def check(self, name: str, scope: Scope, apart: bool = False) -> Outcome:
        """Carry out one check of `mla verify`, or the part of it that is for a process of its own."""
        subject = Subject(self._submission, self._device, scope.table, self._report)
        with progress_to(self._report):
            return run_check(name, subject, scope, apart=apart)

    # ---- modes ----

    def _test(self, job: Job) -> CaseResult:
        return self._checked_call(job)[0]

    def _benchmark(self, job: Job) -> CaseResult:
        result, data = self._checked_call(job)
        return replace(result, stats=self._time_same(job, data)) if result.official.ok else result

    def _leaderboard(self, job: Job) -> CaseResult:
        result = self._checked_call(job)[0]
        if not result.official.ok:
            return result
        try:
            return replace(result, stats=self._time_fresh(job))
        except _TimedCallFailedError as failure:
            return replace(result, official=failure.verdict)

    def _profile(self, job: Job) -> CaseResult:
        """The server profiles a first call, unchecked; with `exact` a checked call comes before the profiled one."""
        result, data = self._checked_call(job) if job.exact else (CaseResult(), self._draw(job.args))
        self._report("profiling one call", None)
        on_gpu = self._device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
            self._kernel(job)(data)
            self._synchronize()
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        return replace(result, profile=profiler.key_averages().table(sort_by=key, row_limit=_PROFILE_ROWS))

    # ---- steps ----

    def _draw(self, args: TestSpec) -> input_t:
        data = generate_input(**args, device=self._device)
        self._synchronize()
        return data

    def _copy(self, data: input_t) -> input_t:
        self._report("copying the data", None)
        return _clone(data)

    def _kernel(self, job: Job, *, strict: bool = False) -> Callable[[input_t], output_t]:
        return self._submission.kernel(job.args, job.table, self._device, strict=strict)

    def _checked_call(self, job: Job) -> tuple[CaseResult, input_t]:
        """One call and its verdicts, and the data the submission was given."""
        untouched = self._draw(job.args)
        given = self._copy(untouched)
        self._report("running the submission", None)
        output, first_call_ns = self._clock.time(self._kernel(job, strict=job.exact), given)
        official = self._official(untouched, output)
        exact, cache = self._exact(job, untouched, output) if job.exact else (None, None)
        return CaseResult(official, exact, cache, first_call_ns), given

    def _official(self, data: input_t, output: output_t) -> OfficialVerdict:
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"custom_kernel returned {type(output).__name__}, expected a tensor")
        self._report("running the official reference", None)
        return official_verdict(output, ref_kernel(data))

    def _exact(self, job: Job, data: input_t, output: output_t) -> tuple[ExactVerdict | None, str | None]:
        """The exact verdict, None for an output of the wrong shape, and the cache format that was read, if known."""
        plan = self._plan(job.args, job.table)
        precision = plan.precision if plan else None
        verdict = None
        if output.shape == (data[0].shape[0], NUM_HEADS, V_HEAD_DIM):
            verdict = check_exact(data, output, precision)
            if precision is None and verdict.ok:
                precision = verdict.precision
        return verdict, PRECISIONS[precision].cache if precision else None

    def _time_same(self, job: Job, data: input_t) -> Stats:
        kernel, counter = self._kernel(job), itertools.count()

        def time_a_call() -> float:
            self._report("timing calls on the same data", next(counter) / job.limits.calls)
            return self._clock.time(kernel, data)[1]

        return measure(time_a_call, job.limits)

    def _time_fresh(self, job: Job) -> Stats:
        kernel, counter = self._kernel(job), itertools.count(1)
        return measure(lambda: self._time_checked(kernel, job.args, next(counter)), job.limits)

    def _time_checked(self, kernel: Callable[[input_t], output_t], args: TestSpec, call: int) -> float:
        given = self._draw(TestSpec(**{**args, "seed": args["seed"] + call * SEED_STEP}))
        untouched = self._copy(given)
        self._report("timing a call on fresh data", None)
        output, nanoseconds = self._clock.time(kernel, given)
        verdict = self._official(untouched, output)
        if not verdict.ok:
            raise _TimedCallFailedError(replace(verdict, message=f"timed call {call}: {verdict.message}"))
        return nanoseconds

    def _plan(self, args: TestSpec, table: str | None) -> PlanInfo | None:
        return self._submission.plan_info(args["batchsize"], args["kvseqlen"], table, self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_OUT_OF_MEMORY = "; out of memory: try --quick or a smaller --case (256x8192 needs 9 GB)"


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _clone(data: object) -> object:
    if isinstance(data, torch.Tensor):
        # Bytes, where an element is one: torch's deterministic mode cannot allocate float4.
        return data.view(torch.uint8).clone().view(data.dtype) if data.element_size() == 1 else data.clone()
    if isinstance(data, tuple):
        return tuple(map(_clone, data))
    if isinstance(data, dict):
        return {name: _clone(value) for name, value in data.items()}
    return data
