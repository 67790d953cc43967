"""The leaderboard server's machine-readable form: cases from a file, `key: value` lines to a descriptor.

It mirrors the server: the official check alone decides, custom_kernel(data) is called with nothing else, and a
leaderboard run ends with the first case that fails. In two things it is better behaved: a submission that raises or
takes its process down is a failed case like any other, and a file that is no submission is refused before any output.
"""

import base64
import dataclasses
import os
from pathlib import Path
from typing import TextIO

from bench.basics import Mode, NoPopcornDescriptorError, UserError
from bench.cases import FileCase, read_case_file
from bench.worker.process import Worker
from bench.worker.protocol import TIMED, WARM_UP, CaseResult, Job

PASS, FAILED = 0, 112


def run(mode: Mode, case_file: Path, submission: Path) -> int:
    """Run the cases of a file and write the lines to POPCORN_FD. Returns the exit code.

    Raises NoPopcornDescriptorError, CaseFileError, or UserError for a wrong seed or submission.
    """
    output = _open_descriptor()
    with output:
        cases = read_case_file(case_file, _secret_seed())
        with Worker(submission) as worker:
            log = _Log(output)
            passed = _MODES[mode](log, worker, cases)
            log("check", "pass" if passed else "fail")
    return PASS if passed or mode is Mode.LEADERBOARD else FAILED


def _open_descriptor() -> TextIO:
    text = os.environ.get("POPCORN_FD")
    if not text:
        raise NoPopcornDescriptorError(
            "POPCORN_FD is not set: expected a descriptor to write to, as in POPCORN_FD=3 … 3>out"
        )
    try:
        os.write(int(text), b"")  # raises now, not at the end, if it is open for reading only
        output = os.fdopen(int(text), "w", encoding="utf-8")
    except (ValueError, OSError) as error:
        raise NoPopcornDescriptorError(f"POPCORN_FD={text} cannot be written to: {error}") from error
    os.set_inheritable(output.fileno(), False)
    return output


def _secret_seed() -> int | None:
    """POPCORN_SEED, taken out of the environment so that the worker process does not see it."""
    text = os.environ.pop("POPCORN_SEED", None)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(f"POPCORN_SEED must be a whole number, got {text!r}") from None


class _Log:
    """Writes `key: value` lines, each at once and on one line."""

    def __init__(self, output: TextIO):
        self._output = output

    def __call__(self, key: str, value: object) -> None:
        one_line = "\\n".join(str(value).splitlines())
        print(f"{key}: {one_line}", file=self._output, flush=True)

    def failure(self, prefix: str, result: CaseResult) -> None:
        self(f"{prefix}.status", "fail")
        self(f"{prefix}.error", result.error or result.official.message)


def _job(mode: Mode, case: FileCase) -> Job:
    return Job(mode, case.args, exact=False, limits=TIMED.get(mode))


def _test(log: _Log, worker: Worker, cases: list[FileCase]) -> bool:
    log("test-count", len(cases))
    passed = True
    for i, case in enumerate(cases):
        log(f"test.{i}.spec", case.spec)
        result = worker.run(_job(Mode.TEST, case))
        if result.ok:
            log(f"test.{i}.status", "pass")
            log(f"test.{i}.message", result.official.message)
        else:
            log.failure(f"test.{i}", result)
            passed = False
    return passed


def _warm_up(worker: Worker, mode: Mode, case: FileCase) -> None:
    worker.warm_up(Job(mode, case.args, exact=False, limits=WARM_UP[mode]))


def _log_measured(log: _Log, prefix: str, result: CaseResult) -> None:
    if not result.ok:
        log.failure(prefix, result)
        return
    for name, value in dataclasses.asdict(result.stats).items():
        log(f"{prefix}.{name}", value)


def _benchmark(log: _Log, worker: Worker, cases: list[FileCase]) -> bool:
    _warm_up(worker, Mode.BENCHMARK, cases[0])
    log("benchmark-count", len(cases))
    passed = True
    for i, case in enumerate(cases):
        log(f"benchmark.{i}.spec", case.spec)
        result = worker.run(_job(Mode.BENCHMARK, case))
        _log_measured(log, f"benchmark.{i}", result)
        passed = passed and result.ok
    return passed


def _leaderboard(log: _Log, worker: Worker, cases: list[FileCase]) -> bool:
    _warm_up(worker, Mode.LEADERBOARD, cases[0])
    log("benchmark-count", len(cases))
    for i, case in enumerate(cases):
        result = worker.run(_job(Mode.LEADERBOARD, case))
        log(f"benchmark.{i}.spec", case.spec)
        _log_measured(log, f"benchmark.{i}", result)
        if not result.ok:
            return False
    return True


def _profile(log: _Log, worker: Worker, cases: list[FileCase]) -> bool:
    log("benchmark-count", len(cases))
    passed = True
    for i, case in enumerate(cases):
        log(f"benchmark.{i}.spec", case.spec)
        result = worker.run(_job(Mode.PROFILE, case))
        if result.ok:
            log(f"benchmark.{i}.report", _encode(result.profile))
        else:
            log.failure(f"benchmark.{i}", result)
            passed = False
    return passed


def _encode(report: str) -> str:
    """base64 with + and * for the last two digits, as popcorn decodes it."""
    return base64.b64encode(report.encode(), altchars=b"+*").decode()


_MODES = {Mode.TEST: _test, Mode.BENCHMARK: _benchmark, Mode.LEADERBOARD: _leaderboard, Mode.PROFILE: _profile}
