"""The parent's side of the one spawned process in which a submission runs.

Requests and replies go through a pipe: method names of session.Session with their arguments one way, steps and results
the other. A worker that dies is noticed by the closed pipe; the next request starts a new one.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.basics import UserError
from bench.worker.protocol import CaseResult, Job

Listener = Callable[[str, float | None], None]

_STEP_SECONDS = 0.1  # between two reports of the same step
_PATIENCE_SECONDS = 5.0  # for a process to end
_QUIET_SECONDS = 60.0  # without an answer, after which that is said
_LOADING_SECONDS = 300.0  # for a file to load, whatever the limit for an answer
_PR_SET_PDEATHSIG = 1


class WorkerDiedError(Exception):
    """The process ended without an answer."""


class WorkerHungError(WorkerDiedError):
    """The process gave no sign of life for too long, and was ended."""


class Worker:
    """A context manager: one process for all requests. limit: seconds without a sign of life after which it is ended;
    None for no limit.

    Entering it loads the submission: raises UserError if it, or the device, cannot be used.
    """

    def __init__(self, submission: Path, device: str | None = None, limit: float | None = None):
        self._submission = submission
        self._device = device
        self._limit = limit
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> "Worker":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._bury()

    def request(self, method: str, *args: Any, listener: Listener | None = None) -> Any:
        """The result of Session.method(*args). `listener` hears of each step.

        Raises UserError as the method does, WorkerDiedError when the process ends meanwhile, WorkerHungError when it is
        ended.
        """
        if self._process is None:
            self._start()
        with contextlib.suppress(OSError):  # of a process that has just died: the answer says so
            self._connection.send((method, args))
        return self._answer("starting", listener, self._limit)

    def describe(self, *args: Any) -> Any:
        """Session.describe(*args). Raises UserError also when the submission ends the process over it."""
        try:
            return self.request("describe", *args)
        except WorkerDiedError as death:
            raise UserError(f"{self._submission}: {death}") from None

    def run(self, job: Job, listener: Listener | None = None) -> CaseResult:
        """Do one case; a worker that dies over it is a failed case."""
        try:
            return self.request("run", job, listener=listener)
        except WorkerDiedError as death:
            return CaseResult(error=str(death))

    def warm_up(self, job: Job, listener: Listener | None = None) -> None:
        """Warm up on a case; what goes wrong here shows again when the case is run."""
        with contextlib.suppress(WorkerDiedError):
            self.request("warm_up", job, listener=listener)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._submission, self._device))
        self._process.start()
        theirs.close()
        try:
            self._answer("loading it", limit=self._limit and max(self._limit, _LOADING_SECONDS))
        except WorkerDiedError as death:
            raise UserError(f"{self._submission} cannot be loaded: {death}") from None

    def _answer(self, doing: str, listener: Listener | None = None, limit: float | None = None) -> Any:
        quiet_since = time.monotonic()
        while True:
            try:
                while not self._connection.poll(min(_QUIET_SECONDS, limit or _QUIET_SECONDS)):
                    waited = time.monotonic() - quiet_since
                    if limit and waited >= limit:
                        self._process.kill()
                        self._bury()
                        raise WorkerHungError(f"no answer for {waited:.0f} s while {doing}: it was ended")
                    print(f"{self._submission.name}: no answer for {waited:.0f} s while {doing}", file=sys.stderr)
                kind, content = self._connection.recv()
                quiet_since = time.monotonic()
            except (EOFError, OSError):
                raise WorkerDiedError(f"the worker process died ({self._bury()}) while {doing}") from None
            if kind == "step":
                doing = content[0]
                if listener is not None:
                    listener(*content)
            elif kind == "refused":
                raise UserError(content)
            elif kind == "broken":
                raise RuntimeError(f"the worker process failed:\n{content}")
            else:
                return content

    def _bury(self) -> str:
        """Wait for the process to end, and say how it did."""
        process, self._process = self._process, None
        self._connection.close()
        process.join(_PATIENCE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        return _how_it_ended(process.exitcode)


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"{name}, often a lack of memory" if name == "SIGKILL" else name


# ---- inside the process ----


def _end_with_parent() -> None:
    """Have Linux end this process when its parent ends, however that comes about; elsewhere nothing is done."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(connection: Connection, submission: Path, device: str | None) -> None:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    faulthandler.enable()
    # The command has said so in its own words.
    warnings.filterwarnings("ignore", message="page_size .* read the first token of each page")
    from bench.worker.session import Session  # only here: what it loads is for this process

    session: Session | None = None

    def open_session() -> None:
        nonlocal session
        session = Session(submission, device, _Steps(connection))

    connection.send(_reply(open_session))
    with contextlib.suppress(EOFError, OSError):  # the parent has gone
        while session is not None:
            method, args = connection.recv()
            connection.send(_reply(getattr(session, method), *args))


def _reply(function: Callable, *args: Any) -> tuple[str, Any]:
    try:
        return "done", function(*args)
    except UserError as error:
        return "refused", str(error)
    except Exception:
        return "broken", traceback.format_exc()


class _Steps:
    """Sends steps to the parent, at most one in _STEP_SECONDS of the same kind."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._last: tuple[str, float] = ("", 0.0)

    def __call__(self, what: str, share: float | None) -> None:
        now = time.monotonic()
        if what != self._last[0] or now - self._last[1] > _STEP_SECONDS:
            self._last = (what, now)
            self._connection.send(("step", (what, share)))
