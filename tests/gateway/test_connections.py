"""Kept-alive connections to engines: reused, replaced when dead, never trusted twice."""

from __future__ import annotations

from typing import Literal

import openai
import pytest

from tests.gateway.fakes import FakeVllm, Reset, Tokenizer, story, writes
from tests.gateway.support import POLICY, USER, Served, Stage, ask

STORY = ("<think>", "Six", ".", " Now", " it", " is", ".", " Thus", " ok", ".", "</think>", "Fine")
WITHOUT_RESUME = {"relaygen": {"resume": False}}
DEATHS = pytest.mark.parametrize("death", ["close", "reset"])


async def pair(stage: Stage) -> tuple[FakeVllm, Served]:
    vocabulary = Tokenizer()
    large, small = (FakeVllm(story(*STORY), model=m, tokenizer=vocabulary) for m in ("b", "t"))
    return large, await stage.pair(large, small)


async def test_connections_are_used_again(stage: Stage) -> None:
    large, served = await pair(stage)
    for _ in range(5):
        await ask(served)
    # Two for probing and rendering side by side; each cut of a decode costs one.
    cuts = 5 * 2
    assert len(large.connections) <= cuts + 3


@DEATHS
async def test_a_dead_connection_is_replaced_by_a_fresh_one(
    stage: Stage, death: Literal["close", "reset"]
) -> None:
    large, served = await pair(stage)
    await ask(served)
    large.dies_on_reuse = death
    for _ in range(3):
        reply = await ask(served)
        assert reply["choices"][0]["message"]["content"] == "Fine"


@DEATHS
async def test_several_dead_connections_are_replaced(
    stage: Stage, death: Literal["close", "reset"]
) -> None:
    import asyncio

    large, served = await pair(stage)
    await asyncio.gather(*(ask(served, extra_body={"relaygen": {"mode": "large"}}) for _ in "1234"))
    idle = [c for c in large.connections if not c.gone.is_set()]
    assert len(idle) > 1
    large.dies_on_reuse = death
    reply = await ask(served)
    assert reply["choices"][0]["message"]["content"] == "Fine"


async def test_a_fresh_connection_that_dies_is_not_tried_again(stage: Stage) -> None:
    large, served = await pair(stage)
    await ask(served)
    await large.stop()
    await large.start()
    large.dies_always = True
    before = len(large.requests)
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served, extra_body={"relaygen": {"resume": False}})
    assert caught.value.status_code == 502
    assert caught.value.code == "engine_disconnected"
    # One to render; the watcher may have asked once.
    assert len([r for r in large.requests[before:] if r.path == "/tokenize"]) == 1


async def test_a_request_that_was_answered_in_part_is_not_sent_again(stage: Stage) -> None:
    large, served = await pair(stage)
    await ask(served)
    large.script = writes("<think>", "Six", Reset())
    with pytest.raises(openai.InternalServerError):
        await ask(served, extra_body=WITHOUT_RESUME)
    before = len(large.decodes)
    with pytest.raises(openai.InternalServerError):
        await served.client.chat.completions.create(
            model=POLICY, messages=USER, extra_body=WITHOUT_RESUME
        )
    assert len(large.decodes) == before + 1


async def test_an_engine_that_was_restarted_is_found_again(stage: Stage) -> None:
    large, served = await pair(stage)
    await ask(served)
    await large.stop()
    with pytest.raises(openai.InternalServerError):
        await ask(served)
    await large.start()
    assert (await ask(served))["choices"][0]["message"]["content"] == "Fine"
