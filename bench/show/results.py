"""The results of `mla run`: the table and what is below it, the warning above it, and the JSON form."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from bench.basics import Mode
from bench.show.console import new_table, print_line
from bench.show.texts import rate_text, shape_text, time_text
from bench.traffic import Bandwidth, bandwidth_of, nanoseconds, traffic
from bench.worker.loading import PlanInfo
from bench.worker.protocol import CaseResult
from reference import ExactVerdict
from task import TestSpec

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
    print_line(out, _LEGEND, "dim")
    if bandwidth:
        print_line(out, f"floor: cache, q and output once at {bandwidth.device}'s {rate_text(bandwidth)}")
    for row in rows:
        if row.result.profile:
            print_line(out, f"{shape_text(row.args)}, one call:\n{row.result.profile}")
    for row in rows:
        for failure in row.result.failures:
            print_line(out, f"{shape_text(row.args)}: {failure}", "red")
    if mode in (Mode.BENCHMARK, Mode.LEADERBOARD):
        print_line(out, _mean_text(rows))


def geomean_ns(rows: Sequence[Row]) -> float | None:
    """Over all cases, None unless each was timed."""
    times = [row.time_ns for row in rows]
    return None if None in times else statistics.geometric_mean(times)


def _mean_text(rows: Sequence[Row]) -> str:
    mean = geomean_ns(rows)
    if mean is not None:
        return f"geometric mean: {time_text(mean)}"
    return f"no geometric mean: {sum(row.time_ns is None for row in rows)} of {len(rows)} cases have no time"


def _table(rows: Sequence[Row], mode: Mode, bandwidth: Bandwidth | None) -> Table:
    timed = mode in (Mode.BENCHMARK, Mode.LEADERBOARD)
    table = new_table(
        "case",
        Column("plan", min_width=9, overflow="fold"),
        Column("official", min_width=6),
        Column("exact", min_width=6),
        *("gate A", "gate B", "cosine"),
        Column("mean ± error" if timed else "first call", justify="right", min_width=7),
        *(["floor"] if bandwidth else []),
        *(["× floor"] if bandwidth and timed else []),
    )
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
    """Where a file names no precision, a failed verdict is about the nearest one, which is a guess."""
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
    """One object per case, with the fields of TestSpec, PlanInfo and CaseResult by their names."""
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
