"""Log lines: whole ones, with the level asked for."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator

import pytest
import structlog

from gateway import log
from gateway.settings import Log


class Writes(io.StringIO):
    """A stream that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def write(self, text: str) -> int:
        self.all.append(text)
        return super().write(text)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def logged(monkeypatch: pytest.MonkeyPatch, settings: Log, **fields: object) -> list[str]:
    """What one info line is written as."""
    writes = Writes()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", writes)
        log.configure(settings)
        structlog.get_logger().info("hello", **{"answer": 42, **fields})
    return writes.all


def test_a_line_is_one_write_so_that_workers_lines_stay_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [line] = logged(monkeypatch, Log())
    assert line.endswith("\n")
    assert json.loads(line)["answer"] == 42


def test_less_than_the_level_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged(monkeypatch, Log(level="warning")) == []


# ---- what others wrote --------------------------------------------------------------------------

FORGED = "\r\n2026-01-01 [info] all is well \x1b[2J\x1b]0;title\x07 \x9b31m \u202e \u2028 \x7f \x00"
CONSOLE, JSON = Log(format="console"), Log(format="json")


class Odd:
    def __repr__(self) -> str:
        return FORGED


@pytest.mark.parametrize(
    "fields",
    [
        {"model": FORGED},
        {"nested": {"a": [FORGED, (FORGED, {FORGED: 1})]}},
        {FORGED: "name"},
        {"answer": Odd()},
        {"error": ValueError(FORGED)},
        {"content": FORGED.encode()},
        {"names": {FORGED}},
    ],
    ids=["text", "nested", "name", "object", "error", "bytes", "set"],
)
@pytest.mark.parametrize("settings", [CONSOLE, JSON], ids=["console", "json"])
def test_nothing_that_is_logged_rules_the_terminal_or_begins_a_line(
    monkeypatch: pytest.MonkeyPatch, settings: Log, fields: dict[str, object]
) -> None:
    [line] = logged(monkeypatch, settings, **fields)
    text = without_colours(line)
    assert line.count("\n") == 1
    assert [c for c in text.removesuffix("\n") if not c.isprintable()] == []
    assert "all is well" in text


def without_colours(line: str) -> str:
    """Without what the renderer itself writes."""
    return re.sub(r"\x1b\[\d*m", "", line)


def test_an_event_is_escaped_too() -> None:
    escaped = log.harmless(None, "info", {"event": FORGED})
    assert str(escaped["event"]).isprintable()


def test_plain_texts_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = logged(monkeypatch, CONSOLE, model="Qwen/Qwen3-32B", text="größer 数 😀", n=None)
    text = without_colours(line)
    for told in ("model=Qwen/Qwen3-32B", "größer 数 😀", "answer=42", "n=None"):
        assert told in text


def test_a_traceback_keeps_its_lines_none_of_which_looks_like_one_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        lines = "".join(logged(monkeypatch, CONSOLE, exc_info=error)).split("\n")
    assert any("Traceback" in line for line in lines[1:])
    assert all(line.startswith("    ") or not line for line in lines[1:])
    assert "\x1b[2J" not in "".join(lines)
