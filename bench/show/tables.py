"""How results are shown: the header, the table and what is below it, and the JSON form."""

import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bench.basics import Mode, UserError
from bench.traffic import Bandwidth, bandwidth_of, nanoseconds, traffic
from bench.worker.loading import PlanInfo
from bench.worker.protocol import CaseResult, geometric_mean
from reference import ExactVerdict
from task import TestSpec

_LOG_WIDTH = 150  # of output that is not a terminal

_PAGING_WARNING = (
    "Plans with page_size above 1 run here: {shapes}. aiter's gfx950 kernels (and the portable ones) read only the "
    "first token of each page, so these plans attend to a part of the cache. The official check may pass all the same, "
    "its tolerance being wide; the exact check fails."
)

_LEGEND = (
    "official: share of elements out of tolerance. exact: q and cache as read (a16w8: bf16 q, fp8 cache; a8w8_tensor: "
    "fp8 q with a scale of its own; in brackets: the nearest guess, for a file that does not say). Gate A, B: relative "
    "L2 of the worst sequence against attention over all that is read, and over the bf16 cache"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A case with its plan, where the submission tells one, and its result."""

    args: TestSpec
    plan: PlanInfo | None
    result: CaseResult

    @property
    def time_ns(self) -> float | None:
        """The mean of the timed calls."""
        return self.result.stats.mean if self.result.stats else None

    def floor_ns(self, bandwidth: Bandwidth | None) -> float | None:
        """What reading the cache and q and writing the output takes at the least."""
        if bandwidth is None or self.result.cache is None:
            return None
        moved = traffic(self.args["batchsize"], self.args["kvseqlen"], self.result.cache)
        return nanoseconds(moved.compulsory, bandwidth)


def console(*, stderr: bool = False) -> Console:
    """A console that keeps tables readable in a log."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _LOG_WIDTH
    return made


def shape_text(args: TestSpec) -> str:
    return f"{args['batchsize']} × {args['kvseqlen']}"


def time_text(ns: float) -> str:
    """Nanoseconds in a unit that suits them."""
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns / 1e3:.3g} µs" if ns < 1e5 else f"{ns / 1e3:.0f} µs"


def bytes_text(count: int) -> str:
    """Bytes in decimal units, as bandwidths are given."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


# ---- the header ----


def print_header(out: Console, title: str, facts: dict[str, str]) -> None:
    out.print(Text(title, style="bold"))
    for name, value in facts.items():
        out.print(Text(f"  {name:<11}{value}"), soft_wrap=True)


def print_paging_warning(out: Console, cases: Sequence[TestSpec], plans: Sequence[PlanInfo | None]) -> None:
    """A panel if any plan has pages of more than one token."""
    paged = [
        f"{shape_text(case)} ({plan.page_size})" for case, plan in zip(cases, plans, strict=True) if _is_paged(plan)
    ]
    if paged:
        out.print(Panel(Text(_PAGING_WARNING.format(shapes=", ".join(paged))), title="warning", border_style="yellow"))


def _is_paged(plan: PlanInfo | None) -> bool:
    return plan is not None and plan.page_size > 1


# ---- the table ----


def print_results(out: Console, rows: Sequence[Row], mode: Mode, device: str) -> None:
    """The table, what its columns mean, profiles, failures, and the geometric mean."""
    bandwidth = bandwidth_of(device)
    out.print(_table(rows, mode, bandwidth))
    out.print(Text(_LEGEND, style="dim"), soft_wrap=True)
    if bandwidth:
        out.print(
            Text(f"floor: cache, q and output once at {bandwidth.device}'s {_rate_text(bandwidth)}"), soft_wrap=True
        )
    for row in rows:
        if row.result.profile:
            out.print(Text(f"{shape_text(row.args)}, one call:\n{row.result.profile}"), soft_wrap=True)
    for row in rows:
        for failure in row.result.failures:
            out.print(Text(f"{shape_text(row.args)}: {failure}", style="red"), soft_wrap=True)
    if mode in (Mode.BENCHMARK, Mode.LEADERBOARD):
        out.print(Text(_mean_text(rows)))


def print_verdict(out: Console, ok: bool) -> None:
    out.print(Text(f"check: {'pass' if ok else 'fail'}", style="bold green" if ok else "bold red"))


def _rate_text(bandwidth: Bandwidth) -> str:
    return f"{bandwidth.bytes_per_second / 1e12:.3g} TB/s ({bandwidth.source})"


def geomean_ns(rows: Sequence[Row]) -> float | None:
    """Over all cases, None unless each was timed."""
    times = [row.time_ns for row in rows]
    return None if None in times else geometric_mean(times)


def _mean_text(rows: Sequence[Row]) -> str:
    mean = geomean_ns(rows)
    if mean is not None:
        return f"geometric mean: {time_text(mean)}"
    return f"no geometric mean: {sum(row.time_ns is None for row in rows)} of {len(rows)} cases have no time"


def _table(rows: Sequence[Row], mode: Mode, bandwidth: Bandwidth | None) -> Table:
    timed = mode in (Mode.BENCHMARK, Mode.LEADERBOARD)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("plan", min_width=9, overflow="fold")
    table.add_column("official", min_width=6)
    table.add_column("exact", min_width=6)
    for name in ("gate A", "gate B", "cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mean ± error" if timed else "first call", justify="right", min_width=7)
    if bandwidth:
        table.add_column("floor", justify="right", no_wrap=True)
        if timed:
            table.add_column("× floor", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, timed, bandwidth))
    return table


def _cells(row: Row, timed: bool, bandwidth: Bandwidth | None) -> list[Text]:
    result, exact = row.result, row.result.exact
    cells = [
        Text(shape_text(row.args)),
        Text(row.plan.text if row.plan else "–"),
        _official_cell(result),
        _exact_cell(exact, declared=row.plan is not None and row.plan.precision is not None),
        _number(exact and exact.kernel_error, "{:.4f}"),
        _number(exact and exact.format_error, "{:.4f}"),
        _number(exact and exact.cosine, "{:.4f}"),
        Text(_timed_text(result) if timed else _optional_time(result.first_call_ns)),
    ]
    if bandwidth:
        floor = row.floor_ns(bandwidth)
        cells.append(Text(_optional_time(floor)))
        if timed:
            cells.append(_number(row.time_ns / floor if row.time_ns and floor else None, "{:.2f}"))
    return cells


def _verdict_cell(ok: bool, detail: str) -> Text:
    return Text(f"{'pass' if ok else 'FAIL'} {detail}", style="green" if ok else "red")


def _official_cell(result: CaseResult) -> Text:
    if result.official:
        return _verdict_cell(result.official.ok, f"{result.official.mismatch_ratio:.2%}")
    return _verdict_cell(False, "error") if result.error else Text("–")


def _exact_cell(verdict: ExactVerdict | None, declared: bool) -> Text:
    """A failed verdict on a file that names no precision is of the nearest one: a guess."""
    if verdict is None:
        return Text("–")
    return _verdict_cell(verdict.ok, verdict.precision if verdict.ok or declared else f"({verdict.precision}?)")


def _number(value: float | None, form: str) -> Text:
    return Text("–" if value is None else form.format(value))


def _optional_time(ns: float | None) -> str:
    return "–" if ns is None else time_text(ns)


def _timed_text(result: CaseResult) -> str:
    stats = result.stats
    return f"{time_text(stats.mean)} ±{stats.err / stats.mean:.1%}" if stats else "–"


# ---- JSON ----


def rows_as_json(rows: Sequence[Row], bandwidth: Bandwidth | None) -> list[dict[str, Any]]:
    """One object a case, the fields of TestSpec, PlanInfo and CaseResult by their names."""
    return [
        {
            **row.args,
            "plan": dataclasses.asdict(row.plan) if row.plan else None,
            **dataclasses.asdict(row.result),
            "floor_ns": row.floor_ns(bandwidth),
            "ok": row.result.ok,
        }
        for row in rows
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_target(path: Path, option: str = "--json") -> None:
    """Raises UserError if `path`, the file that `option` names, could not be written in the end."""
    path = path.resolve()
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}: create it first")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: expected the name of a file")
    try:
        if path.exists() and not path.is_file():
            return
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{option} {path}: the folder {path.parent} is not writable ({error})") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As write_text; infinity and NaN become strings."""
    write_text(path, json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str, option: str = "--json") -> None:
    """Write all of it or nothing, to the file that `option` names: a reader never sees half a file.

    A link is followed; what is no regular file, such as a pipe, is written to as it is. Raises UserError if that fails.
    """
    path = path.resolve()
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error}") from error


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
