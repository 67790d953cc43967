"""`mla run`: the official protocol on this machine, with the exact check beside the official one."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.basics import LIMIT_SECONDS, Mode
from bench.cases import QUICK_CALLS, case_of_shape, official_cases, parse_shape, quick
from bench.show.console import print_header, print_verdict, print_written
from bench.show.files import check_target, sha256, write_json
from bench.show.progress import display
from bench.show.results import Row, geomean_ns, print_paging_warning, print_results, rows_as_json
from bench.show.texts import shape_text
from bench.traffic import bandwidth_of
from bench.worker.process import Worker
from bench.worker.protocol import TIMED, WARM_UP, Job, Limits
from bench.worker.session import Setting
from task import TestSpec


@dataclass(frozen=True)
class Request:
    """What the command line asks for. shapes: as in "64x8192", none for the official cases.
    limit: seconds a call of the submission may take."""

    submission: Path
    mode: Mode = Mode.TEST
    table: str | None = None
    shapes: Sequence[str] = ()
    quick: bool = False
    json: Path | None = None
    device: str | None = None
    limit: float = LIMIT_SECONDS


def run(request: Request, out: Console, err: Console) -> bool:
    """Run it all: results to `out`, progress to `err`. Returns whether everything passed.

    Raises UserError for a request that cannot be carried out, before any data is drawn.
    """
    cases = _cases(request)
    if request.json:
        check_target(request.json)
    with Worker(request.submission, request.device, request.limit) as worker:
        setting: Setting = worker.describe(cases, request.table)
        _print_header(out, request, cases, setting)
        rows = _run_cases(request, cases, setting, worker, err)
    ok = all(row.result.ok for row in rows)
    print_results(out, rows, request.mode, setting.environment["device"])
    if request.json:
        write_json(request.json, _as_json(request, setting, rows, ok))
        print_written(out, request.json)
    print_verdict(out, "check", ok)
    return ok


def _cases(request: Request) -> list[TestSpec]:
    if request.shapes:
        cases = [case_of_shape(parse_shape(text), request.mode) for text in request.shapes]
    else:
        cases = official_cases(request.mode)
    return quick(cases) if request.quick else list(cases)


def _limits(request: Request, of_mode: dict[Mode, Limits]) -> Limits | None:
    limits = of_mode.get(request.mode)
    return dataclasses.replace(limits, calls=min(limits.calls, QUICK_CALLS)) if limits and request.quick else limits


def _print_header(out: Console, request: Request, cases: Sequence[TestSpec], setting: Setting) -> None:
    machine = setting.environment
    facts = {
        "submission": str(request.submission),
        "table": request.table or "the submission's own choice",
        "mode": request.mode.value + (", quick" if request.quick else ""),
        "device": machine["device"],
        "torch": f"{machine['torch']}, aiter: {machine['aiter']}",
        "clock": setting.clock,
    }
    print_header(out, f"mla run, {len(cases)} case{'s' * (len(cases) != 1)}", facts)
    print_paging_warning(out, cases, setting.plans)


def _run_cases(
    request: Request, cases: Sequence[TestSpec], setting: Setting, worker: Worker, err: Console
) -> list[Row]:
    rows = []
    with display(err, len(cases)) as shown:
        if warm_up := _limits(request, WARM_UP):
            worker.warm_up(Job(request.mode, cases[0], table=request.table, limits=warm_up), shown.step)
        for case, plan in zip(cases, setting.plans, strict=True):
            shown.start_case(shape_text(case))
            job = Job(request.mode, case, table=request.table, limits=_limits(request, TIMED))
            rows.append(Row(case, plan, worker.run(job, shown.step)))
            shown.end_case("pass" if rows[-1].result.ok else "fail")
    return rows


def _as_json(request: Request, setting: Setting, rows: Sequence[Row], ok: bool) -> dict[str, Any]:
    bandwidth = bandwidth_of(setting.environment["device"])
    return {
        "mode": request.mode.value,
        "quick": request.quick,
        "submission": str(request.submission),
        "submission_sha256": sha256(request.submission),
        "table": request.table,
        "clock": setting.clock,
        "environment": setting.environment,
        "bandwidth": dataclasses.asdict(bandwidth) if bandwidth else None,
        "cases": rows_as_json(rows, bandwidth),
        "geomean_ns": geomean_ns(rows),
        "check": "pass" if ok else "fail",
    }
