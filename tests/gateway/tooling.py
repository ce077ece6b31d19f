"""A pair that thinks, hands over once and back, and then calls a tool or writes in a form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import pytest

from tests.gateway.fakes import (
    FakeEngine,
    FakeLlamaCpp,
    FakeSglang,
    FakeVllm,
    Script,
    Tokenizer,
    ToolCall,
)
from tests.gateway.fakes.asking import Asked
from tests.gateway.fakes.engines import CHAT
from tests.gateway.fakes.script import ASSISTANT, Act
from tests.gateway.support import POLICY, USER, Served, Stage, Streamed

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
THOUGHT = "<think>Six. Now it is. Go on.</think>"
USAGE = {"stream_options": {"include_usage": True}}
CALL = ToolCall("look", ('{"', "city", '": "', "Rome", '"}'))
LARGE_THOUGHT, SMALL_THOUGHT = 8, 3  # their tokens of THOUGHT, the tags with them
DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp, FakeSglang])


def written(prompt: str) -> str:
    return prompt.rpartition(ASSISTANT)[2]


def large_then(*answer: Act) -> Script:
    """Thinks, up to a cue; after the small model's part to the end; then answers."""

    def script(prompt: str) -> Iterable[Act]:
        begun = written(prompt)
        if "</think>" in begun:
            return answer
        if begun:
            return (" Go", " on", ".", "</think>", "never", " kept")
        return ("<think>", "Six", ".", " Now", " not", " this")

    return script


def small_then(*answer: Act) -> Script:
    return lambda prompt: answer if "</think>" in prompt else (" it", " is", ".", " More")


async def two(
    stage: Stage,
    *answer: Act,
    dialect: Callable[..., FakeEngine] = FakeVllm,
    small_answer: Iterable[Act] = (),
    **policy: Any,
) -> tuple[Served, FakeEngine, FakeEngine]:
    vocabulary = Tokenizer()
    large = dialect(large_then(*answer), model="big", tokenizer=vocabulary)
    small = dialect(small_then(*small_answer), model="tiny", tokenizer=vocabulary)
    for engine in (large, small):
        engine.chats = True
        if isinstance(engine, FakeVllm | FakeSglang):
            engine.reasoning_parser = True
        if isinstance(engine, FakeLlamaCpp):
            engine.think_tags = ("<think>", "</think>")
    return await stage.pair(large, small, **policy), large, small


async def alone(engine: FakeEngine, number: int = -1) -> list[dict[str, Any]]:
    """The choices that the engine sends for the very request that it was sent, but for the role."""
    content = engine.asked(CHAT)[number].content
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.url.removesuffix("/v1") + CHAT, data=content) as response,
    ):
        asked = Asked(response.status, await response.read())
    return [c for c in asked.choices if c.get("finish_reason") or says(c["delta"])]


def says(delta: dict[str, Any]) -> bool:
    return any(value for key, value in delta.items() if key != "role")


async def raw(served: Served, **body: Any) -> Asked:
    given = {"model": POLICY, "messages": USER, "stream": True, "tools": TOOLS, **body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + CHAT, json=given) as response,
    ):
        return Asked(response.status, await response.read())


def calls_of(reply: Streamed) -> list[dict[str, Any]]:
    return [call for delta in reply.deltas for call in delta.get("tool_calls") or ()]
