"""What every command prints alike: console, header, the set-up of a table, verdict, where the results are."""

import os
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_LOG_WIDTH = 150  # of output that is not a terminal


def console(*, stderr: bool = False) -> Console:
    """A console that keeps tables readable in a log."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _LOG_WIDTH
    return made


def new_table(*columns: str | Column) -> Table:
    """An empty table. A name makes a column that is never cut: the first is aligned to the left, the others to the
    right, as numbers are. A Column is taken as it is."""
    headed = [
        column if isinstance(column, Column) else Column(column, justify="right" if i else "left", no_wrap=True)
        for i, column in enumerate(columns)
    ]
    return Table(*headed, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)


def print_header(out: Console, title: str, facts: dict[str, str]) -> None:
    out.print(Text(title, style="bold"))
    for name, value in facts.items():
        print_line(out, f"  {name:<11}{value}")


def print_line(out: Console, text: str, style: str = "") -> None:
    """Print a line without wrapping it or taking brackets for markup."""
    out.print(Text(text, style=style), soft_wrap=True)


def print_written(out: Console, path: Path) -> None:
    print_line(out, f"results in {path}")


def print_verdict(out: Console, what: str, ok: bool) -> None:
    """The last line of a command: "check: pass". what: check, verify or isa."""
    out.print(Text(f"{what}: {'pass' if ok else 'fail'}", style="bold green" if ok else "bold red"))
