"""Requests that one engine serves whole, when that engine fails, is busy or takes for ever."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from gateway.context import GATEWAY
from relaygen.events import Role
from tests.gateway.fakes import FakeSglang, FakeVllm, Gate, Reset, writes
from tests.gateway.support import (
    GONE_S,
    POLICY,
    USER,
    WAIT_S,
    Stage,
    get,
    leaving,
    two_large,
    until_ready,
    within,
)

BUSY = b'{"error": {"message": "too much to do"}}'


@pytest.mark.parametrize("model", ["big", POLICY])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_replica_is_passed_over(stage: Stage, model: str, status: int) -> None:
    busy, sound = FakeVllm(model="big"), FakeVllm(writes("Fine"), model="big")
    served = await two_large(stage, busy, sound, chats=True)
    busy.refusals["/v1/chat/completions"] = (status, BUSY)
    whole = {"extra_body": {"stop_token_ids": [2]}}
    reply = await served.client.chat.completions.create(model=model, messages=USER, **whole)  # type: ignore[call-overload]
    assert reply.choices[0].message.content == "Fine"


async def test_the_last_replicas_answer_is_told_as_it_is(stage: Stage) -> None:
    busy, other = FakeVllm(model="big"), FakeVllm(model="big")
    served = await two_large(stage, busy, other, chats=True)
    for engine in (busy, other):
        engine.refusals["/v1/chat/completions"] = (429, BUSY)
    with pytest.raises(openai.RateLimitError, match="too much to do"):
        await served.client.chat.completions.create(model="big", messages=USER)  # type: ignore[arg-type]


async def test_a_stream_passed_through_has_its_time(stage: Stage) -> None:
    large = FakeVllm(writes("Six", Gate()), model="big")
    large.chats = True
    served = await stage.pair(large, FakeVllm(model="tiny"), {"timeouts": {"total": 0.4}})
    await until_ready(served, 200)
    with pytest.raises(openai.APIError, match=r"timeouts\.total"):
        async for _ in await served.client.chat.completions.create(  # type: ignore[call-overload]
            model="big", messages=USER, stream=True
        ):
            pass
    await within(WAIT_S, (await large.decode()).left.wait())


async def test_a_stream_that_breaks_counts_against_its_replica(stage: Stage) -> None:
    large = FakeVllm(writes("Six", Reset()), model="big")
    large.chats = True
    health = {"health": {"failures": 1, "cooldown": 60}}
    served = await stage.pair(large, FakeVllm(model="tiny"), health)
    await until_ready(served, 200)
    with pytest.raises(openai.APIError):
        async for _ in await served.client.chat.completions.create(  # type: ignore[call-overload]
            model="big", messages=USER, stream=True
        ):
            pass
    _, body = await get(served, "/readyz")
    assert body["backends"]["large"][0]["state"] == "open"


async def test_sglang_is_told_to_abort_what_it_served_whole(stage: Stage) -> None:
    gate = Gate()
    large = FakeSglang(writes("Six", gate), model="big")
    large.chats = True
    served = await stage.pair(large, FakeSglang(model="tiny"))
    await until_ready(served, 200)
    body = {"stream": True, "stop_token_ids": [2]}
    async with leaving(served.url, "/v1/chat/completions", **body):
        await within(WAIT_S, gate.reached.wait())
        request = await large.decode()
    aborts = [r for r in large.requests if r.path == "/abort_request"]
    async with asyncio.timeout(GONE_S):
        while not aborts:
            large.arrived.clear()
            await large.arrived.wait()
            aborts = [r for r in large.requests if r.path == "/abort_request"]
    assert json.loads(aborts[0].content)["rid"] == request.body["rid"]


async def test_readyz_tells_how_fast_the_models_are_and_whether_one_is_held(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"))
    await until_ready(served, 200)
    pace = served.app[GATEWAY].relaying.paces[POLICY]
    for _ in range(2):
        pace.add(Role.LARGE, 200, 200 * 0.004)
        pace.add(Role.SMALL, 200, 200 * 0.008)
    _, body = await get(served, "/readyz")
    state = body["policies"][POLICY]
    assert state["token_ms"] == {"large": 4.0, "small": 8.0}
    assert state["small_held"] is True
