"""The command line `mla`: what can be asked for, and how it ends: in a verdict, in one line of error, interrupted.

A function declares a command: its options and help. What it does is a module of bench/commands, imported when it is
called: torch takes seconds to load, and --help needs none of it.
"""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

import typer

from bench import options
from bench.basics import LIMIT_SECONDS, PROJECT_SUBMISSION, Mode, UserError
from bench.requirements import check_torch, missing
from bench.show.console import console
from bench.versions import summary

INTERRUPTED = 130  # as shells say it: 128, and SIGINT's number

app = typer.Typer(
    help="The amd-mixed-mla leaderboard at home: run, verify, explain a submission, mirror the server.",
    epilog="Example: mla run --quick",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
isa = typer.Typer(
    help="gfx950 (MI355X) machine code on this CPU.",
    epilog="Example: mla isa plan 64 8192",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(isa, name="isa")


def main() -> None:
    """`mla`, also where it is called as `python -m bench`."""
    app(prog_name="mla")


@contextlib.contextmanager
def _command(name: str) -> Iterator[ModuleType]:
    """The module of a command. What is wrong with its use, what is missing for it, and an interrupt, end in one line
    and an exit code."""
    try:
        try:
            check_torch()
            module = importlib.import_module(f"bench.commands.{name}")
        except ImportError as error:
            raise missing(f"mla {name}", error) from error
        except RuntimeError as error:  # no usable aiter on a ROCm machine
            raise UserError(str(error)) from error
        yield module
    except UserError as error:
        _end(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)


def _end(line: str, exit_code: int) -> NoReturn:
    console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code) from None


def _verdict(passed: bool) -> NoReturn:
    raise typer.Exit(0 if passed else 1)


def _show_version(asked: bool) -> None:
    if asked:
        for name, value in summary().items():
            typer.echo(f"{name:<7} {value}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of mla, torch, Triton and aiter, and the commit, and exit.",
        ),
    ] = False,
) -> None:
    """What may stand before a command."""


@app.command(epilog="Example: mla run --case 64x8192, or mla run mine.py --mode benchmark --quick")
def run(
    submission: options.Submission = PROJECT_SUBMISSION,
    mode: Annotated[
        Mode,
        typer.Option(
            help="test: one checked call a case. benchmark: checked once, then timed on the same data. leaderboard: "
            "timed on fresh data, each call checked. profile: one warm call under torch's profiler."
        ),
    ] = Mode.TEST,
    table: options.Table = None,
    shapes: options.Shapes = (),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Cap batch sizes at 4 (shapes that become equal run once) and timed calls at 10 a case."
        ),
    ] = False,
    json: options.Json = None,
    device: options.Device = None,
    limit: options.Limit = LIMIT_SECONDS,
) -> None:
    """Run a submission by the official protocol, with the exact check beside the official one.

    The seed of a shape is that of the official case of this shape, else 1. The last line is `check: pass` (exit code 0)
    or `check: fail` (exit code 1); wrong usage exits with 2. Results go to stdout, progress to stderr.
    """
    with _command("run") as command:
        request = command.Request(submission, mode, table, shapes, quick, json, device, limit)
        _verdict(command.run(request, console(), console(stderr=True)))


@app.command(epilog="Example: mla verify mine.py --quick, or mla verify --check tokens --case 4x1024")
def verify(
    submission: options.Submission = PROJECT_SUBMISSION,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Leave out shapes above 300,000 tokens, and look for 400 needles a shape."),
    ] = False,
    shapes: options.Shapes = (),
    checks: options.Checks = (),
    table: options.Table = None,
    seed: Annotated[
        int | None, typer.Option(min=1, help="What all data follows from; by default a new one each time.")
    ] = None,
    limit: options.Limit = LIMIT_SECONDS,
    json: options.Json = None,
    device: options.Device = None,
) -> None:
    """Check what the official check cannot see: every token, stray reads, stale state, hard numbers, upload rules.

    Works on any file with custom_kernel(data), at the eight benchmark shapes. The last line is `verify: pass` (exit
    code 0, all checks hold) or `verify: fail` (exit code 1); wrong usage exits with 2. Each failure is listed with what
    it means.
    """
    with _command("verify") as command:
        request = command.Request(submission, shapes, checks, quick, seed, table, json, device, limit)
        _verdict(command.run(request, console(), console(stderr=True)))


@app.command(epilog="Example: mla explain 64 8192", context_settings={"ignore_unknown_options": True})
def explain(  # -1 is a wrong number here, no option
    batch_size: options.BatchSize,
    kv_seq_len: options.KvSeqLen,
    table: options.Table = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Print the plan for a shape, why, what it launches, the bytes it must move and how fast memory could move them."""
    with _command("explain") as command:
        command.run(batch_size, kv_seq_len, table, as_json, console())


@app.command(epilog="Example: mla compare --case 64x8192 --csv results.csv")
def compare(
    shapes: options.Shapes = (),
    tables: options.Tables = (),
    spaces: options.Spaces = (),
    peers: options.Peers = (),
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Run no peer.")] = False,
    rounds: Annotated[int, typer.Option(help="Timed calls of each contestant and shape.")] = 15,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write a row a contestant and shape to FILE, for `mla roofline`."),
    ] = None,
    json: options.Json = None,
    device: options.Device = None,
    commit: Annotated[
        str | None,
        typer.Option(help="The commit to note in the results where this is no git checkout.", show_default=False),
    ] = None,
) -> None:
    """Time our kernel beside its peers on one GPU, in one process, on the same fresh data, all outputs checked.

    At the eight benchmark shapes. The last line is `check: pass` (exit code 0) or `check: fail` (exit code 1: something
    of ours was wrong or did not run; of a space of plans, one that runs for each shape is enough); wrong usage exits
    with 2.
    """
    with _command("compare") as command:
        request = command.Request(shapes, tables, spaces, peers, no_peers, rounds, csv, json, device, commit)
        _verdict(command.run(request, console(), console(stderr=True)))


@app.command(epilog="Example: mla roofline results/h200_fused.csv --out roofline.png")
def roofline(
    results: Annotated[Path, typer.Argument(metavar="CSV", help="Measurements, as `mla compare --csv` writes them.")],
    picture: Annotated[Path, typer.Option("--out", metavar="FILE", help="The picture: .png, .svg or .pdf.")],
) -> None:
    """Draw measured times as bandwidths beside the roof of memory and launch, the fastest of each shape and cache."""
    with _command("roofline") as command:
        command.run(results, picture)


@app.command(epilog="Example: mla cost")
def cost() -> None:
    """Measure the host time of our submission's warm call, per runner, with nothing behind the kernels."""
    with _command("cost") as command:
        device = command.default_device()
        command.show(command.measure(device), device, console())


@app.command(epilog="Example: compute-sanitizer --tool memcheck mla sanitize")
def sanitize() -> None:
    """Run every tile of the GPU's tables on ragged and empty sequences, small enough for a GPU sanitizer.

    A line a plan, `ok` or `WRONG`. Exit code 0 if all are ok, 1 if not, 2 without a GPU.
    """
    with _command("sanitize") as command:
        raise typer.Exit(command.main())


@app.command(epilog="Example: POPCORN_FD=3 mla popcorn test cases.txt 3>out")
def popcorn(
    mode: Annotated[Mode, typer.Argument(metavar="MODE", help="test, benchmark, leaderboard or profile.")],
    case_file: Annotated[
        Path,
        typer.Argument(
            metavar="CASEFILE", help="One case a line: `batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220`."
        ),
    ],
    submission: Annotated[
        Path,
        typer.Option(
            help="The .py file to run; by default the project's submission.py.", show_default=False, resolve_path=True
        ),
    ] = PROJECT_SUBMISSION,
) -> None:
    """Mirror the leaderboard server: official check only, `key: value` lines on the descriptor in POPCORN_FD.

    POPCORN_SEED, if set, is combined into each case's seed.

    Exit codes: 0 passed (and any leaderboard run), 112 failed, 111 no POPCORN_FD, 113 unreadable cases, 2 wrong usage.
    """
    with _command("popcorn") as command:
        raise typer.Exit(command.run(mode, case_file, submission))


@isa.command("run", epilog="Example: mla isa run kernels.py:scale --arg zeros:float32:64 --constexpr BLOCK=64")
def isa_run(
    kernel: Annotated[
        str,
        typer.Argument(metavar="KERNEL", help="FILE.py:NAME, a @triton.jit function; or a gfx950 ELF, FILE[:NAME]."),
    ],
    grid: Annotated[str, typer.Option(metavar="X[,Y[,Z]]", help="Workgroups in each direction.")] = "1",
    arguments: options.KernelArguments = (),
    constexprs: Annotated[
        list[str],
        typer.Option("--constexpr", metavar="NAME=VALUE", help="A tl.constexpr, such as BLOCK=64; can be repeated."),
    ] = (),
    num_warps: Annotated[
        int | None, typer.Option(min=1, max=16, help="Waves a workgroup, Triton's default if not given.")
    ] = None,
    num_stages: Annotated[int | None, typer.Option(min=1, max=8, help="Triton's pipeline depth.")] = None,
    lds_size: Annotated[
        int | None, typer.Option("--lds", min=0, help="Bytes of LDS given at launch, for an ELF that needs them.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="Another order than the plain one: shuffled, reversed, or lockstep (waves take turns).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="What random arguments and the shuffled order follow from.")
    ] = 0,
    json: options.Json = None,
) -> None:
    """Run a kernel's gfx950 code instruction by instruction, with the eyes of a sanitizer.

    Reports accesses outside the arguments, reads of what was never written, LDS races and misaligned accesses, and
    counts instructions and bytes. The last line is `isa: pass` (exit code 0) or `isa: fail` (exit code 1); wrong usage
    exits with 2. It says nothing about time.
    """
    with _command("isa") as command:
        request = command.Request(
            kernel, grid, arguments, constexprs, num_warps, num_stages, lds_size, order, seed, json
        )
        _verdict(command.run(request, console(), console(stderr=True)))


@isa.command("plan", epilog="Example: mla isa plan 64 8192")
def isa_plan(
    batch_size: options.BatchSize, kv_seq_len: options.KvSeqLen, table: options.Table = "gfx950_fused"
) -> None:
    """Report the gfx950 code of a fused plan: registers, LDS, instructions and bytes per token, and the least time.

    The code is compiled by Triton's AMD back end and executed on this CPU for a few tiles. The time is what an MI355X's
    published rates of memory, matrix units and LDS allow: computed, not measured.
    """
    with _command("isa") as command:
        command.show_plan(command.report_plan(batch_size, kv_seq_len, table), console())
