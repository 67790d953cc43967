"""Links lead somewhere, and what stands between backticks is there: files, commands, options, names in the code."""

import functools
import re
import shlex
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from bench import cli
from bench.basics import PROJECT_ROOT
from tests.docs.pages import PAGES, Page, read

# The changelog and the log tell of what once was.
CURRENT = [page for page in PAGES if page.name not in ("CHANGELOG.md", "LOG.md")]
# Files of others, or of the reader.
NOT_OURS = {".venv/bin/mla", "cases.txt", "eval.py", "hsa/gfx950/mla", "mine.py", "my_kernels.py", "utils.py"}
# Words that no source of ours has: other people's tools, and what a user fills in.
FOREIGN = {"popcorn", "global_atomic_smax", "FILE", "NAME", "KERNEL", "CASES", "CSV", "MODE", "ARGS"}
_SUFFIXES = (".py", ".md", ".toml", ".yml", ".txt", ".csv", ".png", ".svg", ".json")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    page = read(path)
    for section in page.sections:
        for link in section.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            found = (path.parent / target).resolve() if target else path
            assert found.exists(), f"{page.name}, {section.title!r}: {link}"
            assert found.is_relative_to(PROJECT_ROOT), f"{page.name}: {link} leaves the project"
            assert not anchor or anchor in read(found).anchors, f"{page.name}, {section.title!r}: {link}"


def _spans() -> list[tuple[Page, str]]:
    return [(page, span) for page in map(read, CURRENT) for section in page.sections for span in section.spans]


def _is_file(span: str) -> bool:
    return bool(re.fullmatch(r"[\w.\-/]+", span)) and ("/" in span or span.endswith(_SUFFIXES))


def test_files_exist():
    for page, span in _spans():
        if _is_file(span) and span not in NOT_OURS:
            places = PROJECT_ROOT / span, page.path.parent / span
            assert any(place.exists() for place in places), f"{page.name}: `{span}`"


def _mla() -> TyperGroup:
    return get_command(cli.app)


def _options(command: TyperCommand | TyperGroup) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts} | {"--help"}


@functools.cache
def _all_options() -> frozenset[str]:
    def below(command: TyperCommand | TyperGroup) -> set[str]:
        own = _options(command)
        return own.union(*map(below, command.commands.values())) if isinstance(command, TyperGroup) else own

    return frozenset(below(_mla()))


def _check_call(words: list[str], where: str) -> None:
    """The words after `mla`: names of commands, then their options."""
    command = _mla()
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{where}: no such command"
        command, words = command.commands[words[0]], words[1:]
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in _options(command), f"{where}: {word}"


def test_commands_and_options_exist():
    for page, span in _spans():
        words, where = shlex.split(span, posix=False), f"{page.name}: `{span}`"
        if words[0] == "mla" or words[:3] == ["python", "-m", "bench"]:
            _check_call(words[1 if words[0] == "mla" else 3 :], where)
        elif words[0].startswith("--"):
            assert words[0] in _all_options(), where
        elif words[0] == "make" and words[1:]:
            assert re.search(rf"^{words[1]}:", (PROJECT_ROOT / "Makefile").read_text(), re.MULTILINE), where


def test_commands_in_blocks_have_their_options():
    from tests.docs.test_commands import ALL_COMMANDS

    for page, _, command in ALL_COMMANDS:
        call = re.search(r"(?:\S*/mla|python -m bench) ([^;&|]+)", command)
        if call and "bench." not in command:
            _check_call(shlex.split(re.sub(r"\d>\S+", "", call[1])), f"{page.name}: {command}")


@functools.cache
def _words_of_the_code() -> frozenset[str]:
    here = Path(__file__).parent
    sources = [
        *(path for path in PROJECT_ROOT.rglob("*.py") if ".venv" not in path.parts and here not in path.parents),
        *(PROJECT_ROOT / name for name in ("Makefile", "pyproject.toml", ".ci/run")),
    ]
    return frozenset(word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


def test_names_stand_in_the_code():
    """A name that nothing in the code has any more is one that the document should no longer have."""
    for page, span in _spans():
        for word in () if _is_file(span) else re.findall(r"(?<!\w)[A-Za-z_]\w{2,}", span):
            assert word in _words_of_the_code() or word in FOREIGN, f"{page.name}: {word} in `{span}`"
