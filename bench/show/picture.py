"""The roofline: each shape's measured bandwidth under the roof that memory and a launch set."""

import io
import itertools
from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.contest.measurements import Measurements, Point
from bench.traffic import bandwidth_of

FORMATS = (".png", ".svg", ".pdf")
_LAUNCH_SECONDS = {"H200": 3.2e-6}  # an empty kernel between two events, measured there; for results that do not say
_LABELLED = "ours, fp8 cache"  # the line whose points are named
# Offset and alignment of the names, by turns below and above the line: shapes of nearly as many bytes are neighbours.
_PLACES = (((5, -11), "left"), ((-5, 6), "right"))


def roofline(measured: Measurements, suffix: str) -> bytes:
    """The picture as a file of the kind that `suffix`, one of FORMATS, names."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    _draw_lines(axes, measured)
    _draw_roof(axes, measured)
    axes.set(xlabel="bytes that must move (cache, q, output)", ylabel="bytes per second")
    axes.set(title=f"MLA decode on {measured.gpu}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format=suffix.removeprefix("."))
    return drawn.getvalue()


def _draw_lines(axes: Axes, measured: Measurements) -> None:
    lines: dict[str, list[Point]] = defaultdict(list)
    for point in sorted(measured.points, key=lambda p: p.bytes):
        lines[point.line].append(point)
    for (line, group), marker in zip(sorted(lines.items()), itertools.cycle("osD^vPX*")):
        style = "-" if line.startswith("ours") else ":"
        axes.plot([p.bytes for p in group], [p.rate for p in group], style + marker, label=line, markersize=5)
    for point, (place, side) in zip(lines.get(_LABELLED, ()), itertools.cycle(_PLACES)):
        name = f"{point.batch_size} / {point.kv_seq_len}"
        axes.annotate(name, (point.bytes, point.rate), xytext=place, textcoords="offset points", ha=side, fontsize=8)


def _draw_roof(axes: Axes, measured: Measurements) -> None:
    """The lower of memory's bandwidth and of what the time of one launch allows, as far as they are known."""
    known = bandwidth_of(measured.gpu)
    rate = measured.rate or (known and known.bytes_per_second)
    launch = measured.launch or (known and _LAUNCH_SECONDS.get(known.device))
    if rate is None:
        return
    sizes = sorted(p.bytes for p in measured.points)
    corner = [rate * launch] if launch and sizes[0] < rate * launch < sizes[-1] else []
    ends = [sizes[0], *corner, sizes[-1]]
    label = f"memory at {rate / 1e12:.3g} TB/s" + (f", an empty launch {launch * 1e6:.1f} µs" if launch else "")
    axes.plot(ends, [min(rate, size / launch) if launch else rate for size in ends], "k-", linewidth=1, label=label)
