"""Every command and snippet in the documents runs here, or its section says on what machine it was run.

Blocks of a page run in their order, in a copy of the project whose environment is set up. What stands behind the three
backticks says what a block is:

- `sh`: commands; `text`: what was printed
- `python`: a program
- `python FILE`: that file, which the reader writes
- `python from FILE`: lines of that file of ours, "…" for those left out
- `python into FILE above LINE`: a definition to add to that file, above the first line that begins with LINE
- `python into FILE below LINE`: lines to add, below it
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.basics import PROJECT_ROOT
from tests.docs.pages import PAGES, Block, Page, blocks, read

LANGUAGES = ("sh", "python", "text")
SECONDS = 300  # for a command
RUN_MI355X_CODE = ("docs/gfx950.md", "docs/kernel.md")

EPYC, H200 = "2 cores of an AMD EPYC", "NVIDIA H200"
# What does not run here, and what its section must say of where it ran, or why it did not.
ELSEWHERE = {
    r"make (run|test|lint|clean)\b": EPYC,  # sets up an environment, runs all tests
    r"bash \.ci/run": EPYC,
    r"\S+/python -m pytest": EPYC,
    r"\S+/mla verify --quick": EPYC,  # minutes
    r"\S+/mla run --table v50 .*64x8192": EPYC,  # gigabytes
    r"python -m bench (run|verify --table sm_90|cost)$": H200,
    r"\S+/mla compare ": H200,
    r"compute-sanitizer ": H200,
    r"popcorn submit ": "With an account",
}


def commands_of(text: str) -> list[str]:
    """The commands of a block: a line each, unless it ends in a backslash; comments left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def said_of(command: str) -> str | None:
    """What must be said of a command that does not run here."""
    return next((said for pattern, said in ELSEWHERE.items() if re.match(pattern, command)), None)


ALL_COMMANDS = [
    (page, section, command)
    for page in map(read, PAGES)
    for section, block in blocks(page, "sh")
    for command in commands_of(block.text)
]


@pytest.mark.parametrize("page", map(read, PAGES), ids=lambda page: page.name)
def test_blocks_are_of_a_known_kind(page: Page):
    for section in page.sections:
        for block in section.blocks:
            assert block.language in LANGUAGES, f"{page.name}:{block.line}: {block.language!r}"


def test_what_does_not_run_here_ran_elsewhere():
    for page, section, command in ALL_COMMANDS:
        said = said_of(command)
        assert said is None or said in section.text, f"{page.name}, {section.title!r}: {command}: must say {said!r}"


def test_every_entry_of_the_table_is_used():
    for pattern in ELSEWHERE:
        assert any(re.match(pattern, command) for *_, command in ALL_COMMANDS), f"no document has {pattern}"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the project, with an environment whose `mla` and `python` are this interpreter's."""
    copy = tmp_path / "a checkout"
    shutil.copytree(PROJECT_ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build"))
    programs = copy / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, arguments in {"mla": " -m bench", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (programs / name).chmod(0o755)
    return copy


def _runs(page: Page) -> bool:
    """Whether anything of a page runs here."""
    programs = any(not block.argument for _, block in blocks(page, "python"))
    return programs or any(said_of(command) is None for p, _, command in ALL_COMMANDS if p is page)


@pytest.mark.parametrize("page", filter(_runs, map(read, PAGES)), ids=lambda page: page.name)
def test_page_runs(page: Page, checkout: Path):
    if page.name in RUN_MI355X_CODE:
        pytest.importorskip("gfx950", reason="needs the gfx950 extra: pip install -e '.[gfx950]'")
        pytest.importorskip("triton", reason="needs the gfx950 extra: pip install -e '.[gfx950]'")
    for section in page.sections:
        for block in section.blocks:
            where = f"{page.name}:{block.line}"
            if block.language == "sh":
                for command in commands_of(block.text):
                    if said_of(command) is None:
                        _run(["bash", "-euo", "pipefail", "-c", command], checkout, where)
            elif block.language == "python" and not block.argument:
                _run([sys.executable, "-c", block.text], checkout, where)
            elif block.language == "python":
                _write(block, checkout, where)


def _run(command: list[str], checkout: Path, where: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{where}: {command[-1]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def _write(block: Block, checkout: Path, where: str) -> None:
    """What the reader is told to write: a file, or lines of one of ours."""
    addition = re.fullmatch(r"into (\S+) (above|below) (.+)", block.argument)
    if addition:
        name, side, beside = addition.groups()
        lines = (checkout / name).read_text().splitlines(keepends=True)
        found = [i for i, line in enumerate(lines) if line.startswith(beside)]
        assert found, f"{where}: {name} has no line that begins with {beside!r}"
        at, space = (found[0], "\n\n") if side == "above" else (found[0] + 1, "")
        (checkout / name).write_text("".join([*lines[:at], block.text, space, *lines[at:]]))
    elif not block.argument.startswith("from "):
        (checkout / block.argument).write_text(block.text)


@pytest.mark.parametrize("page", map(read, PAGES), ids=lambda page: page.name)
def test_excerpts_stand_in_their_file(page: Page):
    for _, block in blocks(page, "python"):
        if block.argument.startswith("from "):
            source = (PROJECT_ROOT / block.argument.removeprefix("from ")).read_text()
            for part in block.text.split("…"):
                assert part.strip("\n") in source, f"{page.name}:{block.line}"
