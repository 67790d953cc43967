"""What the documents promise by their form: a README to read in one sitting, figures with their origin, versions."""

import re

import pytest

from bench import __version__
from bench.basics import PROJECT_ROOT
from tests.docs.pages import Page, read

README, CHANGELOG = PROJECT_ROOT / "README.md", PROJECT_ROOT / "CHANGELOG.md"
MEASURED = re.compile(r"\d\.\d|\d ?(µs|ms|TB/s)")
ORIGINS = ("AMD EPYC", "NVIDIA H200", "published", "simulation", "emulator")


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", map(read, [README, *(PROJECT_ROOT / "docs").glob("*.md")]), ids=lambda page: page.name)
def test_figures_say_where_they_are_from(page: Page):
    """Those in tables and printed blocks, and every time in prose."""
    for section in page.sections:
        printed = "\n".join(block.text for block in section.blocks if block.language == "text")
        figures = MEASURED.search(printed) or MEASURED.search(section.tables) or re.search("µs|TB/s", section.text)
        if figures:
            assert any(origin in section.text for origin in ORIGINS), f"{page.name}, {section.title!r}"


def test_version_is_the_changelogs():
    titles = [section.title for section in read(CHANGELOG).sections if section.title.startswith("[")]
    assert titles[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d{{2}}-\d{{2}}", titles[1])
