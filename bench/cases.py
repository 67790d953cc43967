"""Which cases are run: the official lists, shapes given by hand, the quick reduction, and popcorn's case files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.basics import CaseFileError, Mode, UserError
from task import BENCHMARKS, TESTS, TestSpec

DEFAULT_SEED = 1  # of a shape that is no official case
QUICK_BATCH = 4
QUICK_CALLS = 10

_FIELDS = tuple(TestSpec.__annotations__)
_ENTRY = re.compile(r"\s*([A-Za-z_]\w*):\s*(\S+)\s*")
_SHAPE = re.compile(r"0*([1-9][0-9]*)[x×]0*([1-9][0-9]*)")


def official_cases(mode: Mode) -> list[TestSpec]:
    """What the server runs in that mode."""
    return TESTS if mode is Mode.TEST else BENCHMARKS


def parse_shape(text: str) -> tuple[int, int]:
    """(batch size, KV length) from "64x8192"."""
    match = _SHAPE.fullmatch(text.strip())
    if not match:
        raise UserError(f"case {text!r}: expected BATCHxKV_SEQ_LEN with numbers of 1 or more, such as 64x8192")
    return int(match[1]), int(match[2])


def case_of_shape(shape: tuple[int, int], mode: Mode) -> TestSpec:
    """The official case of that shape, from the mode's own list first; else the shape with DEFAULT_SEED."""
    for case in [*official_cases(mode), *TESTS, *BENCHMARKS]:
        if (case["batchsize"], case["kvseqlen"]) == shape:
            return case
    return TestSpec(batchsize=shape[0], qseqlen=1, kvseqlen=shape[1], seed=DEFAULT_SEED)


def quick(cases: Sequence[TestSpec]) -> list[TestSpec]:
    """Batch sizes capped at QUICK_BATCH; of the shapes that become equal, the first."""
    reduced: dict[tuple[int, int], TestSpec] = {}
    for case in cases:
        small = TestSpec(**{**case, "batchsize": min(case["batchsize"], QUICK_BATCH)})
        reduced.setdefault((small["batchsize"], small["kvseqlen"]), small)
    return list(reduced.values())


# ---- popcorn's case files ----


@dataclass(frozen=True)
class FileCase:
    """A line of a case file as written, and what it means once the secret seed is in it."""

    spec: str
    args: TestSpec


def combine_seeds(case_seed: int, secret: int) -> int:
    """Cantor's pairing: as hard to guess as the secret, and different for every pair."""
    total = case_seed + secret
    return total * (total + 1) // 2 + case_seed


def read_case_file(path: Path, secret: int | None = None) -> list[FileCase]:
    """The cases of a file, one a line: `batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220`.

    Raises CaseFileError for a file that cannot be read, holds no case or a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CaseFileError(f"cannot read the case file {path}: {error}") from error
    if not lines:
        raise CaseFileError(f"the case file {path} is empty: expected one case a line")
    return [FileCase(line, _parse_line(line, f"{path}, line {i}", secret)) for i, line in enumerate(lines, 1)]


def _parse_line(line: str, where: str, secret: int | None) -> TestSpec:
    values: dict[str, int] = {}
    for part in line.split(";"):
        name, value = _parse_entry(part, where)
        if name in values:
            raise CaseFileError(f"{where}: {name} is given twice")
        values[name] = value
    if missing := [name for name in _FIELDS if name not in values]:
        raise CaseFileError(f"{where}: {', '.join(missing)} missing; a case has {', '.join(_FIELDS)}")
    if secret is not None:
        values["seed"] = combine_seeds(values["seed"], secret)
    if not -(2**63) <= values["seed"] < 2**64:
        raise CaseFileError(f"{where}: the seed{' with POPCORN_SEED in it' if secret else ''} does not fit in 64 bits")
    return TestSpec(**values)


def _parse_entry(part: str, where: str) -> tuple[str, int]:
    match = _ENTRY.fullmatch(part)
    if not match:
        raise CaseFileError(f"{where}: {part!r} is not of the form `name: number`, separated by semicolons")
    name, text = match.groups()
    if name not in _FIELDS:
        raise CaseFileError(f"{where}: unknown name {name!r}, expected {', '.join(_FIELDS)}")
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise CaseFileError(f"{where}: {name} must be a whole number, got {text!r}")
    if name != "seed" and int(text) < 1:
        raise CaseFileError(f"{where}: {name} must be 1 or more, got {text}")
    return name, int(text)
