"""Signs of life on long silences, which change nothing of what a client reads."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from gateway.wire import OpenAIWire
from tests.gateway.fakes import Error, FakeVllm, Gate, Reset, Script, writes
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.fakes.script import Act
from tests.gateway.support import (
    GONE_S,
    POLICY,
    USER,
    WAIT_S,
    Served,
    Stage,
    ask,
    policy_of,
    until_ready,
    within,
)
from tests.gateway.test_apis import ASKED, MESSAGES, RESPONSES, TOOLS, events_of
from tests.gateway.test_cancellation import client, idle

SOON = {"timeouts": {"keep_alive": 0.05}}
PING = b": ping\n"


async def writing(
    stage: Stage, script: Script, settings: dict[str, Any] | None = None
) -> tuple[Served, FakeVllm]:
    large = FakeVllm(script, model="big")
    served = await stage.pair(
        large, FakeVllm(model="tiny", tokenizer=large.tokenizer), settings or SOON
    )
    await until_ready(served, 200)
    return served, large


class Stream:
    """What a client has read of its reply so far."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.wire = b""

    async def until(self, part: bytes, count: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.wire.count(part) < count:
                read = await self.response.content.readany()
                assert read or self.wire.count(part) >= count, self.wire
                self.wire += read

    async def rest(self) -> bytes:
        self.wire += await within(WAIT_S, self.response.content.read())
        return self.wire


class asking:
    """A client whose streamed reply begins within the block."""

    def __init__(self, served: Served, path: str = CHAT, **body: Any) -> None:
        given = {"model": POLICY, "messages": USER, "stream": True, **body}
        self._session = aiohttp.ClientSession()
        self._asked = self._session.post(served.url + path, json=given)

    async def __aenter__(self) -> Stream:
        return Stream(await within(WAIT_S, self._asked.__aenter__()))

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()


def data_of(wire: bytes) -> list[Any]:
    """The events, with no ping anywhere but before one."""
    assert wire.endswith(b"\n\n")
    events = []
    for frame in wire.split(b"\n\n")[:-1]:
        while frame.startswith(PING):
            frame = frame.removeprefix(PING)
        data = frame.removeprefix(b"data: ")
        assert data != frame, frame
        events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return events


def content_of(events: list[Any]) -> str:
    deltas = [e["choices"][0]["delta"] for e in events if e != "[DONE]" and e["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


# ---- pings --------------------------------------------------------------------------------------


async def test_a_silence_before_the_first_token_has_pings(stage: Stage) -> None:
    gate = Gate()
    served, _ = await writing(stage, writes(gate, "Fine"))
    async with asking(served) as stream:
        assert stream.response.status == 200
        await stream.until(PING, 3)
        assert stream.wire == PING * stream.wire.count(PING)
        gate.opened.set()
        events = data_of(await stream.rest())
    assert (content_of(events), events[-1]) == ("Fine", "[DONE]")


async def test_a_silence_within_the_stream_has_pings_between_events(stage: Stage) -> None:
    gates = [Gate(), Gate(), Gate()]
    served, _ = await writing(stage, writes("a", gates[0], "b", gates[1], "c", gates[2], "d"))
    async with asking(served) as stream:
        for number, gate in enumerate(gates):
            await within(WAIT_S, gate.reached.wait())
            await stream.until(PING, stream.wire.count(PING) + 2)
            assert (
                content_of(data_of(stream.wire.rstrip(b"\n: ping") + b"\n\n"))
                == "abc"[: number + 1]
            )
            gate.opened.set()
        events = data_of(await stream.rest())
    assert (content_of(events), events[-1]) == ("abcd", "[DONE]")


async def test_a_silence_at_a_handoff_has_pings(stage: Stage) -> None:
    gate = Gate()
    served, large = await writing(stage, writes("<think>", "Now"))
    small = FakeVllm(writes(gate, " it", ".", "</think>", "Fine"), model="tiny")
    small.tokenizer = large.tokenizer
    await stage.engine(small)
    backends = {"large": {"urls": [large.url]}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": backends, **SOON}, policy_of(large, small))
    async with asking(served) as stream:
        await within(WAIT_S, gate.reached.wait())
        await stream.until(PING, 2)
        gate.opened.set()
        await stream.until(b" it")


async def test_a_busy_stream_has_none(stage: Stage) -> None:
    gates = [Gate() for _ in range(5000)]
    acts = [act for gate in gates for act in ("x", gate)]
    served, _ = await writing(stage, writes(*acts), {"timeouts": {"keep_alive": 0.5}})
    started, read = time.monotonic(), 0
    async with asking(served, max_tokens=3000) as stream:
        while time.monotonic() - started < 1.2 and read < len(gates):
            read += 1
            await stream.until(b'"content":"x"', read)
            gates[read - 1].opened.set()
        assert read > 10
    assert PING not in stream.wire


async def test_a_reply_in_one_piece_has_none(stage: Stage) -> None:
    gate = Gate()
    served, _ = await writing(stage, writes(gate, "Fine"))
    asked = asyncio.create_task(ask(served))
    await within(WAIT_S, gate.reached.wait())
    async with asking(served) as stream:  # pings would have come to the other one too
        await stream.until(PING, 2)
        gate.opened.set()
    assert (await asked)["choices"][0]["message"]["content"] == "Fine"


async def test_a_message_has_the_pings_of_its_own_api(stage: Stage) -> None:
    gate = Gate()
    served, _ = await writing(stage, writes("Fi", gate, "ne"))
    async with asking(served, MESSAGES, **ASKED[MESSAGES]) as stream:
        await stream.until(b'event: ping\ndata: {"type":"ping"}\n\n', 2)
        gate.opened.set()
        kinds = [event["type"] for event in events_of(await stream.rest())]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert b"\n" + PING not in stream.wire


async def test_a_response_has_comments(stage: Stage) -> None:
    gate = Gate()
    served, _ = await writing(stage, writes("Fi", gate, "ne"))
    async with asking(served, RESPONSES, **ASKED[RESPONSES]) as stream:
        await stream.until(PING, 2)
        gate.opened.set()
        wire = await stream.rest()
    assert PING + b"\n" not in wire
    kinds = [event["type"] for event in events_of(wire.replace(PING, b""))]
    assert kinds[-1] == "response.completed"


async def test_openais_sdk_reads_a_stream_with_pings(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, pinged = [Gate(), Gate()], asyncio.Event()

    def ping(self: OpenAIWire) -> bytes:
        pinged.set()
        return PING

    monkeypatch.setattr(OpenAIWire, "ping", ping)
    served, _ = await writing(stage, writes(gates[0], "Fi", gates[1], "ne"))

    async def silences() -> None:
        for gate in gates:
            await gate.reached.wait()
            pinged.clear()
            await pinged.wait()
            gate.opened.set()

    waiting = asyncio.create_task(silences())
    stream = await served.client.chat.completions.create(model=POLICY, messages=USER, stream=True)
    chunks = [chunk async for chunk in stream]
    await within(WAIT_S, waiting)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Fine"
    assert all(chunk.id == chunks[0].id for chunk in chunks)


# ---- what comes after a ping --------------------------------------------------------------------


@pytest.mark.parametrize("failure", [Error("cache full"), Reset()], ids=["error", "reset"])
async def test_an_error_after_a_ping_is_an_event(stage: Stage, failure: Act) -> None:
    gate = Gate()
    served, _ = await writing(stage, writes(gate, failure))
    async with asking(served) as stream:
        await stream.until(PING)
        gate.opened.set()
        [event] = data_of(await stream.rest())
    assert stream.response.status == 200
    assert set(event["error"]) == {"message", "type", "param", "code"}


async def test_a_refusal_after_a_ping_is_an_event(stage: Stage) -> None:
    served, large = await writing(stage, writes("ok"))
    gate = large.gates[COMPLETIONS] = Gate()
    large.refusals[COMPLETIONS] = (422, b'{"error": {"message": "told so"}}')
    async with asking(served) as stream:
        await stream.until(PING)
        gate.opened.set()
        [event] = data_of(await stream.rest())
    assert event["error"]["message"] == "told so"


async def test_an_error_after_a_ping_is_told_in_anthropics_shape(stage: Stage) -> None:
    gate = Gate()
    served, _ = await writing(stage, writes(gate, Reset()))
    async with asking(served, MESSAGES, **ASKED[MESSAGES]) as stream:
        await stream.until(b"event: ping")
        gate.opened.set()
        events = events_of(await stream.rest())
    assert events[-1]["error"]["type"] == "api_error"
    assert {event["type"] for event in events[:-1]} == {"ping"}


async def test_another_replica_takes_over_even_after_a_ping(stage: Stage) -> None:
    gate = Gate()
    broken, sound = (
        FakeVllm(writes(gate, Reset()), model="big"),
        FakeVllm(writes("Fine"), model="big"),
    )
    small = FakeVllm(model="tiny")
    for engine in (broken, sound, small):
        await stage.engine(engine)
    urls = {"large": {"urls": [broken.url, sound.url]}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": urls, **SOON}, policy_of(broken, small))
    await until_ready(served, 200)
    async with asking(served) as stream:
        await stream.until(PING)
        gate.opened.set()
        events = data_of(await stream.rest())
    assert (content_of(events), events[-1]) == ("Fine", "[DONE]")
    assert len(broken.decodes) == len(sound.decodes) == 1


async def test_leaving_after_a_ping_reaches_the_engine(stage: Stage) -> None:
    served, large = await writing(stage, writes(Gate()))
    async with client(served, stream=True) as (reader, _):
        await within(WAIT_S, reader.readuntil(PING))
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)


async def test_a_slow_rendering_does_not_keep_a_request_from_going_whole(stage: Stage) -> None:
    """A ping would have begun a stream, and the engine's own reply could not be the answer."""
    large, small = FakeVllm(model="big"), FakeVllm(writes(Gate()), model="tiny")
    served = await stage.pair(large, small, SOON)
    await until_ready(served, 200)
    gate = large.gates["/tokenize"] = Gate()
    body = {"chat_template_kwargs": {"enable_thinking": False}, "tools": TOOLS[RESPONSES]}
    create = served.client.chat.completions.with_raw_response.create
    asked = asyncio.create_task(
        create(model=POLICY, messages=USER, stream=True, extra_body=body)  # type: ignore[call-overload]
    )
    await within(WAIT_S, gate.reached.wait())
    async with asking(served, relaygen={"mode": "small"}) as stream:
        await stream.until(PING, 3)  # by then one was due for the other, too
    gate.opened.set()
    reply = await within(WAIT_S, asked)
    assert reply.headers["x-relaygen-mode"] == "passthrough"
    assert await reply.http_response.aread() == large.whole_reply
