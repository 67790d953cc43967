"""What is being done right now: bars on a terminal, two lines per case in a log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Display(Protocol):
    """Told of each case's start and end; `step` is a worker's listener."""

    def start_case(self, name: str) -> None: ...

    def step(self, what: str, share: float | None) -> None: ...

    def end_case(self, outcome: str) -> None: ...


@contextmanager
def display(console: Console, num_cases: int, noun: str = "case") -> Iterator[Display]:
    """Bars if the console is a terminal, else lines. noun: what a case is called."""
    if not console.is_terminal:
        yield _Lines(console, num_cases)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress, num_cases, noun)


class _Bars:
    def __init__(self, progress: Progress, num_cases: int, noun: str):
        self._progress = progress
        self._noun = noun
        self._num_cases = num_cases
        self._begun = 0
        self._cases = progress.add_task("starting", total=num_cases)
        self._step = progress.add_task("", total=None)
        self._what = ""

    def start_case(self, name: str) -> None:
        self._begun += 1
        self._progress.update(self._cases, description=f"{self._noun} {self._begun} of {self._num_cases}: {name}")

    def step(self, what: str, share: float | None) -> None:
        if what != self._what:
            self._what = what
            self._progress.reset(self._step, description=what)
        total = None if share is None else 1.0
        self._progress.update(self._step, total=total, completed=share or 0.0)

    def end_case(self, outcome: str) -> None:
        self._progress.advance(self._cases)


class _Lines:
    def __init__(self, console: Console, num_cases: int):
        self._console = console
        self._num_cases = num_cases
        self._begun = 0
        self._start = 0.0

    def start_case(self, name: str) -> None:
        self._begun += 1
        self._start = time.monotonic()
        self._print(f"[{self._begun}/{self._num_cases}] {name}")

    def step(self, what: str, share: float | None) -> None:
        """Says nothing: a log would fill with steps."""

    def end_case(self, outcome: str) -> None:
        self._print(f"[{self._begun}/{self._num_cases}] {outcome} after {time.monotonic() - self._start:.1f} s")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
