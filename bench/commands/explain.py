"""`mla explain`: the plan for a shape, why, what it launches, and the bytes it must move."""

import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from bench.basics import PROJECT_SUBMISSION, UserError
from bench.environment import device_name
from bench.show.console import new_table, print_header, print_line
from bench.show.texts import bytes_text, plan_text, time_text
from bench.traffic import BANDWIDTHS, Traffic, bandwidth_of, nanoseconds, traffic
from bench.worker.loading import load
from reference import PRECISIONS, default_device


def run(batch_size: int, kv_seq_len: int, table: str | None, as_json: bool, out: Console) -> None:
    """Print what is known of a shape. Raises as explain does."""
    explained = explain(batch_size, kv_seq_len, table)
    if as_json:
        print(json.dumps(explained, indent=2, ensure_ascii=False))
    else:
        _show(explained, out)


def explain(batch_size: int, kv_seq_len: int, table: str | None) -> dict[str, Any]:
    """All that is known of a shape before it runs, as plain data.

    Raises UserError for numbers below 1, an unknown table, or a submission that cannot be loaded or has a wrong plan.
    """
    for name, value in {"BATCH": batch_size, "KV_SEQ_LEN": kv_seq_len}.items():
        if value < 1:
            raise UserError(f"{name} must be 1 or more, got {value}")
    submission, device = load(PROJECT_SUBMISSION), default_device()
    if table is not None:
        submission.check_table(table)
    found = submission.explain(batch_size, kv_seq_len, table, device)
    precision = PRECISIONS[found.precision]
    moved = traffic(
        batch_size,
        kv_seq_len,
        precision.cache,
        casts_q=precision.q_cast != "none",
        num_splits=found.plan.num_splits,
        page_size=found.plan.page_size,
        partial_bytes=found.partial_dtype.itemsize,
    )
    return {
        "batch_size": batch_size,
        "kv_seq_len": kv_seq_len,
        "device": device_name(device),
        "plan": dataclasses.asdict(found.plan),
        "plan_text": plan_text(found.plan),
        "why": found.why,
        "precision": found.precision,
        "cache": precision.cache,
        "launches": list(found.kernels),
        "bytes": {**dataclasses.asdict(moved), "compulsory": moved.compulsory, "total": moved.total},
        "floors": _floors(moved),
    }


def _floors(moved: Traffic) -> list[dict[str, Any]]:
    return [
        {
            "device": bandwidth.device,
            "bytes_per_second": bandwidth.bytes_per_second,
            "source": bandwidth.source,
            "floor_ns": nanoseconds(moved.compulsory, bandwidth),
            "total_ns": nanoseconds(moved.total, bandwidth),
        }
        for bandwidth in BANDWIDTHS
    ]


def _show(explained: dict[str, Any], out: Console) -> None:
    facts = {
        "plan": explained["plan_text"],
        "why": explained["why"],
        "precision": f"{explained['precision']}: reads the {explained['cache']} cache",
        "launches": "; ".join(explained["launches"]),
        "device": explained["device"],
    }
    print_header(out, f"batch size {explained['batch_size']}, KV length {explained['kv_seq_len']}", facts)
    if explained["plan"]["page_size"] > 1:
        print_line(
            out,
            "  page_size above 1: aiter's gfx950 kernels read only the first token of each page, as counted below, "
            "and custom_kernel refuses the plan without kernels_honour_page_size=True",
            "yellow",
        )
    out.print(_bytes_table(explained["bytes"]))
    out.print(_floor_table(explained))


def _bytes_table(counts: dict[str, int | None]) -> Table:
    table = new_table("must move", "bytes", "")
    names = {
        "cache": "cache, read",
        "q": "q, read",
        "output": "output, written",
        "compulsory": "no kernel for this cache does with less",
        "q_cast": "fp8 copy of q, written and read",
        "partials": "partials of the splits, written and read",
        "total": "in all",
    }
    for key, name in names.items():
        count = counts[key]
        style = "bold" if key in ("compulsory", "total") else ""
        texts = ("aiter picks the splits", "not counted") if count is None else (f"{count:,}", bytes_text(count))
        table.add_row(name, *texts, style=style)
    return table


def _floor_table(explained: dict[str, Any]) -> Table:
    here = bandwidth_of(explained["device"])
    table = new_table("memory floor on", "TB/s", Column("from"), "at the least", "in all")
    for floor in explained["floors"]:
        name = floor["device"] + (", this device" if here and here.device == floor["device"] else "")
        rate = f"{floor['bytes_per_second'] / 1e12:.2f}"
        table.add_row(name, rate, floor["source"], time_text(floor["floor_ns"]), time_text(floor["total_ns"]))
    return table
