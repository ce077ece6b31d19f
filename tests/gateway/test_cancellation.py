"""The client leaves: every request to an engine on its behalf is closed within a second."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.context import GATEWAY
from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Gate, Tokenizer, writes
from tests.gateway.fakes.engines import CHAT
from tests.gateway.support import (
    GONE_S,
    POLICY,
    USER,
    WAIT_S,
    Leaving,
    Served,
    Stage,
    leaving,
    until_ready,
    within,
)

DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])
STREAMING = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])


def client(served: Served, path: str = CHAT, **body: Any) -> Leaving:
    return leaving(served.url, path, **body)


async def idle(served: Served) -> None:
    """No generation runs any more."""
    await within(WAIT_S, served.app[GATEWAY].admission.drain(WAIT_S))
    assert served.app[GATEWAY].admission.taken == 0


@DIALECTS
@STREAMING
async def test_leaving_before_the_first_token_reaches_the_engine(
    stage: Stage, dialect: type[FakeEngine], streaming: bool
) -> None:
    gate = Gate()
    large = dialect(writes(gate), model="big")
    served = await stage.pair(large, dialect(model="tiny"))
    async with client(served, stream=streaming):
        await within(WAIT_S, gate.reached.wait())
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)


@DIALECTS
@STREAMING
async def test_leaving_mid_stream_reaches_the_engine(
    stage: Stage, dialect: type[FakeEngine], streaming: bool
) -> None:
    gate = Gate()
    large = dialect(writes("<think>", "Six", gate, " plus"), model="big")
    served = await stage.pair(large, dialect(model="tiny"))
    async with client(served, stream=streaming) as (reader, _):
        await within(WAIT_S, gate.reached.wait())
        if streaming:
            await within(WAIT_S, reader.readuntil(b"Six"))
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)


@STREAMING
async def test_leaving_between_segments_reaches_both_engines(stage: Stage, streaming: bool) -> None:
    gate = Gate()
    vocabulary = Tokenizer()
    large = FakeVllm(writes("<think>", "Now", " it", Gate()), model="big", tokenizer=vocabulary)
    small = FakeVllm(writes(gate), model="tiny", tokenizer=vocabulary)
    served = await stage.pair(large, small)
    async with client(served, stream=streaming):
        await within(WAIT_S, gate.reached.wait())
        await within(GONE_S, large.decodes[0].left.wait())  # the cue has ended its decode
    await within(GONE_S, small.decodes[0].left.wait())
    await idle(served)
    assert len(large.decodes) == 1


@pytest.mark.parametrize(
    ("dialect", "path"), [(FakeVllm, "/tokenize"), (FakeLlamaCpp, "/apply-template")]
)
async def test_leaving_while_the_prompt_is_rendered_reaches_the_engine(
    stage: Stage, dialect: type[FakeEngine], path: str
) -> None:
    large = dialect(model="big")
    served = await stage.pair(large, dialect(model="tiny"))
    await until_ready(served, 200)
    await served.client.chat.completions.create(model=POLICY, messages=USER)  # probed, rendered
    gate = large.gates[path] = Gate()
    async with client(served):
        await within(WAIT_S, gate.reached.wait())
    await within(GONE_S, large.asked(path)[-1].left.wait())
    await idle(served)
    assert len(large.decodes) == 1


@STREAMING
async def test_leaving_a_passed_through_request_reaches_the_engine(
    stage: Stage, streaming: bool
) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    gate = large.gates[CHAT] = Gate()
    async with client(served, stream=streaming, tools=[{"type": "function"}]):
        await within(WAIT_S, gate.reached.wait())
    await within(GONE_S, large.asked(CHAT)[0].left.wait())
    await idle(served)


async def test_leaving_a_passed_through_stream_reaches_the_engine(stage: Stage) -> None:
    gate = Gate()
    large = FakeVllm(writes("Six", gate), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await until_ready(served, 200)
    path = "/v1/completions"
    async with client(served, path, model="big", prompt="x", stream=True) as (reader, _):
        await within(WAIT_S, reader.readuntil(b"Six"))
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)


async def test_a_cue_closes_the_large_models_stream(stage: Stage) -> None:
    vocabulary = Tokenizer()
    large = FakeVllm(
        lambda prompt: ["</think>"] if "." in prompt else ["<think>", "Now", " more", Gate()],
        model="big",
        tokenizer=vocabulary,
    )
    small = FakeVllm(
        lambda prompt: ["fine"] if "</think>" in prompt else [" ok", ".", " more", Gate()],
        model="tiny",
        tokenizer=vocabulary,
    )
    served = await stage.pair(large, small)
    await served.client.chat.completions.create(model=POLICY, messages=USER)
    await within(GONE_S, large.decodes[0].left.wait())
    await within(GONE_S, small.decodes[0].left.wait())


async def test_a_slow_reader_slows_its_engine(stage: Stage) -> None:
    flood = [f" {'x' * 4000}"] * 5000  # far more than all the sockets' buffers on the way
    large = FakeVllm(writes(*flood, Gate()), model="big", context=100_000)
    served = await stage.pair(large, FakeVllm(model="tiny", context=100_000))
    async with client(served, stream=True) as (reader, _):
        await within(WAIT_S, reader.readuntil(b"xxx"))
        [decode] = large.decodes
        connection = large.connections[decode.connection]
        await within(WAIT_S, connection.unread.wait())
        with pytest.raises(TimeoutError):
            await within(0.5, connection.read.wait())
    await within(GONE_S, decode.left.wait())
