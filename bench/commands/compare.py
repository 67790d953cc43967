"""`mla compare`: our kernel and its peers in one process on one GPU, timed and checked on the same data."""

import contextlib
import csv
import dataclasses
import functools
import io
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column
from rich.text import Text

import sm_90
from bench import environment
from bench.basics import Mode, UserError
from bench.cases import case_of_shape, official_cases, parse_shape
from bench.contest import peers
from bench.contest.ceilings import Ceilings
from bench.contest.ceilings import measure as measure_ceilings
from bench.contest.plans import Space, cache_of, is_fused, parse_space, source_of, spec_of
from bench.contest.rounds import OURS, PEER, Contestant, Result, hold
from bench.environment import processors_of, usable_device
from bench.show.console import new_table, print_header, print_line, print_verdict, print_written
from bench.show.files import check_target, write_json, write_text
from bench.show.progress import display
from bench.show.texts import shape_text, time_text
from bench.traffic import BYTES_PER_TOKEN, traffic
from bench.worker.protocol import geometric_mean
from bench.worker.timing import Clock, EventClock
from reference import generate_input, progress_to
from submission import TABLES, Plan, Tile, custom_kernel, plan_for, runner_of, table_of
from task import TestSpec

DEFAULT_ROUNDS = 15
_LISTED = 3  # of a space's plans, a shape and cache
_LEGEND = (
    "!: wrong, see below. spread: the largest (p90 − p10) / median. Gate A, B: relative L2 of the worst sequence to "
    "float32 attention over what is read, and over the bf16 cache. floor: cache, q and output at the measured rate. "
    f"× {peers.YARDSTICK}: how many times faster, by geomean"
)
_TILE_FIELDS = tuple(field.name for field in dataclasses.fields(Tile) if field.name != "cache")
COLUMNS = (
    "batch_size", "kv_seq_len", "kind", "contestant", "version", "table", "precision", "cache", "runner", "num_splits",
    *_TILE_FIELDS, "median_us", "p10_us", "p90_us", "min_us", "runs", "gate_a", "gate_b", "fault", "floor_us",
    "launch_us", "bytes_per_second", "gpu", "driver", "torch", "triton", "commit",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What the command line asks for. shapes: as in "64x8192", none for the benchmarks. tables, peers: names; None for
    the device's own tables (none where there are spaces) and for all peers. spaces: see plans.py. commit: what to note
    where git cannot tell."""

    shapes: tuple[str, ...] = ()
    tables: tuple[str, ...] | None = None
    spaces: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    rounds: int = DEFAULT_ROUNDS
    csv: Path | None = None
    json: Path | None = None
    device: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Setting:
    """What all results of a run share."""

    device: torch.device
    environment: dict[str, str | None]
    ceilings: Ceilings

    def floor_ns(self, args: TestSpec, cache: str) -> float:
        """What moving the cache, q and the output takes at the measured rate."""
        moved = traffic(args["batchsize"], args["kvseqlen"], cache).compulsory
        return moved / self.ceilings.bytes_per_second * 1e9


def run(request: Request, out: Console, err: Console) -> bool:
    """Run it all: results to `out`, progress to `err`. Returns whether all of ours ran and were right, of a space of
    plans one at the least for each shape.

    Raises UserError, before any work, for a request that cannot be carried out or without a GPU.
    """
    sm_90.install()
    cases = _cases(request)
    spaces = [parse_space(text) for text in request.spaces]
    chosen = peers.choose(request.peers if request.peers is not None else [peer.key for peer in peers.PEERS])
    _check_request(request)
    device, clock = _gpu(request.device)
    tables = request.tables if request.tables is not None else () if spaces else tables_of(device)
    ours = [_ours(case, tables, spaces, device) for case in cases]
    plans = list(dict.fromkeys(contestant.plan for mine in ours for contestant in mine))
    theirs = _build([peer for peer in chosen if peer.installed], plans, device, err)
    contests = [[*mine, *theirs] for mine in ours]
    machine = environment.describe(device)
    machine["git_commit"] = machine["git_commit"] or request.commit
    setting = Setting(device, machine, measure_ceilings(clock, device))
    _print_header(out, request, setting, clock, [peer for peer in chosen if not peer.installed])
    results = _hold_all(request, cases, contests, setting, clock, err)
    _print_results(out, cases, results, setting)
    if spaces:
        _print_plans(out, cases, results)
    if request.json:
        write_json(request.json, _as_json(request, setting, results))
    for path in filter(None, (request.csv, request.json)):
        print_written(out, path)
    ok = not _failures(results)
    print_verdict(out, "check", ok)
    return ok


# ---- what is run ----


def _cases(request: Request) -> list[TestSpec]:
    if request.shapes:
        return [case_of_shape(parse_shape(text), Mode.BENCHMARK) for text in request.shapes]
    return list(official_cases(Mode.BENCHMARK))


def _check_request(request: Request) -> None:
    for name in request.tables or ():
        if name not in TABLES:
            raise UserError(f"unknown table {name!r}: expected one of {', '.join(TABLES)}")
    if request.rounds < 1:
        raise UserError(f"--rounds {request.rounds}: expected 1 or more timed calls")
    for option, path in (("--csv", request.csv), ("--json", request.json)):
        if path:
            check_target(path, option)


def _gpu(name: str | None) -> tuple[torch.device, Clock]:
    """The GPU and its clock. Raises UserError where there is none."""
    device = usable_device(name)
    if device.type != "cuda":
        raise UserError(
            f"mla compare needs a GPU, the device is {device.type}: its times are of GPU events on cold caches. Run it "
            "on a machine where torch (CUDA or ROCm) sees a GPU; `mla run` and `mla verify` work without one"
        )
    return device, EventClock(device)


def tables_of(device: torch.device) -> tuple[str, ...]:
    """The device's own table and those made from it: sm_90 and sm_90_mxfp4, say."""
    own = table_of(device)
    return tuple(name for name in TABLES if name.startswith(own))


def _ours(args: TestSpec, tables: Sequence[str], spaces: Sequence[Space], device: torch.device) -> list[Contestant]:
    """Of a shape: each table's plan, then each space's."""
    shape = args["batchsize"], args["kvseqlen"]
    found = [_plan(f"table {table}", plan_for(*shape, table=table), table=table) for table in tables]
    for space in spaces:
        plans = space.plans(*shape, processors_of(device))
        found += [_plan(f"plans {space.text}", plan, may_fail=len(plans) > 1) for plan in plans]
    return found


def _plan(name: str, plan: Plan, **options: Any) -> Contestant:
    # Whoever names a table with larger pages wants to see what it does.
    call = functools.partial(custom_kernel, plan=plan, kernels_honour_page_size=plan.page_size > 1)
    return Contestant(name, OURS, plan.precision, "", lambda data: lambda data: call, plan=plan, **options)


def _build(chosen: Sequence[peers.Peer], plans: Sequence[Plan], device: torch.device, err: Console) -> list[Contestant]:
    """Compile everything side by side; the peers as contestants. What goes wrong shows when it is called."""
    err.print("compiling")
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(peers.build, chosen)
        with contextlib.suppress(Exception):
            _compile([plan for plan in plans if is_fused(plan)], device)
        return [
            Contestant(
                peer.name, PEER, peer.precision, f"{peer.package} {environment.version(peer.package)}", peer.start
            )
            for peer in built.result()
        ]


def _compile(plans: Sequence[Plan], device: torch.device) -> None:
    """Triton's part, for any shape: a kernel's code depends on the tile, and on splits as far as they are merged."""
    from triton import AsyncCompileMode

    q, kv_data, _, kv_indptr, config = generate_input(1, 1, 32, 0, device=device)
    output = torch.empty((1, 16, 512), dtype=torch.bfloat16, device=device)
    tickets = torch.zeros(1, dtype=torch.int32, device=device)
    target = "amd" if torch.version.hip else "nvidia"
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for plan in plans:
            with contextlib.suppress(Exception):
                for kernel, grid, arguments, constants, options in runner_of(plan).launches(
                    q, *cache_of(kv_data, plan.tile.cache), kv_indptr, config["sm_scale"], plan, output, tickets, target
                ):
                    kernel.warmup(grid=grid, **arguments, **constants, **options)


def _hold_all(
    request: Request,
    cases: Sequence[TestSpec],
    contests: Sequence[Sequence[Contestant]],
    setting: Setting,
    clock: Clock,
    err: Console,
) -> list[Result]:
    """All shapes; the CSV is written after each, so that a run that is stopped leaves what it had."""
    results: list[Result] = []
    with display(err, len(cases), "shape") as shown, progress_to(shown.step):
        for args, contestants in zip(cases, contests, strict=True):
            shown.start_case(shape_text(args))
            found = hold(contestants, args, request.rounds, clock, setting.device, shown.step)
            results += found
            if request.csv:
                write_text(request.csv, as_csv(results, setting), "--csv")
            shown.end_case(f"{len(found)} contestants, {sum(r.fault is not None for r in found)} with a fault,")
    return results


# ---- what came of it ----


def _failures(results: Sequence[Result]) -> list[Result]:
    """Of ours, what was wrong or did not run; of a space's plans that did not run only where none of them was right."""
    right = {(_shape(r), r.contestant.name) for r in results if r.fault is None}
    return [
        r
        for r in results
        if r.contestant.kind == OURS
        and r.fault
        and not (r.error and r.contestant.may_fail and (_shape(r), r.contestant.name) in right)
    ]


def _shape(result: Result) -> tuple[int, int]:
    return result.args["batchsize"], result.args["kvseqlen"]


def _best(results: Sequence[Result]) -> dict[tuple[str, tuple[int, int]], Result]:
    """The result to show for a name and shape: the fastest that is right, else any."""
    best: dict[tuple[str, tuple[int, int]], Result] = {}
    for result in results:
        key = result.contestant.name, _shape(result)
        if key not in best or _rank(result) < _rank(best[key]):
            best[key] = result
    return best


def _rank(result: Result) -> float:
    return math.inf if result.fault else result.median_ns


def _print_header(
    out: Console, request: Request, setting: Setting, clock: Clock, missing: Sequence[peers.Peer]
) -> None:
    machine, ceilings = setting.environment, setting.ceilings
    facts = {
        "device": f"{machine['device']}, driver {machine['driver']}",
        "torch": f"{machine['torch']}, Triton {machine['triton']}",
        "commit": machine["git_commit"] or "unknown",
        "clock": f"{clock.description}; median of {request.rounds}, on new data each, contestants in turn",
        "launch": f"{time_text(ceilings.launch_ns)}, an empty kernel",
        "memory": f"{ceilings.copy / 1e12:.3g} TB/s copying, {ceilings.read / 1e12:.3g} TB/s reading",
    }
    print_header(out, "mla compare", facts)
    for peer in missing:
        print_line(out, f"  not installed: {peer.name}; {peer.get}")


def _print_results(out: Console, cases: Sequence[TestSpec], results: Sequence[Result], setting: Setting) -> None:
    """A row a contestant, a column a shape, µs; then what went wrong."""
    best = _best(results)
    names = list(dict.fromkeys(r.contestant.name for r in results))
    shapes = [(args["batchsize"], args["kvseqlen"]) for args in cases]
    table = new_table(
        Column("median, µs", overflow="fold", min_width=19, max_width=34),
        *(f"{batch}/{length}" for batch, length in shapes),
        *("geomean", "spread", "gate A", "gate B"),
        *([Column(f"× {peers.YARDSTICK}", justify="right")] if peers.YARDSTICK in names else []),
    )
    yardstick = [best.get((peers.YARDSTICK, shape)) for shape in shapes]
    for name in names:
        mine = [best[name, shape] for shape in shapes]
        table.add_row(Text(name), *map(_time_cell, mine), *_summary_cells(mine, yardstick))
    for cache in BYTES_PER_TOKEN:
        floors = [setting.floor_ns(args, cache) for args in cases]
        cells = [*(f"{ns / 1e3:.1f}" for ns in floors), f"{geometric_mean(floors) / 1e3:.1f}"]
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
    return geometric_mean(r.median_ns for r in results) / 1e3


def _fault_lines(results: Sequence[Result]) -> list[str]:
    """A line a fault; those of a space's plans together where they are the same."""
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


def _print_plans(out: Console, cases: Sequence[TestSpec], results: Sequence[Result]) -> None:
    """The fastest of each cache and shape, then tables to paste: without and, where it was tried, with mxfp4."""
    ours = [r for r in results if r.contestant.plan and is_fused(r.contestant.plan) and r.fault is None]
    ours.sort(key=_rank)
    for args in cases:
        for cache in BYTES_PER_TOKEN:
            for result in [r for r in ours if r.args == args and r.contestant.cache == cache][:_LISTED]:
                line = f"{shape_text(args):<10} {result.median_ns / 1e3:8.1f} µs  {spec_of(result.contestant.plan)}"
                print_line(out, line)
    small = [r for r in ours if r.contestant.cache != "mxfp4"]
    for title, group in (("bf16 or fp8", small), ("mxfp4 allowed", ours)):
        if group and (group is small or len(ours) > len(small)):
            print_line(out, f"the fastest, {title}:", "bold")
            print_line(out, _table_source(group))


def _table_source(ours: Sequence[Result]) -> str:
    """The first of each shape, as entries of a table in submission.py."""
    fastest: dict[tuple[int, int], Result] = {}
    for result in ours:
        fastest.setdefault(_shape(result), result)
    return "\n".join(
        f"    {shape}: {source_of(result.contestant.plan)},  # {result.median_ns / 1e3:.1f} µs"
        for shape, result in sorted(fastest.items())
    )


# ---- files ----


def as_csv(results: Sequence[Result], setting: Setting) -> str:
    """A row a contestant and shape, with COLUMNS."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(result, setting) for result in results)
    return text.getvalue()


def _row(result: Result, setting: Setting) -> dict[str, Any]:
    contestant, machine = result.contestant, setting.environment
    plan = contestant.plan
    tile = plan.tile if plan else None
    batch, length = _shape(result)
    return {
        "batch_size": batch,
        "kv_seq_len": length,
        "kind": contestant.kind,
        "contestant": contestant.name,
        "version": contestant.version,
        "table": contestant.table,
        "precision": contestant.precision,
        "cache": contestant.cache,
        "runner": plan.runner if plan else None,
        "num_splits": plan.num_splits if plan else None,
        **{name: getattr(tile, name, None) for name in _TILE_FIELDS},
        "median_us": _us(result.median_ns),
        "p10_us": _us(result.percentile_ns(10)),
        "p90_us": _us(result.percentile_ns(90)),
        "min_us": _us(result.percentile_ns(0)),
        "runs": len(result.times_ns),
        "gate_a": _number(result.gate_a),
        "gate_b": _number(result.gate_b),
        "fault": result.fault,
        "floor_us": _us(setting.floor_ns(result.args, contestant.cache)),
        "launch_us": _us(setting.ceilings.launch_ns),
        "bytes_per_second": f"{setting.ceilings.bytes_per_second:.4g}",
        "gpu": machine["device"],
        "driver": machine["driver"],
        "torch": machine["torch"],
        "triton": machine["triton"],
        "commit": machine["git_commit"],
    }


def _us(nanoseconds: float | None) -> str | None:
    return None if nanoseconds is None else f"{nanoseconds / 1e3:.2f}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.5f}"


def _as_json(request: Request, setting: Setting, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "environment": setting.environment,
        "ceilings": dataclasses.asdict(setting.ceilings),
        "rounds": request.rounds,
        "results": [_row(r, setting) | {"times_us": [ns / 1e3 for ns in r.times_ns]} for r in results],
        "check": "fail" if _failures(results) else "pass",
    }
