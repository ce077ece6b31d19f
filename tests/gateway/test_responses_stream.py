"""OpenAI's Responses API, the replies: the events and responses that chat completions become."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.apis.responses import ResponsesStream, whole
from gateway.errors import GatewayError, UpstreamError
from tests.gateway.chat_chunks import call, delta, events_of, usage

REQUEST: dict[str, Any] = {
    "model": "pair",
    "input": "2+3?",
    "instructions": "Be brief.",
    "metadata": {"a": "b"},
    "tools": [{"type": "function", "name": "add", "parameters": {}, "strict": None}],
    "temperature": 0.5,
    "store": True,
    "max_output_tokens": 9,
    "reasoning": {"effort": "low"},
}
CHUNKS = [
    delta(role="assistant", content=""),
    delta(reasoning_content="Ad", reasoning="Ad"),
    delta(reasoning_content="d."),
    delta(content="I add."),
    delta(tool_calls=[call("", "add", index=0, id="t1")]),
    delta(tool_calls=[call('{"a":1}', index=0)]),
    delta("tool_calls"),
    usage(relaygen={"policy": "pair"}),
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
INTEGERS = st.integers(-(2**63), 2**63)
KINDS = {"reasoning_content": "reasoning", "reasoning": "reasoning", "content": "message"}


def frames(*chunks: dict[str, Any]) -> list[bytes]:
    stream = ResponsesStream("pair", REQUEST)
    return [*map(stream.chunk, chunks), b": ping\n", stream.end()]


def streamed(*chunks: dict[str, Any]) -> list[dict[str, Any]]:
    events = events_of(b"".join(frame for frame in frames(*chunks) if frame[:1] != b":"))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def items_of(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Type and joined deltas of each item; the order of the events is checked on the way."""
    items: list[tuple[str, str]] = []
    closed: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == len(closed)
            items.append((event["item"]["type"], ""))
            continue
        assert event["output_index"] == len(items) - 1 == len(closed)
        if kind.endswith(".delta"):
            items[-1] = (items[-1][0], items[-1][1] + event["delta"])
        elif kind == "output_item.done":
            closed.append(event["item"])
    assert events[-1]["response"]["output"] == closed
    return items


@asynccontextmanager
async def served(*written: bytes) -> AsyncIterator[AsyncOpenAI]:
    """A client of a server that writes these frames."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for frame in written:
            await response.write(frame)
        return response

    app = web.Application()
    app.router.add_post("/v1/responses", respond)
    async with (
        TestServer(app) as server,
        AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="any", max_retries=0) as client,
    ):
        yield client


def test_the_events_of_thinking_text_and_a_call() -> None:
    events = streamed(*CHUNKS)
    reasoning = {"item_id": "rs_abc_0", "output_index": 0, "content_index": 0}
    message = {"item_id": "msg_abc_1", "output_index": 1, "content_index": 0}
    call_ = {"item_id": "fc_abc_2", "output_index": 2}
    no_text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning_text", "text": "Add."}
    output = [
        {"id": "rs_abc_0", "type": "reasoning", "summary": [], "content": [thought]},
        {
            "id": "msg_abc_1",
            "type": "message",
            "role": "assistant",
            "content": [{**no_text, "text": "I add."}],
        },
        {"id": "fc_abc_2", "type": "function_call", "call_id": "t1", "name": "add"},
    ]
    done = [{**item, "status": "completed"} for item in output]
    done[2]["arguments"] = '{"a":1}'
    begun = [{**item, "status": "in_progress"} for item in output]
    for item, key, empty in zip(
        begun, ("content", "content", "arguments"), ([], [], ""), strict=True
    ):
        item[key] = empty
    left_out = ("sequence_number", "response")
    assert [{k: v for k, v in e.items() if k not in left_out} for e in events] == [
        {"type": "response.created"},
        {"type": "response.in_progress"},
        {"type": "response.output_item.added", "output_index": 0, "item": begun[0]},
        {"type": "response.content_part.added", **reasoning, "part": {**thought, "text": ""}},
        {"type": "response.reasoning_text.delta", **reasoning, "delta": "Ad"},
        {"type": "response.reasoning_text.delta", **reasoning, "delta": "d."},
        {"type": "response.reasoning_text.done", **reasoning, "text": "Add."},
        {"type": "response.content_part.done", **reasoning, "part": thought},
        {"type": "response.output_item.done", "output_index": 0, "item": done[0]},
        {"type": "response.output_item.added", "output_index": 1, "item": begun[1]},
        {"type": "response.content_part.added", **message, "part": no_text},
        {"type": "response.output_text.delta", **message, "delta": "I add.", "logprobs": []},
        {"type": "response.output_text.done", **message, "text": "I add.", "logprobs": []},
        {"type": "response.content_part.done", **message, "part": {**no_text, "text": "I add."}},
        {"type": "response.output_item.done", "output_index": 1, "item": done[1]},
        {"type": "response.output_item.added", "output_index": 2, "item": begun[2]},
        {"type": "response.function_call_arguments.delta", **call_, "delta": '{"a":1}'},
        {"type": "response.function_call_arguments.done", **call_, "name": "add",
         "arguments": '{"a":1}'},
        {"type": "response.output_item.done", "output_index": 2, "item": done[2]},
        {"type": "response.completed"},
    ]  # fmt: skip
    assert events[-1]["response"]["output"] == done
    for event in events:
        EVENT.validate_python(event)


def test_the_response_echoes_the_request_and_tells_the_usage() -> None:
    started, *_, last = streamed(*CHUNKS)
    begun, response = started["response"], last["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert (
        response.items()
        >= {
            "id": "resp_abc",
            "status": "completed",
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "max_output_tokens": 9,
            "store": False,
            "reasoning": {"effort": "low", "summary": None},
        }.items()
    )
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 17,
        "relaygen": {"policy": "pair"},
    }


def test_a_whole_response_says_what_the_stream_says() -> None:
    calls = [call('{"a":1}', "add", id="t1")]
    message = {"content": "I add.", "reasoning_content": "Add.", "tool_calls": calls}
    choice = {"message": message, "finish_reason": "tool_calls"}
    completion = {**usage(relaygen={"policy": "pair"}), "created": 1, "choices": [choice]}
    response = whole(completion, "pair", REQUEST)
    assert response == streamed(*CHUNKS)[-1]["response"]
    Response.model_validate(response)
    Response.model_validate(whole(completion, "pair"))


async def test_the_openai_client_reads_the_stream() -> None:
    async with served(*frames(*CHUNKS)) as client:
        stream = await client.responses.create(model="pair", input="2+3?", stream=True)
        types = [event.type async for event in stream]
        assert types == [event["type"] for event in streamed(*CHUNKS)]
        async with client.responses.stream(model="pair", input="2+3?") as told:
            final = await told.get_final_response()
    assert final.output_text == "I add."
    thinking, _, made = final.output
    assert thinking.type == "reasoning" and thinking.content[0].text == "Add."
    assert made.type == "function_call" and made.arguments == '{"a":1}'
    assert final.usage is not None and final.usage.total_tokens == 17


def test_a_limit_leaves_the_response_and_its_last_item_incomplete() -> None:
    last = streamed(delta(reasoning_content="Hm."), delta("length", content="It"), usage())[-1]
    response = last["response"]
    assert last["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    filtered = whole(delta("content_filter", content="It"), "pair")
    assert filtered["incomplete_details"] == {"reason": "content_filter"}


@pytest.mark.parametrize("finish", [None, "abort"])
def test_an_ending_is_never_made_up(finish: str | None) -> None:
    last = streamed(delta(finish, content="It is"))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    EVENT.validate_python(last)
    with pytest.raises(UpstreamError):
        whole(delta(finish, content="It is"), "pair")


def test_nothing_follows_an_error() -> None:
    stream = ResponsesStream("pair")
    stream.chunk(delta(content="It is"))
    (told,) = events_of(stream.error(GatewayError("Too many", status=429)))
    assert told["response"]["error"] == {"code": "rate_limit_exceeded", "message": "Too many"}
    assert stream.end() == b""


async def test_an_error_before_the_start_is_an_error_event() -> None:
    error = ResponsesStream("pair").error(UpstreamError("No engine", code="engine_unreachable"))
    (told,) = events_of(error)
    assert (told["type"], told["code"]) == ("error", "engine_unreachable")
    async with served(error) as client:
        stream = await client.responses.create(model="pair", input="2+3?", stream=True)
        assert [event.type async for event in stream] == ["error"]


def test_logprobs_go_with_the_text_they_belong_to() -> None:
    def entry(token: str, **more: Any) -> dict[str, Any]:
        return {"token": token, "logprob": -0.5, **more}

    half = [entry("\ufffd", bytes=[0xC3]), entry("\ufffd", bytes=[0xA9])]
    chunks = [delta(reasoning_content="Hm"), delta(content=""), delta("stop", content="é!")]
    for chunk, entries in zip(
        chunks, ([entry("Hm")], half[:1], [half[1], entry("!")]), strict=True
    ):
        chunk["choices"][0]["logprobs"] = {"content": entries}
    (message,) = (i for i in streamed(*chunks)[-1]["response"]["output"] if i["type"] == "message")
    wanted = [{**e, "top_logprobs": []} for e in (*half, entry("!", bytes=[0x21]))]
    assert message["content"][0]["logprobs"] == wanted
    told = {"content": "é!", "reasoning_content": "Hm"}
    entries = {"content": [entry("Hm"), *half, entry("!"), entry("<end>")]}
    choice = {"message": told, "finish_reason": "stop", "logprobs": entries}
    response = whole({"choices": [choice]}, "pair")
    assert response["output"][1]["content"][0]["logprobs"] == wanted
    Response.model_validate(response)


@given(st.lists(st.tuples(st.sampled_from(list(KINDS)), st.text(max_size=5)), max_size=20))
def test_any_split_of_the_text_gives_the_same_text(pieces: list[tuple[str, str]]) -> None:
    told = items_of(streamed(*(delta(**{k: t}) for k, t in pieces), delta("stop")))
    joined: list[tuple[str, str]] = []
    for key, piece in ((KINDS[k], t) for k, t in pieces if t):
        if joined and joined[-1][0] == key:
            joined[-1] = (key, joined[-1][1] + piece)
        else:
            joined.append((key, piece))
    assert told == joined


@given(
    st.lists(st.dictionaries(st.text(max_size=3), INTEGERS, min_size=1), max_size=4),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_mixed_calls_keep_their_arguments(inputs: list[Any], size: int, order: Any) -> None:
    wanted = [orjson.dumps(value).decode() for value in inputs]
    rest = [[a[at : at + size] for at in range(0, len(a), size)] for a in wanted]
    chunks = [delta(tool_calls=[call("", "f", index=i, id=f"t{i}")]) for i in range(len(rest))]
    while any(rest):
        i = order.choice([i for i, pieces in enumerate(rest) if pieces])
        chunks.append(delta(tool_calls=[call(rest[i].pop(0), index=i)]))
    events = streamed(*chunks, delta("tool_calls"))
    assert items_of(events) == [("function_call", arguments) for arguments in wanted]
    assert [item["call_id"] for item in events[-1]["response"]["output"]] == [
        f"t{i}" for i in range(len(wanted))
    ]
