"""The command line `mla`: arguments, help, exit codes. The commands themselves are modules beside this one.

They are imported when called: torch takes seconds to load, and --help needs none of it.
"""

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from bench.basics import PROJECT_SUBMISSION, Mode, UserError

app = typer.Typer(
    help="The amd-mixed-mla leaderboard at home: run, verify, explain a submission, mirror the server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

isa = typer.Typer(help="gfx950 (MI355X) machine code on this CPU.", no_args_is_help=True)
app.add_typer(isa, name="isa")


def main() -> None:
    app()


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(error.exit_code) from None


def _load(name: str) -> ModuleType:
    """A module of bench. Raises UserError where no usable aiter is installed on a ROCm machine."""
    try:
        return importlib.import_module(f"bench.{name}")
    except RuntimeError as error:
        raise UserError(str(error)) from error


@app.command()
def run(
    submission: Annotated[
        Path,
        typer.Argument(
            metavar="SUBMISSION",
            help="The .py file to run; it needs a function custom_kernel(data).",
            show_default=False,
        ),
    ] = PROJECT_SUBMISSION,
    mode: Annotated[
        Mode,
        typer.Option(
            help="test: one checked call a case. benchmark: checked once, then timed on the same data. leaderboard: "
            "timed on fresh data, each call checked. profile: one warm call under torch's profiler."
        ),
    ] = Mode.TEST,
    table: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run the plans of the submission's table NAME, such as gfx950 or v50."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCHxKV",
            help="Run this shape, such as 64x8192, in place of the official cases; can be repeated. The seed is that "
            "of the official case of this shape, else 1.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Cap batch sizes at 4 (shapes that become equal run once) and timed calls at 10 a case."
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results and the environment to FILE.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; by default the GPU if torch sees one.", show_default=False)
    ] = None,
) -> None:
    """Run a submission by the official protocol, with the exact check beside the official one.

    SUBMISSION is by default the project's own submission.py. The last line is `check: pass` (exit code 0) or
    `check: fail` (exit code 1); wrong usage exits with 2. Results go to stdout, progress to stderr.
    """
    with _errors_in_one_line():
        command, report = _load("commands.run"), _load("show.console")
        request = command.Request(submission.resolve(), mode, table, tuple(case or ()), quick, json_file, device)
        passed = command.run(request, report.console(), report.console(stderr=True))
    raise typer.Exit(0 if passed else 1)


@app.command()
def verify(
    submission: Annotated[
        Path,
        typer.Argument(help="The .py file to verify; it needs a function custom_kernel(data).", show_default=False),
    ] = PROJECT_SUBMISSION,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Leave out shapes above 300,000 tokens, and look for 400 needles a shape."),
    ] = False,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="BATCHxKV", help="Use this shape in place of the eight benchmarks; can be repeated."),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Carry out this check only: exact, tokens, strays, fresh, hard, repeat, inputs, upload; repeatable.",
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run the plans of the submission's table NAME, such as gfx950 or v50."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=1, help="What all data follows from; by default a new one each time.")
    ] = None,
    limit: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="End a call of the submission that takes longer.")
    ] = 300.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all findings and the environment to FILE.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; by default the GPU if torch sees one.", show_default=False)
    ] = None,
) -> None:
    """Check what the official check cannot see: every token, stray reads, stale state, hard numbers, upload rules.

    Works on any file with custom_kernel(data). The last line is `verify: pass` (exit code 0, all checks hold) or
    `verify: fail` (exit code 1); wrong usage exits with 2. Each failure is listed with what it means.
    """
    with _errors_in_one_line():
        command, report = _load("commands.verify"), _load("show.console")
        request = command.Request(
            submission.resolve(), tuple(case or ()), tuple(check or ()), quick, seed, table, json_file, device, limit
        )
        passed = command.run(request, report.console(), report.console(stderr=True))
    raise typer.Exit(0 if passed else 1)


@app.command()
def cost() -> None:
    """Measure the host time of our submission's warm call, per runner, with nothing behind mla_decode_fwd."""
    with _errors_in_one_line():
        command, report = _load("commands.cost"), _load("show.console")
        device = command.default_device()
        command.show(command.measure(device), device, report.console())


@app.command()
def compare(
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="BATCHxKV", help="Use this shape in place of the eight benchmarks; can be repeated."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run this table of submission.py; can be repeated. By default the GPU's own, none with --plans.",
        ),
    ] = None,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPACE",
            help="Run plans of our own kernels: a cache format, runner (fused, or wgmma on sm_90), splits and the "
            "fields of Tile, alternatives between slashes, as in fp8,splits=8/16,block=64,merge=last/kernel. What is "
            "not named has its default; splits not named are tried automatically. Can be repeated. The fastest "
            "are listed, and printed as a table to paste.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run this peer only: flashmla-bf16, flashmla-fp8, flashinfer-bf16, flashinfer-fp8, plain; repeatable.",
        ),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Run no peer.")] = False,
    rounds: Annotated[int, typer.Option(help="Timed calls of each contestant and shape.")] = 15,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write a row a contestant and shape to FILE, for `mla roofline`."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the same and all times to FILE.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cuda:N.", show_default=False)] = None,
    commit: Annotated[
        str | None,
        typer.Option(help="The commit to note in the results where this is no git checkout.", show_default=False),
    ] = None,
) -> None:
    """Time our kernel beside its peers on one GPU, in one process, on the same fresh data, all outputs checked.

    The last line is `check: pass` (exit code 0) or `check: fail` (exit code 1: something of ours was wrong or did not
    run; of a space of plans, one that runs for each shape is enough); wrong usage exits with 2.
    """
    with _errors_in_one_line():
        if peer and no_peers:
            raise UserError("--peer and --no-peers exclude each other: give one of them")
        command, report = _load("commands.compare"), _load("show.console")
        request = command.Request(
            tuple(case or ()),
            tuple(table) if table else None,
            tuple(plans or ()),
            tuple(peer) if peer else () if no_peers else None,
            rounds,
            csv_file,
            json_file,
            device,
            commit,
        )
        passed = command.run(request, report.console(), report.console(stderr=True))
    raise typer.Exit(0 if passed else 1)


@app.command()
def popcorn(
    mode: Annotated[Mode, typer.Argument(metavar="MODE", help="test, benchmark, leaderboard or profile.")],
    case_file: Annotated[
        Path,
        typer.Argument(
            metavar="CASEFILE", help="One case a line: `batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220`."
        ),
    ],
    submission: Annotated[
        Path, typer.Option(help="The .py file to run; by default the project's submission.py.", show_default=False)
    ] = PROJECT_SUBMISSION,
) -> None:
    """Mirror the leaderboard server: official check only, `key: value` lines on the descriptor in POPCORN_FD.

    For example: POPCORN_FD=3 mla popcorn test cases.txt 3>out. POPCORN_SEED, if set, is combined into each case's seed.

    Exit codes: 0 passed (and any leaderboard run), 112 failed, 111 no POPCORN_FD, 113 unreadable cases, 2 wrong usage.
    """
    with _errors_in_one_line():
        code = _load("commands.popcorn").run(mode, case_file, submission.resolve())
    raise typer.Exit(code)


@app.command()
def roofline(
    results: Annotated[Path, typer.Argument(metavar="CSV", help="Measurements, such as results/h200_fused.csv.")],
    picture: Annotated[Path, typer.Option("--out", metavar="FILE", help="The picture: .png, .svg or .pdf.")],
) -> None:
    """Draw measured times as bandwidths beside the roof of memory and launch, the fastest of each shape and cache."""
    with _errors_in_one_line():
        _load("show.picture").draw(results, picture)


@app.command(context_settings={"ignore_unknown_options": True})  # -1 is a wrong number here, no option
def explain(
    batch_size: Annotated[int, typer.Argument(metavar="BATCH", help="Sequences, 1 or more.")],
    kv_seq_len: Annotated[int, typer.Argument(metavar="KV_SEQ_LEN", help="Tokens in the cache of each, 1 or more.")],
    table: Annotated[
        str | None, typer.Option(metavar="NAME", help="Look in this table, by default the device's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Print the plan for a shape, why, what it launches, the bytes it must move and how fast memory could move them."""
    with _errors_in_one_line():
        command, report = _load("commands.explain"), _load("show.console")
        explained = command.explain(batch_size, kv_seq_len, table)
    if as_json:
        print(json.dumps(explained, indent=2, ensure_ascii=False))
    else:
        command.show(explained, report.console())


@isa.command("run")
def isa_run(
    kernel: Annotated[
        str,
        typer.Argument(metavar="KERNEL", help="FILE.py:NAME, a @triton.jit function; or a gfx950 ELF, FILE[:NAME]."),
    ],
    grid: Annotated[str, typer.Option(metavar="X[,Y[,Z]]", help="Workgroups in each direction.")] = "1",
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="SPEC",
            help="An argument, in order, constexprs left out: a number, True, False or None; randn, zeros, ones, "
            "arange or empty (never written), a torch type and a shape, such as randn:bfloat16:16x576; or a .npy or "
            ".pt file.",
        ),
    ] = None,
    constexpr: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A tl.constexpr, such as BLOCK=64; repeatable.")
    ] = None,
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
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write counters and findings to FILE.")
    ] = None,
) -> None:
    """Run a kernel's gfx950 code instruction by instruction, with the eyes of a sanitizer.

    Reports accesses outside the arguments, reads of what was never written, LDS races and misaligned accesses, and
    counts instructions and bytes. The last line is `isa: pass` (exit code 0) or `isa: fail` (exit code 1); wrong usage
    exits with 2. It says nothing about time.
    """
    with _errors_in_one_line():
        command, report = _load("commands.isa"), _load("show.console")
        request = command.Request(
            kernel,
            grid,
            tuple(argument or ()),
            tuple(constexpr or ()),
            num_warps,
            num_stages,
            lds_size,
            order,
            seed,
            json_file,
        )
        passed = command.run(request, report.console(), report.console(stderr=True))
    raise typer.Exit(0 if passed else 1)


@isa.command("plan")
def isa_plan(
    batch_size: Annotated[int, typer.Argument(metavar="BATCH", help="Sequences, 1 or more.")],
    kv_seq_len: Annotated[int, typer.Argument(metavar="KV_SEQ_LEN", help="Tokens in the cache of each, 1 or more.")],
    table: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Look in this table, by default gfx950_fused.", show_default=False),
    ] = None,
) -> None:
    """Report the gfx950 code of a fused plan: registers, LDS, instructions and bytes a token, and the least time.

    The code is compiled by Triton's AMD back end and executed on this CPU for a few tiles. The time is what an MI355X's
    published rates of memory, matrix units and LDS allow: computed, not measured.
    """
    with _errors_in_one_line():
        command, report = _load("commands.isa"), _load("show.console")
        command.show_plan(command.report_plan(batch_size, kv_seq_len, table), report.console())
