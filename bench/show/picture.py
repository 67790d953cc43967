"""`mla roofline`: measured times as a picture, each shape's bandwidth beside the roof of memory and of a launch."""

import csv
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as problem:
    raise RuntimeError(f"`mla roofline` needs the plots extra ({problem}): pip install -e '.[plots]'") from problem

from bench.basics import UserError
from bench.contest.rounds import PEER
from bench.traffic import BYTES_PER_TOKEN, bandwidth_of, traffic

LAUNCH_SECONDS = {"H200": 3.2e-6}  # an empty kernel between two events, measured there; for results that do not say
COLUMNS = ("batch_size", "kv_seq_len", "kind", "contestant", "cache", "median_us", "gpu")
_FORMATS = (".png", ".svg", ".pdf")


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
class Results:
    """Of a results file: its GPU, the fastest measurement of each shape and line, and the roof that was measured beside
    them: bytes a second, and the seconds of an empty launch; None where the file does not say."""

    gpu: str
    points: list[Point]
    rate: float | None
    launch: float | None


def read_results(path: Path) -> Results:
    """Ours make up a line a cache format, each peer a line. Rows with a fault are left out. Raises UserError for a file
    of another kind."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not rows or any(column not in rows[0] for column in COLUMNS):
        raise UserError(f"{path} is no results file: expected a CSV with the columns {', '.join(COLUMNS)}")
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
    rate, launch = _measured(rows, "bytes_per_second"), _measured(rows, "launch_us")
    return Results(gpus.pop(), list(fastest.values()), rate, launch and launch * 1e-6)


def _point(row: dict[str, str], where: str) -> Point:
    try:
        shape, cache = (int(row["batch_size"]), int(row["kv_seq_len"])), row["cache"]
        seconds = float(row["median_us"]) * 1e-6
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
    if cache not in BYTES_PER_TOKEN or not 0 < seconds < math.inf or min(shape) < 1:
        raise UserError(f"{where}: {shape[0]} × {shape[1]}, {cache!r}, {row['median_us']} µs is no measurement")
    return Point(*shape, row["contestant"] if row["kind"] == PEER else f"ours, {cache} cache", cache, seconds)


def _measured(rows: list[dict[str, str]], column: str) -> float | None:
    """A figure that all rows share, None where it is not there."""
    try:
        value = float(rows[0].get(column) or "nan")
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def draw(results: Path, picture: Path) -> None:
    """Draw the picture of a results file. Raises UserError for another file, or a picture that cannot be written."""
    if picture.suffix not in _FORMATS:
        raise UserError(f"--out {picture}: expected a name that ends in {', '.join(_FORMATS)}")
    if not picture.resolve().parent.is_dir():
        raise UserError(f"--out {picture}: there is no folder {picture.resolve().parent}: create it first")
    read = read_results(results)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    lines: dict[str, list[Point]] = defaultdict(list)
    for point in sorted(read.points, key=lambda p: p.bytes):
        lines[point.line].append(point)
    for (line, group), marker in zip(sorted(lines.items()), itertools.cycle("osD^vPX*")):
        style = "-" if line.startswith("ours") else ":"
        axes.plot([p.bytes for p in group], [p.rate for p in group], style + marker, label=line, markersize=5)
    # By turns above and below the line: shapes of nearly as many bytes are neighbours.
    for point, (place, side) in zip(
        lines.get("ours, fp8 cache", ()), itertools.cycle([((5, -11), "left"), ((-5, 6), "right")])
    ):
        name = f"{point.batch_size} / {point.kv_seq_len}"
        axes.annotate(name, (point.bytes, point.rate), xytext=place, textcoords="offset points", ha=side, fontsize=8)
    _draw_roof(axes, read)
    axes.set(xlabel="bytes that must move (cache, q, output)", ylabel="bytes a second")
    axes.set(title=f"MLA decode on {read.gpu}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    try:
        figure.savefig(picture, dpi=120)
    except OSError as error:
        raise UserError(f"--out {picture} cannot be written: {error}") from error


def _draw_roof(axes: Axes, read: Results) -> None:
    """The least of memory's bandwidth and of what one launch's time allows, where both are known."""
    known = bandwidth_of(read.gpu)
    rate = read.rate or (known and known.bytes_per_second)
    launch = read.launch or (known and LAUNCH_SECONDS.get(known.device))
    if rate is None:
        return
    sizes = sorted(p.bytes for p in read.points)
    corner = [rate * launch] if launch and sizes[0] < rate * launch < sizes[-1] else []
    ends = [sizes[0], *corner, sizes[-1]]
    label = f"memory at {rate / 1e12:.3g} TB/s" + (f", an empty launch {launch * 1e6:.1f} µs" if launch else "")
    axes.plot(ends, [min(rate, size / launch) if launch else rate for size in ends], "k-", linewidth=1, label=label)
