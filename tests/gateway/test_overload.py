"""More clients than limits.generations allows: served, queued or refused, and none hangs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from gateway.settings import Limits
from tests.gateway.fakes import FakeVllm, Gate, writes
from tests.gateway.support import GONE_S, POLICY, USER, WAIT_S, Served, Stage, events, within

LIMIT, CLIENTS = 4, 20
STREAMING = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
QUEUES = "queue" in Limits.model_fields
"""Whether this gateway lets requests wait."""


@dataclass(frozen=True)
class Answer:
    status: int
    retry_after: str | None
    text: str
    error: dict[str, Any]


async def ask(session: aiohttp.ClientSession, served: Served, *, streaming: bool) -> Answer:
    body = {"model": POLICY, "messages": USER, "stream": streaming}
    async with session.post(f"{served.url}/v1/chat/completions", json=body) as response:
        content = await response.read()
        retry_after = response.headers.get("Retry-After")
        if response.status != 200:
            error = (await response.json())["error"]
            return Answer(response.status, retry_after, "", error)
        return Answer(200, retry_after, _text(content, streaming), {})


def _text(content: bytes, streaming: bool) -> str:
    if not streaming:
        [reply] = events(content)
        return str(reply["choices"][0]["message"]["content"])
    *chunks, done = events(content)
    assert done == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@dataclass(frozen=True)
class Busy:
    """A gateway with its large engine at a gate, and clients that have asked."""

    served: Served
    large: FakeVllm
    gate: Gate
    session: aiohttp.ClientSession
    tasks: set[asyncio.Task[Answer]]

    async def answered(self, count: int) -> list[Answer]:
        """The first `count` answers."""
        found: set[asyncio.Task[Answer]] = set()
        left = self.tasks
        while len(found) < count:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            found |= done
        return [task.result() for task in found]

    async def rest(self) -> list[Answer]:
        return list(await asyncio.gather(*self.tasks))


async def busy(
    stage: Stage, session: aiohttp.ClientSession, *, streaming: bool, **limits: float
) -> Busy:
    gate = Gate()
    large = FakeVllm(writes("one", gate, " two"), model="big")
    given = {"generations": LIMIT, **({"queue": 0} if QUEUES else {}), **limits}
    served = await stage.pair(large, FakeVllm(model="tiny"), {"limits": given})
    asked = {asyncio.create_task(ask(session, served, streaming=streaming)) for _ in range(CLIENTS)}
    return Busy(served, large, gate, session, asked)


def check_refusal(answer: Answer) -> None:
    assert answer.status == 429
    assert answer.retry_after is not None
    assert int(answer.retry_after) >= 1
    assert answer.error["type"] == "rate_limit_error"
    assert "limits." in answer.error["message"]


@STREAMING
async def test_those_beyond_the_limit_are_refused_at_once(stage: Stage, streaming: bool) -> None:
    async with aiohttp.ClientSession() as session:
        running = await busy(stage, session, streaming=streaming)
        refused = await within(WAIT_S, running.answered(CLIENTS - LIMIT))
        for answer in refused:
            check_refusal(answer)
        await running.large.decode(LIMIT - 1)
        assert len(running.large.decodes) == LIMIT
        running.gate.opened.set()
        answers = await within(WAIT_S, running.rest())
        assert [a.text for a in answers if a.status == 200] == ["one two"] * LIMIT
        after = await within(WAIT_S, ask(session, running.served, streaming=streaming))
    assert after.text == "one two"


async def test_those_that_leave_make_room(stage: Stage) -> None:
    async with aiohttp.ClientSession() as session:
        running = await busy(stage, session, streaming=True)
        await within(WAIT_S, running.answered(CLIENTS - LIMIT))
        await running.large.decode(LIMIT - 1)
        for task in running.tasks:
            task.cancel()
        for decode in running.large.decodes:
            await within(GONE_S, decode.left.wait())
        running.gate.opened.set()
        after = await within(WAIT_S, ask(session, running.served, streaming=True))
    assert after.text == "one two"


needs_queue = pytest.mark.skipif(not QUEUES, reason="this gateway has no queue")


@needs_queue
@STREAMING
async def test_those_in_the_queue_are_served_in_their_turn(stage: Stage, streaming: bool) -> None:
    waiting = {"queue": 8, "queue_seconds": 60.0}
    async with aiohttp.ClientSession() as session:
        running = await busy(stage, session, streaming=streaming, **waiting)
        refused = await within(WAIT_S, running.answered(CLIENTS - LIMIT - 8))
        for answer in refused:
            check_refusal(answer)
        await running.large.decode(LIMIT - 1)
        assert len(running.large.decodes) == LIMIT
        running.gate.opened.set()
        answers = await within(WAIT_S, running.rest())
    assert [a.text for a in answers if a.status == 200] == ["one two"] * (LIMIT + 8)


@needs_queue
async def test_those_that_wait_too_long_are_refused(stage: Stage) -> None:
    waiting = {"queue": CLIENTS, "queue_seconds": 0.2}
    async with aiohttp.ClientSession() as session:
        running = await busy(stage, session, streaming=False, **waiting)
        refused = await within(WAIT_S, running.answered(CLIENTS - LIMIT))
        for answer in refused:
            check_refusal(answer)
        running.gate.opened.set()
        answers = await within(WAIT_S, running.rest())
    assert len([a for a in answers if a.status == 200]) == LIMIT
