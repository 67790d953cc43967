"""`mla roofline`: measured times as a picture, each shape's bandwidth beside the roof of memory and of a launch."""

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

try:
    from matplotlib.figure import Figure
except ImportError as problem:
    raise RuntimeError(f"`mla roofline` needs the plots extra ({problem}): pip install -e '.[plots]'") from problem

from bench.basics import UserError
from bench.roofline import BYTES_PER_TOKEN, bandwidth_of, traffic

LAUNCH_SECONDS = {"H200": 3.2e-6}  # an empty kernel between two events, measured there
COLUMNS = ("batch_size", "kv_seq_len", "table", "cache", "median_us", "gpu")
_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Point:
    """One measurement: what it read, how long it took."""

    batch_size: int
    kv_seq_len: int
    cache: str
    seconds: float

    @property
    def bytes(self) -> int:
        return traffic(self.batch_size, self.kv_seq_len, self.cache).compulsory


def read_points(path: Path) -> tuple[str, list[Point]]:
    """The GPU of a results file, and the fastest measurement of each shape and cache. Raises UserError for others."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not rows or any(column not in rows[0] for column in COLUMNS):
        raise UserError(f"{path} is no results file: expected a CSV with the columns {', '.join(COLUMNS)}")
    fastest: dict[tuple[int, int, str], float] = {}
    for i, row in enumerate(rows, 2):
        try:
            key = int(row["batch_size"]), int(row["kv_seq_len"]), row["cache"]
            seconds = float(row["median_us"]) * 1e-6
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}, line {i}: {error}") from error
        if key[2] not in BYTES_PER_TOKEN or min(*key[:2], seconds) <= 0:
            raise UserError(
                f"{path}, line {i}: {key[0]} × {key[1]}, {key[2]!r}, {row['median_us']} µs is no measurement"
            )
        fastest[key] = min(seconds, fastest.get(key, seconds))
    gpus = {row["gpu"] for row in rows}
    if len(gpus) > 1:
        raise UserError(f"{path} holds several GPUs ({', '.join(sorted(gpus))}): one picture shows one")
    return gpus.pop(), [Point(*key, seconds) for key, seconds in fastest.items()]


def draw(results: Path, picture: Path) -> None:
    """Draw the picture of a results file. Raises UserError for another file, or a picture that cannot be written."""
    if picture.suffix not in _FORMATS:
        raise UserError(f"--out {picture}: expected a name that ends in {', '.join(_FORMATS)}")
    if not picture.resolve().parent.is_dir():
        raise UserError(f"--out {picture}: there is no folder {picture.resolve().parent}: create it first")
    gpu, points = read_points(results)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    by_cache: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_cache[point.cache].append(point)
    for (cache, group), marker in zip(sorted(by_cache.items()), "osD^v", strict=False):
        axes.plot([p.bytes for p in group], [p.bytes / p.seconds for p in group], marker, label=f"{cache} cache")
    for point in points:
        if point.cache == "fp8":
            name = f"{point.batch_size} / {point.kv_seq_len}"
            place = (point.bytes, point.bytes / point.seconds)
            axes.annotate(name, place, xytext=(5, -11), textcoords="offset points", fontsize=8)
    _draw_roof(axes, gpu, sorted(p.bytes for p in points))
    axes.set(xlabel="bytes that must move (cache, q, output)", ylabel="bytes a second", title=f"MLA decode on {gpu}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    try:
        figure.savefig(picture, dpi=120)
    except OSError as error:
        raise UserError(f"--out {picture} cannot be written: {error}") from error


def _draw_roof(axes, gpu: str, sizes: list[int]) -> None:
    """The least of memory's bandwidth and of what one launch's time allows, where both are known."""
    bandwidth = bandwidth_of(gpu)
    if bandwidth is None:
        return
    rate, launch = bandwidth.bytes_per_second, LAUNCH_SECONDS.get(bandwidth.device)
    corner = [rate * launch] if launch and sizes[0] < rate * launch < sizes[-1] else []
    ends = [sizes[0], *corner, sizes[-1]]
    label = f"memory at {rate / 1e12:.2g} TB/s" + (f", an empty launch {launch * 1e6:.1f} µs" if launch else "")
    axes.plot(ends, [min(rate, size / launch) if launch else rate for size in ends], "k-", linewidth=1, label=label)
