"""Log lines: whole ones, with the level asked for."""

from __future__ import annotations

import io
import json
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


def logged(monkeypatch: pytest.MonkeyPatch, settings: Log) -> list[str]:
    """What one info line is written as."""
    writes = Writes()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", writes)
        log.configure(settings)
        structlog.get_logger().info("hello", answer=42)
    return writes.all


def test_a_line_is_one_write_so_that_workers_lines_stay_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [line] = logged(monkeypatch, Log())
    assert line.endswith("\n")
    assert json.loads(line)["answer"] == 42


def test_less_than_the_level_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged(monkeypatch, Log(level="warning")) == []
