"""The pages that users read, their links and the commands that they are told to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "deploy").glob("**/*.md"),
    ]
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Command:
    """One line of a shell block, those that it goes on in joined; `page` says where it stands."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.removesuffix("&"), comments=True)

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if language in ("sh", "bash", "shell", "console"):
                found += [Command(name(page), line) for line in _lines(block)]
    return found


def _lines(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        text = re.sub(r"\s+", " ", line).removeprefix("$ ").strip()
        if text and not text.startswith("#"):
            yield text


def unmarked() -> list[str]:
    """Blocks that look like commands and are not marked as such, which no test would see."""
    starts = re.compile(r"^\$? ?(make|relaygen|docker|pip|python|kubectl|curl)\b", re.MULTILINE)
    return [
        f"{name(page)}: {block[:60]!r}"
        for page in PAGES
        for language, block in _BLOCK.findall(page.read_text(encoding="utf-8"))
        if not language and starts.search(block)
    ]


def inline() -> list[tuple[str, str]]:
    """What stands between backticks in a line, with its page."""
    return [
        (name(page), code)
        for page in PAGES
        for code in _INLINE.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))
    ]


def links() -> list[tuple[Path, str]]:
    return [
        (page, link)
        for page in PAGES
        for link in _LINK.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))
    ]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found = set()
    for heading in _HEADING.findall(_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found
