"""Times, bytes, rates, shapes and plans in a few words, as every command writes them."""

from typing import Any

from bench.traffic import Bandwidth
from task import TestSpec


def shape_text(args: TestSpec) -> str:
    return f"{args['batchsize']} × {args['kvseqlen']}"


def time_text(ns: float) -> str:
    """Nanoseconds in a unit that suits them."""
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns / 1e3:.3g} µs" if ns < 1e5 else f"{ns / 1e3:.0f} µs"


def bytes_text(count: int) -> str:
    """Bytes in decimal units, as bandwidths are given."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def rate_text(bandwidth: Bandwidth) -> str:
    return f"{bandwidth.bytes_per_second / 1e12:.3g} TB/s ({bandwidth.source})"


def plan_text(plan: Any) -> str:
    """A plan in a few words: "a8w8_persistent, 4 splits", "wgmma fp8, 4 splits". Any file's plan will do."""
    tile = getattr(plan, "tile", None)
    cache = f" {tile.cache}" if hasattr(tile, "cache") else ""
    splits = getattr(plan, "num_splits", None)
    page_size = getattr(plan, "page_size", 1)
    count = "aiter's splits" if splits is None else "1 split" if splits == 1 else f"{splits} splits"
    paging = f", page size {page_size}" if page_size > 1 else ""
    return f"{getattr(plan, 'runner', plan)}{cache}, {count}{paging}"
