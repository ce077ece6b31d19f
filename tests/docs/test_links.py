"""Links lead somewhere, and what the pages name exists."""

from __future__ import annotations

import re

import pytest

from docs.generate import rows_of
from gateway.settings import Settings
from relaygen.policy import Policy
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


_SETTING = re.compile(r"(?:RELAYGEN_)?[a-z_A-Z]+(?:(?:\.|__)[A-Za-z_]+)+")
_THEIRS = {  # flags of engines and of other tools that the pages name
    "--block-size", "--enable-auto-tool-choice", "--enable-cache-report",
    "--enable-prefix-caching", "--enable-prompt-tokens-details", "--max-logprobs", "--parallel",
    "--profile",
    "--allowed-local-media-path",
    "--allowed-media-domains", "--trust-request-chat-template",
    "--tensor-parallel-size", "--tool-call-parser", "--vllm", "--record", "--quick",
}  # fmt: skip


def test_settings_that_are_named_exist() -> None:
    sections, known = _settings()
    wrong = []
    for page, code in inline():
        name_ = code.partition(":")[0].partition("=")[0]
        if not _SETTING.fullmatch(name_) or name_.endswith(".py"):
            continue
        path = name_.removeprefix("RELAYGEN_").lower().replace("__", ".").split(".")
        if path[0] in sections and not _fits(path, known):
            wrong.append(f"{page}: {code}")
    assert not wrong


def _settings() -> tuple[set[str], set[str]]:
    """Sections, and all keys: of the settings and of a policy."""
    found: set[str] = set()
    for model in (Settings, Policy):
        found |= {key for key, *_ in rows_of(model)}
    found = {key.replace("[]", ".NAME") for key in found}
    sections = {key.split(".")[0] for key in found if "." in key}
    return sections - {"large", "small"}, found


def _fits(path: list[str], known: set[str]) -> bool:
    """Whether it is a key, or a section of keys; a name or number may stand for any other."""
    for key in known:
        parts = key.split(".")
        if len(path) <= len(parts) and all(
            theirs in (ours, "NAME") for ours, theirs in zip(path, parts, strict=False)
        ):
            return True
    return path[0] in ("sampling", "calibration")


def test_flags_that_are_named_exist() -> None:
    known = set().union(*paths_of_commands().values()) | _THEIRS
    wrong = [
        f"{page}: {code}"
        for page, code in inline()
        if (flag := code.split()[0].partition("=")[0]).startswith("--") and flag not in known
    ]
    assert not wrong
