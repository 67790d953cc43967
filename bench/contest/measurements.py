"""What a contest measured, as files: the CSV and JSON of `mla compare`, and that CSV read again by `mla roofline`."""

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.basics import UserError
from bench.contest.ranking import failures
from bench.contest.rounds import PEER, Result
from bench.traffic import BYTES_PER_TOKEN, traffic
from submission import Tile
from task import TestSpec

_TILE_FIELDS = tuple(field.name for field in dataclasses.fields(Tile) if field.name != "cache")
COLUMNS = (
    "batch_size", "kv_seq_len", "kind", "contestant", "version", "table", "precision", "cache", "runner", "num_splits",
    *_TILE_FIELDS, "median_us", "p10_us", "p90_us", "min_us", "runs", "gate_a", "gate_b", "fault", "floor_us",
    "launch_us", "bytes_per_second", "gpu", "driver", "torch", "triton", "commit",
)  # fmt: skip
READ_COLUMNS = ("batch_size", "kv_seq_len", "kind", "contestant", "cache", "median_us", "gpu")


@dataclass(frozen=True)
class Ceilings:
    """launch_ns: the time of an empty kernel, as the clock sees it. copy, read: bytes per second of memory; a copy's
    bytes count in both directions."""

    launch_ns: float
    copy: float
    read: float

    @property
    def bytes_per_second(self) -> float:
        """The rate that floors are computed with: the better of the two."""
        return max(self.copy, self.read)


@dataclass(frozen=True)
class Conditions:
    """What all results of a contest share."""

    device: torch.device
    environment: dict[str, str | None]
    ceilings: Ceilings
    rounds: int

    def floor_ns(self, args: TestSpec, cache: str) -> float:
        """How long moving the cache, q and the output takes at the measured rate."""
        moved = traffic(args["batchsize"], args["kvseqlen"], cache).compulsory
        return moved / self.ceilings.bytes_per_second * 1e9


# ---- written ----


def as_csv(results: Sequence[Result], conditions: Conditions) -> str:
    """A row per contestant and shape, with COLUMNS."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(result, conditions) for result in results)
    return text.getvalue()


def as_json(results: Sequence[Result], conditions: Conditions) -> dict[str, Any]:
    """The rows of the CSV with all their times, and what the results share."""
    return {
        "environment": conditions.environment,
        "ceilings": dataclasses.asdict(conditions.ceilings),
        "rounds": conditions.rounds,
        "results": [_row(r, conditions) | {"times_us": [ns / 1e3 for ns in r.times_ns]} for r in results],
        "check": "fail" if failures(results) else "pass",
    }


def _row(result: Result, conditions: Conditions) -> dict[str, Any]:
    contestant, machine = result.contestant, conditions.environment
    plan = contestant.plan
    tile = plan.tile if plan else None
    batch_size, kv_seq_len = result.shape
    return {
        "batch_size": batch_size,
        "kv_seq_len": kv_seq_len,
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
        "gate_a": _error(result.gate_a),
        "gate_b": _error(result.gate_b),
        "fault": result.fault,
        "floor_us": _us(conditions.floor_ns(result.args, contestant.cache)),
        "launch_us": _us(conditions.ceilings.launch_ns),
        "bytes_per_second": f"{conditions.ceilings.bytes_per_second:.4g}",
        "gpu": machine["device"],
        "driver": machine["driver"],
        "torch": machine["torch"],
        "triton": machine["triton"],
        "commit": machine["git_commit"],
    }


def _us(nanoseconds: float | None) -> str | None:
    return None if nanoseconds is None else f"{nanoseconds / 1e3:.2f}"


def _error(value: float | None) -> str | None:
    return None if value is None else f"{value:.5f}"


# ---- read ----


@dataclass(frozen=True)
class Point:
    """One measurement: the line it belongs to, what it read, how long it took."""

    batch_size: int
    kv_seq_len: int
    line: str
    cache: str
    seconds: float

    @property
    def bytes(self) -> int:
        return traffic(self.batch_size, self.kv_seq_len, self.cache).compulsory

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds


@dataclass(frozen=True)
class Measurements:
    """What a results file holds: its GPU, the fastest measurement of each shape and line, and the roof measured beside
    them, in bytes per second and in seconds of an empty launch; None where the file does not say."""

    gpu: str
    points: list[Point]
    rate: float | None
    launch: float | None


def read_csv(path: Path) -> Measurements:
    """Our plans make one line per cache format, each peer makes one. Rows with a fault are left out. Raises UserError
    for a file of another kind."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not rows or any(column not in rows[0] for column in READ_COLUMNS):
        raise UserError(f"{path} is no results file: expected a CSV with the columns {', '.join(READ_COLUMNS)}")
    gpus = {row["gpu"] for row in rows}
    if len(gpus) > 1:
        raise UserError(f"{path} holds several GPUs ({', '.join(sorted(gpus))}): one picture shows one")
    fastest: dict[tuple[int, int, str], Point] = {}
    for i, row in enumerate(rows, 2):
        if row.get("fault"):
            continue
        point = _point(row, f"{path}, line {i}")
        key = point.batch_size, point.kv_seq_len, point.line
        fastest[key] = min(point, fastest.get(key, point), key=lambda p: p.seconds)
    if not fastest:
        raise UserError(f"{path} holds no measurement: every row has a fault")
    rate, launch = _shared(rows, "bytes_per_second"), _shared(rows, "launch_us")
    return Measurements(gpus.pop(), list(fastest.values()), rate, launch and launch * 1e-6)


def _point(row: dict[str, str], where: str) -> Point:
    try:
        shape, cache = (int(row["batch_size"]), int(row["kv_seq_len"])), row["cache"]
        seconds = float(row["median_us"]) * 1e-6
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
    if cache not in BYTES_PER_TOKEN or not 0 < seconds < math.inf or min(shape) < 1:
        raise UserError(f"{where}: {shape[0]} × {shape[1]}, {cache!r}, {row['median_us']} µs is no measurement")
    return Point(*shape, row["contestant"] if row["kind"] == PEER else f"ours, {cache} cache", cache, seconds)


def _shared(rows: list[dict[str, str]], column: str) -> float | None:
    """A figure that all rows share, None where the file does not have it."""
    try:
        value = float(rows[0].get(column) or "nan")
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
