"""Links lead somewhere, and what the pages name exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.cli import parsed, paths_of_commands
from tests.docs.pages import PAGES, ROOT, anchors, inline, links, name, unmarked

_OURS = {"relaygen", "gateway", "docs", "tests", "benchmarks", "policies", "deploy"}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page, link in links():
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{name(page)}: {link}")
    assert not broken


def test_every_page_is_linked_to() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page, link in links()}
    roots = {ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"}
    assert {page for page in PAGES if page not in linked} <= roots


def test_files_that_are_named_exist() -> None:
    named = re.compile(r"(?:[\w.+-]+/)+[\w.+-]*")
    missing = [
        f"{page}: {code}"
        for page, code in inline()
        if named.fullmatch(code) and code.split("/")[0] in _OURS and not (ROOT / code).exists()
    ]
    assert not missing


def test_commands_that_are_named_exist() -> None:
    known = paths_of_commands()
    wrong = []
    for page, code in inline():
        words = [word.strip("[].") for word in code.split()]
        if words[:1] != ["relaygen"] or len(words) < 2 or not words[1].isalpha():
            continue
        path = next((p for p in known if tuple(words[1 : 1 + len(p)]) == p), None)
        flags = [word for word in words if word.startswith("--")]
        if path is None or not set(flags) <= known[path]:
            wrong.append(f"{page}: {code}")
    assert not wrong


def test_blocks_of_commands_are_marked() -> None:
    assert not unmarked()


def test_the_parser_is_the_clis_own() -> None:
    assert parsed(["policy", "schema"]).action == "schema"
    with pytest.raises(SystemExit):
        parsed(["policy", "none"])
