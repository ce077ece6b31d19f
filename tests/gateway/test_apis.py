"""Anthropic's Messages and OpenAI's Responses, through the gateway, in front of a relay."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import pytest

from tests.gateway.fakes import (
    FakeEngine,
    FakeVllm,
    Script,
    Tokenizer,
    writes,
)
from tests.gateway.fakes.engines import CHAT
from tests.gateway.fakes.script import Act
from tests.gateway.support import (
    POLICY,
    Served,
    Stage,
    until_ready,
)
from tests.gateway.tooling import CALL, two, written

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED: dict[str, dict[str, Any]] = {
    MESSAGES: {"max_tokens": 500, "messages": [{"role": "user", "content": "How many?"}]},
    RESPONSES: {"input": "How many?", "messages": None},
}
MESSAGES_TOOL = {"name": "look", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
TOOLS = {MESSAGES: [MESSAGES_TOOL], RESPONSES: [RESPONSES_TOOL]}
PATHS = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
THOUGHT, ANSWER = "Six. Now it is. Go on.", "It is."


async def relaying(stage: Stage, *answer: Act, **policy: Any) -> tuple[Served, FakeEngine]:
    """The large model thinks with the small one's help, which answers; or calls a tool."""
    acts = answer or ("It", " is", ".")
    served, large, _ = await two(stage, CALL, small_answer=acts, **policy)
    return served, large


async def writing(stage: Stage, script: Script) -> tuple[Served, FakeVllm]:
    large = FakeVllm(script, model="big")
    return await stage.pair(large, FakeVllm(model="tiny", tokenizer=large.tokenizer)), large


async def send(
    served: Served, path: str, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, bytes]:
    given = {"model": POLICY, **ASKED.get(path, {}), **body}
    data = json.dumps({k: v for k, v in given.items() if v is not None})
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + path, data=data, headers=headers) as response,
    ):
        return response.status, await response.read()


async def streamed(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; each must be named by its type."""
    status, wire = await send(served, path, stream=True, **body)
    assert status == 200, wire
    return events_of(wire)


def events_of(wire: bytes) -> list[dict[str, Any]]:
    events = []
    for frame in wire.split(b"\n\n")[:-1]:
        name, data = frame.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


async def whole(served: Served, path: str, **body: Any) -> dict[str, Any]:
    status, content = await send(served, path, **body)
    assert status == 200, content
    reply: dict[str, Any] = json.loads(content)
    return reply


def runs(events: Iterable[dict[str, Any]]) -> list[str]:
    """The types in order, of repeated ones but one."""
    types = [event["type"] for event in events]
    return [kind for i, kind in enumerate(types) if not i or kind != types[i - 1]]


def joined(events: Iterable[dict[str, Any]], kind: str) -> str:
    return "".join(event["delta"][kind] for event in events if kind in event.get("delta", ()))


# ---- Messages -----------------------------------------------------------------------------------


async def test_a_relayed_message_is_streamed_in_anthropics_order(stage: Stage) -> None:
    served, _ = await relaying(stage)
    events = await streamed(served, MESSAGES)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs(events) == ["message_start", *block, *block, "message_delta", "message_stop"]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    assert (joined(events, "thinking"), joined(events, "text")) == (THOUGHT, ANSWER)
    assert events[0]["message"]["model"] == POLICY
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_a_relayed_message_comes_whole(stage: Stage) -> None:
    served, _ = await relaying(stage)
    reply = await whole(served, MESSAGES)
    assert reply["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""},
        {"type": "text", "text": ANSWER},
    ]
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", POLICY)
    assert reply["stop_reason"] == "end_turn"


async def test_a_stop_sequence_is_named(stage: Stage) -> None:
    served, _ = await relaying(stage)
    for reply in (
        await whole(served, MESSAGES, stop_sequences=["is"]),
        (await streamed(served, MESSAGES, stop_sequences=["is"]))[-2]["delta"],
    ):
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "is")


async def test_the_systems_text_reaches_both_models(stage: Stage) -> None:
    vocabulary = Tokenizer()
    large = FakeVllm(writes("ok"), model="big", tokenizer=vocabulary)
    served = await stage.pair(large, FakeVllm(model="tiny", tokenizer=vocabulary))
    await whole(served, MESSAGES, system="Be brief.")
    assert large.prompts()[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")


async def test_count_tokens_is_the_length_of_the_large_models_prompt(stage: Stage) -> None:
    served, large = await relaying(stage)
    body = {"messages": [{"role": "user", "content": "How many?"}], "tools": [MESSAGES_TOOL]}
    status, content = await send(served, MESSAGES + "/count_tokens", **body)
    function = {"name": "look", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    prompt = large.rendered(body["messages"], tools=tools)
    expected = {"input_tokens": len(large.tokenizer.encode(prompt))}
    assert (status, json.loads(content)) == (200, expected)
    assert large.decodes == []


# ---- Responses ----------------------------------------------------------------------------------


async def test_a_relayed_response_is_streamed_in_openais_order(stage: Stage) -> None:
    served, _ = await relaying(stage)
    stream = await served.client.responses.create(model=POLICY, input="How many?", stream=True)
    events = [event async for event in stream]
    kinds = runs([{"type": event.type} for event in events])
    parts = ["response.content_part.done", "response.output_item.done"]
    begun = ["response.output_item.added", "response.content_part.added"]
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(*begun, "response.reasoning_text.delta", "response.reasoning_text.done", *parts),
        *(*begun, "response.output_text.delta", "response.output_text.done", *parts),
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response  # type: ignore[union-attr]
    assert response.output_text == ANSWER


async def test_a_relayed_response_comes_whole(stage: Stage) -> None:
    served, _ = await relaying(stage)
    reply = await served.client.responses.create(model=POLICY, input="How many?")
    assert reply.output_text == ANSWER
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[0].content[0].text == THOUGHT  # type: ignore[union-attr,index]
    assert (reply.status, reply.model) == ("completed", POLICY)


# ---- both ---------------------------------------------------------------------------------------


def usage_of(path: str, reply: Any) -> dict[str, Any]:
    if isinstance(reply, list):
        last = reply[-2] if path == MESSAGES else reply[-1]["response"]
        return dict(last["usage"])
    return dict(reply["usage"])


@PATHS
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_usage_tells_who_wrote_how_much(stage: Stage, path: str, streaming: bool) -> None:
    served, large = await relaying(stage)
    reply: Any = await (streamed if streaming else whole)(served, path)
    usage = usage_of(path, reply)
    prompt = large.tokenizer.encode(large.rendered([{"role": "user", "content": "How many?"}]))
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(prompt), 8 + 3 + 4)
    ours = usage["relaygen"]
    assert (ours["policy"], ours["large_tokens"], ours["small_tokens"]) == (POLICY, 8, 7)


@PATHS
async def test_a_limit_reached_is_told(stage: Stage, path: str) -> None:
    served, _ = await relaying(stage)
    limit = {"max_tokens": 4} if path == MESSAGES else {"max_output_tokens": 4}
    reply = await whole(served, path, **limit)
    if path == MESSAGES:
        assert reply["stop_reason"] == "max_tokens"
    else:
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["usage"]["output_tokens"] == 4


def call_of(path: str, reply: dict[str, Any]) -> tuple[str, Any]:
    """Name and arguments of the last thing in a reply, a call."""
    if path == MESSAGES:
        call = reply["content"][-1]
        return call["name"], call["input"]
    call = reply["output"][-1]
    return call["name"], json.loads(call["arguments"])


@PATHS
async def test_a_tool_is_called_after_the_relayed_thinking(stage: Stage, path: str) -> None:
    served, large = await relaying(stage)
    reply = await whole(served, path, tools=TOOLS[path])
    assert call_of(path, reply) == ("look", {"city": "Rome"})
    assert written(large.prompts()[-1]) == f"<think>{THOUGHT}</think>"
    assert reply["usage"]["relaygen"]["small_tokens"] == 3


async def test_a_streamed_message_calls_a_tool(stage: Stage) -> None:
    served, _ = await relaying(stage)
    events = await streamed(served, MESSAGES, tools=TOOLS[MESSAGES])
    shells = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert shells[-1] == {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    assert json.loads(joined(events, "partial_json")) == {"city": "Rome"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_streamed_response_calls_a_tool(stage: Stage) -> None:
    served, _ = await relaying(stage)
    events = await streamed(served, RESPONSES, tools=TOOLS[RESPONSES])
    [done] = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert (done["name"], json.loads(done["arguments"])) == ("look", {"city": "Rome"})


@PATHS
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_what_goes_whole_to_the_large_model_is_translated(
    stage: Stage, path: str, streaming: bool
) -> None:
    served, large = await relaying(stage, tools="whole")
    large.script = writes("I", " look", ".", CALL)
    large.reasoning_parser = False  # type: ignore[attr-defined]
    if streaming:
        events = await streamed(served, path, tools=TOOLS[path])
        reply = events[-1].get("response")
        if path == MESSAGES:
            assert joined(events, "text") == "I look."
            assert json.loads(joined(events, "partial_json")) == {"city": "Rome"}
            assert runs(events)[-1] == "message_stop"
    else:
        reply = await whole(served, path, tools=TOOLS[path])
    if reply is not None:
        assert call_of(path, reply) == ("look", {"city": "Rome"})
        assert reply["model"] == POLICY
    [chat] = large.asked(CHAT)
    assert (chat.body["model"], len(chat.body["tools"])) == ("big", 1)
    assert "relaygen" not in chat.body


@PATHS
async def test_a_backends_own_model_is_passed_through_byte_for_byte(
    stage: Stage, path: str
) -> None:
    served, large = await relaying(stage)
    await until_ready(served, 200)
    reply = b'{"odd":  "reply"}'
    large.refusals[path] = (203, reply)
    body = b'{ "model":"big",\n"x" : 1e2}'
    headers = {"anthropic-version": "2023-06-01", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + path, data=body, headers=headers) as response,
    ):
        assert (response.status, await response.read()) == (203, reply)
        assert response.headers["x-relaygen-mode"] == "passthrough"
    [request] = large.asked(path)
    assert request.content == body
    assert request.headers["anthropic-version"] == "2023-06-01"
