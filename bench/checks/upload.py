"""upload: what the server checks of a file's text before it runs it, and imports that it lacks."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.checks.scope import Outcome, Scope
from bench.worker.subject import Subject

_HEADER = (("leaderboard", "amd-mixed-mla"), ("gpu", "MI355X"))
_FORBIDDEN = "stream"
_MOST_BYTES = 1_000_000
_ON_THE_SERVER = {"aiter", "numpy", "task", "torch", "triton"}


def upload_rules(subject: Subject, scope: Scope) -> Outcome:
    size = subject.path.stat().st_size
    return Outcome(upload_faults(subject.path), f"{size:,} bytes: size, encoding, letters, header, imports")


def upload_faults(path: Path) -> list[str]:
    """A sentence for each rule that the file breaks."""
    raw = path.read_bytes()
    faults = [f"{len(raw):,} bytes, at most {_MOST_BYTES:,} are taken"] if len(raw) > _MOST_BYTES else []
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return [*faults, f"not UTF-8: {error}"]
    lines = [i for i, line in enumerate(text.splitlines(), 1) if _FORBIDDEN in line.lower()]
    if lines:
        faults.append(f"the letters {_FORBIDDEN!r} in line {', '.join(map(str, lines))}: the server refuses them")
    stated = list(_directives(text))
    for directive in _HEADER:
        if directive not in stated:
            faults.append(
                f"the header line '#!POPCORN {' '.join(directive)}' is missing among the comments that the file begins "
                "with: the server reads no further"
            )
    try:
        absent = sorted(imports_of(text) - set(sys.stdlib_module_names) - _ON_THE_SERVER)
    except (SyntaxError, ValueError) as error:
        return [*faults, f"not Python: {error}"]
    if absent:
        faults.append(f"imports {', '.join(absent)}, which the server may not have")
    return faults


def _directives(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each #!POPCORN line of the comments that the file begins with; the server reads no others."""
    for line in text.splitlines():
        if not line.startswith(("#", "//")):
            return
        words = line.split()
        if words[0] in ("#!POPCORN", "//!POPCORN") and len(words) > 2:
            kind = words[1].lower()
            yield "gpu" if kind == "gpus" else kind, words[2]


def imports_of(source: str) -> set[str]:
    """The top-level packages that a file cannot do without: imported anywhere but in a try that survives their lack.

    Imports relative to the file's own package, which it has not on the server, count as ".".
    """
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
        elif isinstance(node, ast.Try) and any(map(_survives_a_lack, node.handlers)):
            todo += [*node.handlers, *node.orelse, *node.finalbody]
        else:
            todo += ast.iter_child_nodes(node)
    return found


def _survives_a_lack(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
    catches = not handler.type or names & {"ImportError", "ModuleNotFoundError", "Exception"}
    return bool(catches) and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))
