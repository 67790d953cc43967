"""`mla isa run` and `mla isa plan`: gfx950 code executed on this CPU, what the sanitizer found and what was counted."""

import dataclasses
import math
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import gfx950
import sm_90
import submission
from bench.basics import UserError, unknown
from bench.modules import describe_error, execute
from bench.show.console import new_table, print_header, print_line, print_verdict
from bench.show.files import check_target, write_json
from bench.show.texts import bytes_text, plan_text, time_text
from gfx950.counters import least_seconds
from gfx950.machine import ORDERS
from reference import generate_input

_GENERATED = re.compile(r"(randn|zeros|ones|empty|arange):(\w+):(\d+(?:x\d+)*)")
_WORDS = {"True": True, "False": False, "None": None}
_SPELLINGS = (
    "a number, True, False or None; randn, zeros, ones, arange or empty (bytes that count as never written), a torch "
    "type and a shape, such as randn:bfloat16:16x576; or a .npy or .pt file"
)


@dataclass(frozen=True)
class Request:
    """What to run. kernel: FILE.py:NAME for a @triton.jit function, FILE or FILE:NAME for a gfx950 ELF."""

    kernel: str
    grid: str
    arguments: Sequence[str]
    constexprs: Sequence[str]
    num_warps: int | None
    num_stages: int | None
    lds_size: int | None
    order: str | None
    seed: int
    json_file: Path | None


def run(request: Request, out: Console, progress_console: Console) -> bool:
    """Run the kernel and show the report; whether there was no finding. Raises UserError for bad input."""
    if request.json_file:
        check_target(request.json_file)
    if request.order not in ORDERS:
        raise UserError(f"--order {request.order}: expected one of {', '.join(o for o in ORDERS if o)}")
    grid = _grid(request.grid)
    arguments = [_argument(text, request.seed + i) for i, text in enumerate(request.arguments)]
    with _errors_of_the_machine():
        code = _code(request, arguments)
        with _progress(progress_console) as report:
            result = gfx950.run(code, grid, arguments, order=request.order, seed=request.seed, progress=report)
    show(result, grid, out)
    if request.json_file:
        write_json(request.json_file, _as_json(result, grid))
    return result.ok


@contextmanager
def _errors_of_the_machine():
    try:
        yield
    except gfx950.Gfx950Error as error:
        raise UserError(str(error)) from error
    except MemoryError as error:
        raise UserError(
            f"the arguments, and what is kept of each of their bytes, do not fit in memory: {error}"
        ) from error


@contextmanager
def _progress(console: Console):
    columns = (TextColumn("workgroups"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# ---- What was asked for ----


def _grid(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){0,2}", text):
        raise UserError(f"--grid {text}: expected one to three positive numbers, such as 8 or 4,16")
    return tuple(int(n) for n in text.split(","))


def _argument(text: str, seed: int) -> Any:
    """One --arg as a kernel's argument."""
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    match = _GENERATED.fullmatch(text)
    if match:
        return _generated(*match.groups(), seed)
    path = Path(text)
    if path.suffix in (".npy", ".pt"):
        return _loaded(path)
    raise UserError(f"--arg {text}: expected {_SPELLINGS}")


def _generated(how: str, type_name: str, shape_text: str, seed: int) -> Any:
    dtype = getattr(torch, type_name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{how}:{type_name}:{shape_text}: torch has no type {type_name}")
    shape = [int(n) for n in shape_text.split("x")]
    try:
        values = _values(how, dtype, shape, seed)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:  # too large, or no conversion to that type
        reason = str(error).splitlines()[0]
        raise UserError(f"{how}:{type_name}:{shape_text} cannot be made: {reason}") from error
    return gfx950.Uninitialised(values) if how == "empty" else values


def _values(how: str, dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    if how == "randn":
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(dtype) if dtype.is_floating_point else (values * 100).to(dtype)
    if how == "arange":
        return torch.arange(math.prod(shape)).view(shape).to(dtype)
    return torch.full(shape, 1.0 if how == "ones" else 0.0).to(dtype)


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"--arg {path}: no such file")
    try:
        value = np.load(path) if path.suffix == ".npy" else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"--arg {path}: cannot be read ({error})") from error
    if not isinstance(value, (np.ndarray, torch.Tensor)):
        raise UserError(f"--arg {path} holds {type(value).__name__}; expected one tensor")
    return value


def _constexpr(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise UserError(f"--constexpr {text}: expected NAME=VALUE, such as BLOCK=64")
    if value in _WORDS:
        return name, _WORDS[value]
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _code(request: Request, arguments: list) -> gfx950.CodeObject:
    file, _, name = request.kernel.partition(":")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{file}: no such file; expected FILE.py:KERNEL or a gfx950 ELF file")
    if path.suffix != ".py":
        if request.constexprs or request.num_warps or request.num_stages:
            raise UserError(f"{file} is compiled already: --constexpr, --num-warps and --num-stages come too late")
        return gfx950.load(path.read_bytes(), name or None, lds_size=request.lds_size)
    if request.lds_size is not None:
        raise UserError("--lds is for ELF files: a Triton kernel says itself how much it needs")
    options = {"num_warps": request.num_warps, "num_stages": request.num_stages}
    options = {option: value for option, value in options.items() if value is not None}
    kernel = _triton_kernel(path, name)
    try:
        return gfx950.compile(kernel, arguments, dict(map(_constexpr, request.constexprs)), **options)
    except gfx950.Gfx950Error:
        raise
    except Exception as error:
        raise UserError(f"{request.kernel} does not compile: {type(error).__name__}: {error}") from error


def _triton_kernel_type() -> type:
    try:
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise UserError(f"a kernel's source needs Triton to be compiled ({error}): pip install triton") from error
    return JITFunction


def _triton_kernel(path: Path, name: str) -> Any:
    """What the file calls `name`, or its only kernel; `gfx950.compile` says if it is none."""
    kernel_type = _triton_kernel_type()
    try:
        module = execute(path, "isa_kernel")
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be loaded: {describe_error(error, path)}") from error
    if name and hasattr(module, name):
        return getattr(module, name)
    kernels = {key: value for key, value in vars(module).items() if isinstance(value, kernel_type)}
    if not name and len(kernels) == 1:
        return next(iter(kernels.values()))
    known = ", ".join(sorted(kernels)) or "none"
    raise UserError(f"{path} has no @triton.jit function {name!r}; expected FILE.py:KERNEL, with one of: {known}")


# ---- What came out ----


def show(result: gfx950.Result, grid: tuple[int, ...], out: Console) -> None:
    code, counters = result.code, result.counters
    facts = {
        "grid": f"{' × '.join(map(str, grid))}, {code.num_waves} waves a workgroup",
        "registers": _registers(code),
        "LDS": f"{bytes_text(code.lds_size)} a workgroup",
    }
    print_header(out, f"mla isa run, {code.name} on gfx950", facts)
    out.print(_instruction_table(counters))
    if counters.buffers:
        out.print(_buffer_table(counters))
    print_line(out, _lds_text(counters))
    limits = {name: seconds for name, seconds in counters.computed_time().items() if seconds}
    if limits:
        parts = ", ".join(f"{name} {time_text(seconds * 1e9)}" for name, seconds in limits.items())
        print_line(out, f"computed from an MI355X's published rates, not measured: {parts}")
    for finding in result.findings:
        print_line(out, str(finding), "red")
    print_verdict(out, "isa", result.ok)


def _registers(code: gfx950.CodeObject) -> str:
    vector, accumulation, spilled = (
        code.metadata.get(key, "?") for key in (".vgpr_count", ".agpr_count", ".vgpr_spill_count")
    )
    return f"{vector} VGPRs (of them {accumulation} for accumulation), {spilled} spilled"


def _instruction_table(counters: gfx950.Counters) -> Table:
    table = new_table("instructions", "executed", "a wave")
    for name, count in counters.instructions.most_common():
        table.add_row(name, f"{count:,}", f"{count / counters.waves:,.1f}")
    for name, count in counters.mfma.most_common():
        table.add_row(f"  {name}", f"{count:,}", f"{count / counters.waves:,.1f}")
    return table


def _buffer_table(counters: gfx950.Counters) -> Table:
    table = new_table("argument", "bytes", "read", "distinct", "written", "distinct")
    for buffer in counters.buffers:
        numbers = dataclasses.astuple(buffer)[1:]
        table.add_row(buffer.name, *(f"{number:,}" for number in numbers))
    return table


def _lds_text(counters: gfx950.Counters) -> str:
    return (
        f"LDS: {counters.lds_bytes_read:,} bytes read, {counters.lds_bytes_written:,} written, "
        f"{counters.lds_bank_conflicts:,} extra passes for bank conflicts"
    )


def _as_json(result: gfx950.Result, grid: tuple[int, ...]) -> dict[str, Any]:
    code = result.code
    return {
        "kernel": code.name,
        "grid": list(grid),
        "waves_per_workgroup": code.num_waves,
        "lds_size": code.lds_size,
        "registers": {key[1:]: value for key, value in code.metadata.items() if key.endswith("_count")},
        "counters": vars(result.counters) | {"buffers": [dataclasses.asdict(b) for b in result.counters.buffers]},
        "computed_seconds": result.counters.computed_time(),
        "findings": [dataclasses.asdict(finding) for finding in result.findings],
        "ok": result.ok,
    }


# ---- A plan of the fused kernel ----

_PLAN_TILES = 2, 6  # tiles of the two runs whose difference is the cost of a token


@dataclass(frozen=True)
class PlanReport:
    """What a fused plan's gfx950 code needs and does.

    code: of the decode kernel. tokens: those between the two runs that were counted. counts: executed instructions by
    class, and by name for matrix instructions, of all waves; lds_bytes: read and written; cache_bytes: of rows and
    scales. All for `tokens` tokens. seconds: what MI355X's published rates allow for the whole shape, by resource.
    """

    plan: submission.Plan
    shape: tuple[int, int]
    code: gfx950.CodeObject
    tokens: int
    counts: dict[str, int]
    lds_bytes: int
    cache_bytes: int
    seconds: dict[str, float]
    ok: bool


def report_plan(batch_size: int, kv_seq_len: int, table: str) -> PlanReport:
    """Compile and run the fused plan of a shape. Raises UserError if the shape's plan is of another runner."""
    if batch_size < 1 or kv_seq_len < 1:
        raise UserError(f"BATCH and KV_SEQ_LEN must be 1 or more, got {batch_size} and {kv_seq_len}")
    sm_90.install()
    if table not in submission.TABLES:
        raise unknown("table", table, submission.TABLES)
    plan = submission.plan_for(batch_size, kv_seq_len, table=table)
    if plan.runner != "fused":
        raise UserError(
            f"the plan of {batch_size} × {kv_seq_len} is {plan.runner}, and not our kernel for gfx950, the runner "
            "fused: try --table gfx950_fused"
        )
    _triton_kernel_type()
    with _errors_of_the_machine():
        few, many = (_run_plan(plan, tiles * plan.tile.block) for tiles in _PLAN_TILES)
    tokens = (_PLAN_TILES[1] - _PLAN_TILES[0]) * plan.tile.block

    def growth(read) -> int:
        return read(many.counters) - read(few.counters)

    names = [*many.counters.instructions, *many.counters.mfma]
    counts = {name: growth(lambda c, n=name: c.instructions[n] + c.mfma[n]) for name in names}
    lds_bytes = growth(lambda c: c.lds_bytes_read + c.lds_bytes_written)
    cache_bytes = growth(_cache_bytes)
    total = batch_size * kv_seq_len / tokens
    flops = {kind: growth(lambda c, k=kind: c.matrix_flops[k]) * total for kind in many.counters.matrix_flops}
    seconds = least_seconds(cache_bytes * total, flops, lds_bytes * total)
    return PlanReport(
        plan,
        (batch_size, kv_seq_len),
        many.code,
        tokens,
        counts,
        lds_bytes,
        cache_bytes,
        seconds,
        few.ok and many.ok,
    )


def _cache_bytes(counters: gfx950.Counters) -> int:
    """Of rows and scales, each byte once."""
    return sum(b.distinct_bytes_read for b in counters.buffers if b.name in ("cache_ptr", "scale_ptr"))


def _run_plan(plan: submission.Plan, length: int) -> gfx950.Result:
    """One sequence, in one split, on random data."""
    alone = replace(plan, num_splits=1)
    problem = submission.check_input(generate_input(1, 1, length, 1, device="cpu"))
    output = torch.empty((1, 16, 512), dtype=torch.bfloat16)
    kernel, grid, arguments, constants, options = submission.runner_of(plan).launches(problem, alone, output, "amd")[0]
    return gfx950.run(kernel, grid, list(arguments.values()), constexprs=constants, **options)


def show_plan(report: PlanReport, out: Console) -> None:
    plan, code = report.plan, report.code
    facts = {
        "plan": f"{plan_text(plan)}, tiles of {plan.tile.block}, {plan.tile.warps} waves, {plan.tile.stages} stages",
        "registers": _registers(code),
        "LDS": f"{bytes_text(code.lds_size)} a workgroup",
    }
    print_header(out, f"mla isa plan, {report.shape[0]} × {report.shape[1]} on gfx950", facts)
    table = new_table("a token of the loop", "count")
    for name, count in sorted(report.counts.items(), key=lambda item: -item[1]):
        if count:
            table.add_row(f"  {name}" if name.startswith("v_") else name, f"{count / report.tokens:,.2f}")
    table.add_row("bytes read from the cache", f"{report.cache_bytes / report.tokens:,.1f}")
    table.add_row("bytes through LDS", f"{report.lds_bytes / report.tokens:,.1f}")
    out.print(table)
    limits = ", ".join(f"{name} {time_text(seconds * 1e9)}" for name, seconds in report.seconds.items() if seconds)
    print_line(out, f"the whole shape, computed from an MI355X's published rates, not measured: {limits}")
    if not report.ok:
        print_line(out, "the sanitizer has findings: see tests/submission/test_fused.py", "red")
