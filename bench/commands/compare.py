"""`mla compare`: our kernel and its peers in one process on one GPU, timed and checked on the same data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import sm_90
from bench import environment
from bench.basics import Mode, UserError, unknown
from bench.cases import case_of_shape, official_cases, parse_shape
from bench.contest import ceilings, contestants, peers
from bench.contest.measurements import Conditions, as_csv, as_json
from bench.contest.plans import parse_space
from bench.contest.ranking import failures
from bench.contest.rounds import Contestant, Result, hold
from bench.show.comparison import print_comparison, print_fastest_plans
from bench.show.console import print_header, print_line, print_verdict, print_written
from bench.show.files import check_target, write_json, write_text
from bench.show.progress import display
from bench.show.texts import shape_text, time_text
from bench.worker.timing import Clock, EventClock
from reference import progress_to
from submission import TABLES
from task import TestSpec


@dataclass(frozen=True)
class Request:
    """What the command line asks for. shapes: as in "64x8192", none for the benchmarks. tables: names, none for the
    device's own (for no table where there are spaces). spaces: see contest/plans.py. peers: names, none for all, unless
    no_peers. commit: what to note where git cannot tell."""

    shapes: Sequence[str]
    tables: Sequence[str]
    spaces: Sequence[str]
    peers: Sequence[str]
    no_peers: bool
    rounds: int
    csv: Path | None
    json: Path | None
    device: str | None
    commit: str | None


def run(request: Request, out: Console, err: Console) -> bool:
    """Run it all: results to `out`, progress to `err`. Returns whether all of ours ran and were right, of a space of
    plans one at the least for each shape.

    Raises UserError, before any work, for a request that cannot be carried out or without a GPU.
    """
    sm_90.install()
    cases = _cases(request)
    spaces = [parse_space(text) for text in request.spaces]
    chosen = [] if request.no_peers else peers.choose(request.peers or [peer.key for peer in peers.PEERS])
    _check_request(request)
    device, clock = _gpu(request.device)
    tables = request.tables or (() if spaces else contestants.tables_of(device))
    ours = [contestants.ours(case, tables, spaces, device) for case in cases]
    plans = list(dict.fromkeys(contestant.plan for mine in ours for contestant in mine))
    err.print("compiling")
    theirs = contestants.compiled([peer for peer in chosen if peer.installed], plans, device)
    machine = environment.describe(device)
    machine["git_commit"] = machine["git_commit"] or request.commit
    conditions = Conditions(device, machine, ceilings.measure(clock, device), request.rounds)
    _print_header(out, conditions, clock, [peer for peer in chosen if not peer.installed])
    results = _hold_all(cases, [[*mine, *theirs] for mine in ours], conditions, clock, request.csv, err)
    print_comparison(out, cases, results, conditions)
    if spaces:
        print_fastest_plans(out, cases, results)
    if request.json:
        write_json(request.json, as_json(results, conditions))
    for path in filter(None, (request.csv, request.json)):
        print_written(out, path)
    ok = not failures(results)
    print_verdict(out, "check", ok)
    return ok


def _cases(request: Request) -> list[TestSpec]:
    if request.shapes:
        return [case_of_shape(parse_shape(text), Mode.BENCHMARK) for text in request.shapes]
    return list(official_cases(Mode.BENCHMARK))


def _check_request(request: Request) -> None:
    for name in request.tables:
        if name not in TABLES:
            raise unknown("table", name, TABLES)
    if request.peers and request.no_peers:
        raise UserError("--peer and --no-peers exclude each other: give one of them")
    if request.rounds < 1:
        raise UserError(f"--rounds {request.rounds}: expected 1 or more timed calls")
    for option, path in (("--csv", request.csv), ("--json", request.json)):
        if path:
            check_target(path, option)


def _gpu(name: str | None) -> tuple[torch.device, Clock]:
    """The GPU and its clock. Raises UserError where there is none."""
    device = environment.usable_device(name)
    if device.type != "cuda":
        raise UserError(
            f"mla compare needs a GPU, the device is {device.type}: its times are of GPU events on cold caches. Run it "
            "on a machine where torch (CUDA or ROCm) sees a GPU; `mla run` and `mla verify` work without one"
        )
    return device, EventClock(device)


def _print_header(out: Console, conditions: Conditions, clock: Clock, missing: Sequence[peers.Peer]) -> None:
    machine, measured = conditions.environment, conditions.ceilings
    facts = {
        "device": f"{machine['device']}, driver {machine['driver']}",
        "torch": f"{machine['torch']}, Triton {machine['triton']}",
        "commit": machine["git_commit"] or "unknown",
        "clock": f"{clock.description}; median of {conditions.rounds}, on new data each, contestants in turn",
        "launch": f"{time_text(measured.launch_ns)}, an empty kernel",
        "memory": f"{measured.copy / 1e12:.3g} TB/s copying, {measured.read / 1e12:.3g} TB/s reading",
    }
    print_header(out, "mla compare", facts)
    for peer in missing:
        print_line(out, f"  not installed: {peer.name}; {peer.get}")


def _hold_all(
    cases: Sequence[TestSpec],
    contests: Sequence[Sequence[Contestant]],
    conditions: Conditions,
    clock: Clock,
    csv: Path | None,
    err: Console,
) -> list[Result]:
    """All shapes; the CSV is written after each, so that a run that is stopped leaves what it had."""
    results: list[Result] = []
    with display(err, len(cases), "shape") as shown, progress_to(shown.step):
        for args, entered in zip(cases, contests, strict=True):
            shown.start_case(shape_text(args))
            found = hold(entered, args, conditions.rounds, clock, conditions.device, shown.step)
            results += found
            if csv:
                write_text(csv, as_csv(results, conditions), "--csv")
            shown.end_case(f"{len(found)} contestants, {sum(r.fault is not None for r in found)} with a fault,")
    return results
