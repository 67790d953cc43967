"""The documents as data: their sections, code blocks, code spans, links and anchors."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from bench.basics import PROJECT_ROOT

PAGES = (
    *(PROJECT_ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "gfx950/README.md")),
    *sorted((PROJECT_ROOT / "docs").glob("*.md")),
    PROJECT_ROOT / "results" / "LOG.md",
)
_PICTURE = re.compile(r'<img [^>]*src="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced code block. language: "sh", "python", "text", …; argument: what follows it on the opening line."""

    line: int
    language: str
    argument: str
    text: str


@dataclass
class Section:
    """A heading and what stands below it up to the next heading, of any level. text: all of it, line breaks and runs of
    blanks as one blank. tables: the lines of its tables."""

    title: str
    line: int
    text: str = ""
    blocks: list[Block] = field(default_factory=list)
    tables: str = ""
    spans: list[str] = field(default_factory=list)  # what stands between backticks
    links: list[str] = field(default_factory=list)  # targets of links and pictures


@dataclass(frozen=True)
class Page:
    path: Path
    sections: tuple[Section, ...]

    @property
    def name(self) -> str:
        return self.path.relative_to(PROJECT_ROOT).as_posix()

    @property
    def anchors(self) -> set[str]:
        """As GitHub makes them of headings; the second of a name ends in -1, and so on."""
        found: dict[str, int] = {}
        for section in self.sections:
            slug = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
        return {f"{slug}-{i}" if i else slug for slug, last in found.items() for i in range(last + 1)}


@functools.cache
def read(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    sections = [Section("", 0)]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open":
            sections.append(Section(_plain(following), token.map[0]))
        elif token.type == "fence":
            language, _, argument = token.info.strip().partition(" ")
            sections[-1].blocks.append(Block(token.map[0] + 1, language, argument.strip(), token.content))
        elif token.type == "table_open":
            sections[-1].tables += "\n".join(lines[slice(*token.map)]) + "\n"
        elif token.type == "html_block":
            sections[-1].links += _PICTURE.findall(token.content)
        elif token.type == "inline":
            sections[-1].spans += [child.content for child in token.children if child.type == "code_inline"]
            sections[-1].links += _targets(token)
    ends = [*(section.line for section in sections[1:]), len(lines)]
    for section, end in zip(sections, ends, strict=True):
        section.text = " ".join(" ".join(lines[section.line : end]).split())
    return Page(path, tuple(sections))


def _plain(inline: Token) -> str:
    return "".join(child.content for child in inline.children)


def _targets(inline: Token) -> Iterator[str]:
    for child in inline.children:
        target = child.attrs.get("href") or child.attrs.get("src")
        if target:
            yield target


def blocks(page: Page, language: str) -> Iterator[tuple[Section, Block]]:
    for section in page.sections:
        for block in section.blocks:
            if block.language == language:
                yield section, block
