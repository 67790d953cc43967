"""Arguments and options that commands share, or that are long to tell: names, help and completion, once each."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench import names


def _one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Completes to those of `known` that begin with what is there."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


# ---- what is run ----

Submission = Annotated[
    Path,
    typer.Argument(
        metavar="SUBMISSION",
        help="A .py file with a function custom_kernel(data); by default the project's own submission.py.",
        show_default=False,
        resolve_path=True,
    ),
]
BatchSize = Annotated[int, typer.Argument(metavar="BATCH", help="Sequences, 1 or more.")]
KvSeqLen = Annotated[int, typer.Argument(metavar="KV_SEQ_LEN", help="Tokens in the cache of each, 1 or more.")]
Shapes = Annotated[
    list[str],
    typer.Option(
        "--case",
        metavar="BATCHxKV",
        help="Use this shape, such as 64x8192, in place of the official ones; can be repeated.",
        autocompletion=_one_of(names.SHAPES),
    ),
]
_TABLE = {"metavar": "NAME", "autocompletion": _one_of(names.TABLES), "show_default": False}
Table = Annotated[
    str | None,
    typer.Option(help="Take the plans from this table, such as gfx950 or v50, in place of the usual one.", **_TABLE),
]
Tables = Annotated[
    list[str],
    typer.Option(
        "--table",
        help="Run this table of ours; can be repeated. By default the GPU's own, none with --plans.",
        **_TABLE,
    ),
]
Checks = Annotated[
    list[str],
    typer.Option(
        "--check",
        metavar="NAME",
        help=f"Carry out this check only: {', '.join(names.CHECKS)}; can be repeated.",
        autocompletion=_one_of(names.CHECKS),
    ),
]
Peers = Annotated[
    list[str],
    typer.Option(
        "--peer",
        metavar="NAME",
        help=f"Run this peer only: {', '.join(names.PEERS)}; can be repeated.",
        autocompletion=_one_of(names.PEERS),
    ),
]
Spaces = Annotated[
    list[str],
    typer.Option(
        "--plans",
        metavar="SPACE",
        help="Run plans of our own kernels: a cache format, runner (fused, or wgmma on sm_90), splits and the fields "
        "of Tile, alternatives between slashes, as in fp8,splits=8/16,block=64,merge=last/kernel. What is not named "
        "has its default; splits not named are tried automatically. Can be repeated. The fastest are listed, and "
        "printed as a table to paste.",
    ),
]
KernelArguments = Annotated[
    list[str],
    typer.Option(
        "--arg",
        metavar="SPEC",
        help="An argument, in order, constexprs left out: a number, True, False or None; randn, zeros, ones, arange or "
        "empty (never written), a torch type and a shape, such as randn:bfloat16:16x576; or a .npy or .pt file.",
    ),
]

# ---- how it is run, and where the results go ----

Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; by default the GPU if torch sees one.", show_default=False)
]
Limit = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="End a call of the submission that takes longer.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all results and the environment to FILE.")
]
