"""The results of `mla compare`: the table of medians, what went wrong, and the fastest plans to paste."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column
from rich.text import Text

from bench.contest.measurements import Conditions
from bench.contest.peers import YARDSTICK
from bench.contest.plans import is_fused, source_of, spec_of
from bench.contest.ranking import best, rank
from bench.contest.rounds import Result
from bench.show.console import new_table, print_line
from bench.show.texts import shape_text
from bench.traffic import BYTES_PER_TOKEN
from task import TestSpec

_LISTED = 3  # of a space's plans, per shape and cache
_LEGEND = (
    "!: wrong, see below. spread: the largest (p90 − p10) / median. Gate A, B: relative L2 of the worst sequence to "
    "float32 attention over what is read, and over the bf16 cache. floor: cache, q and output at the measured rate. "
    f"× {YARDSTICK}: how many times faster, by geomean"
)


def print_comparison(
    out: Console, cases: Sequence[TestSpec], results: Sequence[Result], conditions: Conditions
) -> None:
    """A row per contestant, a column per shape, µs; then what went wrong."""
    shown = best(results)
    names = list(dict.fromkeys(r.contestant.name for r in results))
    shapes = [(args["batchsize"], args["kvseqlen"]) for args in cases]
    table = new_table(
        Column("median, µs", overflow="fold", min_width=19, max_width=34),
        *(f"{batch}/{length}" for batch, length in shapes),
        *("geomean", "spread", "gate A", "gate B"),
        *([Column(f"× {YARDSTICK}", justify="right")] if YARDSTICK in names else []),
    )
    yardstick = [shown.get((YARDSTICK, shape)) for shape in shapes]
    for name in names:
        mine = [shown[name, shape] for shape in shapes]
        table.add_row(Text(name), *map(_time_cell, mine), *_summary_cells(mine, yardstick))
    for cache in BYTES_PER_TOKEN:
        floors = [conditions.floor_ns(args, cache) for args in cases]
        cells = [*(f"{ns / 1e3:.1f}" for ns in floors), f"{statistics.geometric_mean(floors) / 1e3:.1f}"]
        table.add_row(f"floor, {cache} cache", *cells, style="dim")
    out.print(table)
    print_line(out, _LEGEND, "dim")
    for text in _fault_lines(results):
        print_line(out, text, "red")


def _time_cell(result: Result) -> Text:
    if result.error:
        return Text("error", style="red")
    text = f"{result.median_ns / 1e3:.1f}"
    return Text(f"{text}!", style="red") if result.fault else Text(text)


def _summary_cells(mine: Sequence[Result], yardstick: Sequence[Result | None]) -> list[str]:
    """geomean, spread, gates and the ratio to the yardstick, "–" unless all shapes ran; no ratio without yardstick."""
    cells, right = ["–"] * 4, not any(result.fault for result in mine)
    if not any(result.error for result in mine):
        spreads = [(r.percentile_ns(90) - r.percentile_ns(10)) / r.median_ns for r in mine]
        cells = [
            f"{_geomean_us(mine):.1f}" if right else "–",
            f"{max(spreads):.0%}",
            f"{max(r.gate_a for r in mine):.4f}",
            f"{max(r.gate_b for r in mine):.4f}",
        ]
    if None in yardstick:
        return cells
    both = right and not any(result.fault for result in yardstick)
    return [*cells, f"{_geomean_us(yardstick) / _geomean_us(mine):.2f}" if both else "–"]


def _geomean_us(results: Sequence[Result]) -> float:
    return statistics.geometric_mean(r.median_ns for r in results) / 1e3


def _fault_lines(results: Sequence[Result]) -> list[str]:
    """A line per fault; a fault that several plans of a space share has one line."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for r in results:
        if r.fault:
            shape = shape_text(r.args)
            where = f"{shape} {spec_of(r.contestant.plan)}" if r.contestant.may_fail else shape
            places[r.contestant.name, r.fault].append(where)
    return [
        f"{name}: {fault} ({len(where)} times, first {where[0]})" if len(where) > 1 else f"{name}, {where[0]}: {fault}"
        for (name, fault), where in places.items()
    ]


# ---- the fastest plans ----


def print_fastest_plans(out: Console, cases: Sequence[TestSpec], results: Sequence[Result]) -> None:
    """The fastest of each cache and shape, then tables to paste: without and, where it was tried, with mxfp4."""
    ours = [r for r in results if r.contestant.plan and is_fused(r.contestant.plan) and r.fault is None]
    ours.sort(key=rank)
    for args in cases:
        for cache in BYTES_PER_TOKEN:
            for r in [r for r in ours if r.args == args and r.contestant.cache == cache][:_LISTED]:
                print_line(out, f"{shape_text(args):<10} {r.median_ns / 1e3:8.1f} µs  {spec_of(r.contestant.plan)}")
    small = [r for r in ours if r.contestant.cache != "mxfp4"]
    for title, group in (("bf16 or fp8", small), ("mxfp4 allowed", ours)):
        if group and (group is small or len(ours) > len(small)):
            print_line(out, f"the fastest, {title}:", "bold")
            print_line(out, _table_source(group))


def _table_source(ours: Sequence[Result]) -> str:
    """The fastest plan of each shape, as entries of a table in submission.py."""
    fastest: dict[tuple[int, int], Result] = {}
    for result in ours:
        fastest.setdefault(result.shape, result)
    return "\n".join(
        f"    {shape}: {source_of(result.contestant.plan)},  # {result.median_ns / 1e3:.1f} µs"
        for shape, result in sorted(fastest.items())
    )
