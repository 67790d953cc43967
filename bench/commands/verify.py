"""`mla verify`: every check of bench/checks on one submission, as a table a person can read."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from bench.basics import LIMIT_SECONDS, Mode, unknown
from bench.cases import case_of_shape, official_cases, parse_shape
from bench.checks.checks import CHECKS
from bench.checks.scope import QUICK_TOKENS, Outcome, Scope
from bench.show.console import new_table, print_header, print_line, print_verdict, print_written
from bench.show.files import check_target, sha256, write_json
from bench.show.progress import display
from bench.show.results import print_paging_warning
from bench.worker.process import Listener, Worker, WorkerDiedError, WorkerHungError
from bench.worker.session import Setting

_MOST_FINDINGS = 12  # of a check, on the screen; the JSON has all


@dataclass(frozen=True)
class Request:
    """What the command line asks for. shapes: as in "64x8192", none for the benchmarks'. checks: none for all.
    limit: seconds a call of the submission may take."""

    submission: Path
    shapes: Sequence[str] = ()
    checks: Sequence[str] = ()
    quick: bool = False
    seed: int | None = None
    table: str | None = None
    json: Path | None = None
    device: str | None = None
    limit: float = LIMIT_SECONDS


@dataclass(frozen=True)
class Line:
    """A check and how it went."""

    name: str
    outcome: Outcome
    seconds: float


def run(request: Request, out: Console, err: Console) -> bool:
    """Carry out the checks: the table to `out`, progress to `err`. Returns whether all hold.

    Raises UserError for a request that cannot be carried out, before any data is drawn.
    """
    names = _names(request)
    scope = Scope(_shapes(request), request.seed or time.time_ns() % 1_000_000, request.quick, request.table)
    if request.json:
        check_target(request.json)
    with Worker(request.submission, request.device, request.limit) as worker:
        cases = [case_of_shape(shape, Mode.BENCHMARK) for shape in scope.shapes]
        setting: Setting = worker.describe(cases, request.table)
        _print_header(out, request, scope, setting)
        print_paging_warning(out, cases, setting.plans)
        lines = _carry_out(request, names, scope, worker, err)
    _print_lines(out, lines)
    ok = all(line.outcome.ok for line in lines)
    if request.json:
        write_json(request.json, _as_json(request, scope, setting, lines, ok))
        print_written(out, request.json)
    print_verdict(out, "verify", ok)
    return ok


def _names(request: Request) -> list[str]:
    for name in request.checks:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    return [name for name in CHECKS if not request.checks or name in request.checks]


def _shapes(request: Request) -> tuple[tuple[int, int], ...]:
    if request.shapes:
        return tuple(parse_shape(text) for text in request.shapes)
    shapes = [(case["batchsize"], case["kvseqlen"]) for case in official_cases(Mode.BENCHMARK)]
    return tuple(s for s in shapes if not request.quick or s[0] * s[1] <= QUICK_TOKENS)


def _carry_out(request: Request, names: Sequence[str], scope: Scope, worker: Worker, err: Console) -> list[Line]:
    lines, hung = [], ""
    with display(err, len(names), noun="check") as shown:
        for name in names:
            shown.start_case(CHECKS[name].title)
            start = time.monotonic()
            if hung and CHECKS[name].calls:
                outcome = Outcome(
                    [f"not tried, since it hung before, in {hung!r}: --check {name} tries it"], "not tried"
                )
            else:
                try:
                    outcome = worker.request("check", name, scope, listener=shown.step)
                    if CHECKS[name].apart:
                        _add(outcome, _apart(request, name, scope, shown.step))
                except WorkerDiedError as death:
                    outcome = Outcome([str(death)], "the process ended")
                    hung = CHECKS[name].title if isinstance(death, WorkerHungError) else hung
            lines.append(Line(name, outcome, time.monotonic() - start))
            shown.end_case("holds" if outcome.ok else "fails")
    return lines


def _apart(request: Request, name: str, scope: Scope, listener: Listener) -> Outcome:
    """The part of a check that is for a process of its own, which the submission is free to take down."""
    try:
        with Worker(request.submission, request.device, request.limit) as worker:
            return worker.request("check", name, scope, True, listener=listener)
    except WorkerDiedError:
        return Outcome(note="a call on another device ends the process: what it leaves behind was not looked at")


def _add(outcome: Outcome, more: Outcome) -> None:
    outcome.findings += more.findings
    outcome.note += f", {more.note}"


def _print_header(out: Console, request: Request, scope: Scope, setting: Setting) -> None:
    machine = setting.environment
    facts = {
        "submission": str(request.submission),
        "table": request.table or "the submission's own choice",
        "shapes": ", ".join(f"{batch} × {length}" for batch, length in scope.shapes),
        "seed": f"{scope.seed}" + (", quick" if scope.quick else ""),
        "device": machine["device"],
        "versions": f"Python {machine['python']}, torch {machine['torch']}, aiter: {machine['aiter']}",
    }
    print_header(out, "mla verify", facts)


def _print_lines(out: Console, lines: Sequence[Line]) -> None:
    table = new_table("check", Column(""), Column("tried and seen"), "seconds")
    for line in lines:
        verdict = Text("holds", style="green") if line.outcome.ok else Text("FAILS", style="red")
        table.add_row(CHECKS[line.name].title, verdict, Text(line.outcome.note), f"{line.seconds:.1f}")
    out.print(table)
    for line in lines:
        if line.outcome.ok:
            continue
        check = CHECKS[line.name]
        print_line(out, f"{check.title} fails: {check.means}", "bold red")
        for finding in line.outcome.findings[:_MOST_FINDINGS]:
            print_line(out, f"  {finding}")
        if len(line.outcome.findings) > _MOST_FINDINGS:
            print_line(out, f"  … and {len(line.outcome.findings) - _MOST_FINDINGS} more")


def _as_json(request: Request, scope: Scope, setting: Setting, lines: Sequence[Line], ok: bool) -> dict[str, Any]:
    return {
        "submission": str(request.submission),
        "submission_sha256": sha256(request.submission),
        "scope": dataclasses.asdict(scope),
        "environment": setting.environment,
        "checks": [
            {
                "name": line.name,
                "title": CHECKS[line.name].title,
                "ok": line.outcome.ok,
                "note": line.outcome.note,
                "findings": line.outcome.findings,
                "means": CHECKS[line.name].means,
                "seconds": line.seconds,
            }
            for line in lines
        ],
        "verify": "pass" if ok else "fail",
    }
