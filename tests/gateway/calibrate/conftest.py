"""Fixtures of calibration: prompts, fake engines that are stopped at the end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway.calibrate.sides import Side
from gateway.calibrate.tracing import TraceSettings
from tests.gateway.fakes import FakeEngine

QUESTIONS = ("What is one and two", "How far is it", "Who says so", "Why not", "Where are we now")
E = TypeVar("E", bound=FakeEngine)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": 3}) + "\n" for q in QUESTIONS))
    return path


@pytest.fixture
async def run() -> AsyncIterator[Callable[[E], Awaitable[E]]]:
    """Starts a fake engine."""
    started: list[FakeEngine] = []

    async def start(engine: E) -> E:
        await engine.start()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
def settings(tmp_path: Path, prompts: Path) -> Callable[..., TraceSettings]:
    def of(engine: FakeEngine, **changes: Any) -> TraceSettings:
        given: dict[str, Any] = {
            "samples": 2, "temperature": 0, "max_tokens": 100, "patience_s": 5.0, **changes,
        }  # fmt: skip
        return TraceSettings(tmp_path / "work", str(prompts), Side(engine.url, "model"), **given)

    return of
