"""Tools and structured output: the thinking is relayed, one model's chat endpoint goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.gateway.fakes import FakeEngine, FakeVllm, ToolCall
from tests.gateway.fakes.engines import CHAT
from tests.gateway.fakes.script import Act
from tests.gateway.support import POLICY, USER, Served, Stage, ask, stream
from tests.gateway.tooling import (
    CALL,
    DIALECTS,
    LARGE_THOUGHT,
    SMALL_THOUGHT,
    THOUGHT,
    TOOLS,
    USAGE,
    alone,
    calls_of,
    large_then,
    raw,
    small_then,
    two,
    written,
)

# ---- the thinking, then the call ----------------------------------------------------------------


@DIALECTS
async def test_the_thinking_is_relayed_and_the_large_model_calls_the_tool(
    stage: Stage, dialect: Callable[..., FakeEngine]
) -> None:
    served, large, small = await two(stage, CALL, dialect=dialect)
    reply = await stream(served, tools=TOOLS, **USAGE)
    assert reply.text("reasoning_content") == "Six. Now it is. Go on."
    assert reply.text("content") == ""
    calls = calls_of(reply)
    assert [c["function"]["name"] for c in calls if c["function"].get("name")] == ["look"]
    assert "".join(c["function"]["arguments"] for c in calls) == '{"city": "Rome"}'
    assert reply.finishes == ["tool_calls"]
    assert [delta["role"] for delta in reply.deltas if delta.get("role")] == ["assistant"]
    assert len(small.decodes) == 1
    assert large.asked(CHAT)[-1].body["tools"] == TOOLS


@DIALECTS
async def test_the_chat_goes_on_after_exactly_the_thought(
    stage: Stage, dialect: Callable[..., FakeEngine]
) -> None:
    served, large, _ = await two(stage, CALL, dialect=dialect)
    await stream(served, tools=TOOLS)
    assert written(large.prompts()[-1]) == THOUGHT


CALLS: list[list[Act]] = [
    [CALL],
    [ToolCall("look", index=None)],
    [ToolCall("look", id=None)],
    [ToolCall("look", index=1)],
    [ToolCall("look", repeats_id=True)],
    [ToolCall("look"), ToolCall("ask", ('{"a":', " 1}"), id="call_2", index=1)],
    ["Let", " me", " look", ".", ToolCall("look")],
]


@pytest.mark.parametrize("acts", CALLS, ids=range(len(CALLS)))
@DIALECTS
async def test_the_engines_choices_come_as_they_are(
    stage: Stage, dialect: Callable[..., FakeEngine], acts: list[Act]
) -> None:
    served, large, _ = await two(stage, *acts, dialect=dialect)
    reply = await raw(served)
    expected = await alone(large)
    assert expected
    seen = reply.choices[-len(expected) :]
    assert json.dumps(seen) == json.dumps(expected)
    assert not any("tool_calls" in c["delta"] for c in reply.choices[: -len(expected)])
    assert reply.data[-1] == "[DONE]"


async def test_every_chunk_is_one_of_the_same_reply(stage: Stage) -> None:
    served, _, _ = await two(stage, CALL)
    reply = await raw(served)
    heads = {(c["id"], c["object"], c["created"], c["model"]) for c in reply.chunks}
    assert len(heads) == 1
    assert heads.pop()[3] == POLICY


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {"type": "object"}},
        {"grammar": 'root ::= "a"'},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_structured_output_holds_for_what_follows_the_thinking_alone(
    stage: Stage, field: dict[str, Any]
) -> None:
    served, large, small = await two(stage, "{", "}")
    reply = await stream(served, extra_body=field)
    assert reply.text("reasoning_content") == "Six. Now it is. Go on."
    assert reply.text("content") == "{}"
    [chat] = large.asked(CHAT)
    assert field.items() <= chat.body.items()
    for decode in [*large.asked("/v1/completions"), *small.decodes]:
        assert not field.keys() & decode.body.keys()


async def test_the_mode_is_a_relays(stage: Stage) -> None:
    served, _, _ = await two(stage, CALL)
    create = served.client.chat.completions.with_raw_response.create
    reply = await create(model=POLICY, messages=USER, tools=TOOLS)
    assert reply.headers["x-relaygen-mode"] == "relay"


async def test_the_trace_names_the_large_model_for_the_call(stage: Stage) -> None:
    served, _, _ = await two(stage, CALL)
    reply = await raw(served, relaygen={"trace": True})
    marks = [chunk["relaygen"] for chunk in reply.chunks]
    assert marks[-1] == {"role": "large", "segment": 2}
    assert {"role": "small", "segment": 1} in marks


# ---- in one piece -------------------------------------------------------------------------------


@pytest.mark.parametrize("acts", CALLS, ids=range(len(CALLS)))
async def test_calls_are_folded_to_a_message(stage: Stage, acts: list[Act]) -> None:
    served, _, _ = await two(stage, *acts)
    reply = await ask(served, tools=TOOLS)
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"] == "Six. Now it is. Go on."
    assert message["content"] == ("Let me look." if acts[0] == "Let" else None)
    wanted = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": "".join(call.arguments)},
        }
        for call in acts
        if isinstance(call, ToolCall)
    ]
    assert message["tool_calls"] == wanted


async def test_calls_that_all_have_index_0_stay_apart(stage: Stage) -> None:
    acts = [ToolCall("look"), ToolCall("ask", ('{"a"', ": 1}"), id="call_2")]
    served, _, _ = await two(stage, *acts)
    message = (await ask(served, tools=TOOLS))["choices"][0]["message"]
    told = [(c["id"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert told == [("call_1", "{}"), ("call_2", '{"a": 1}')]


# ---- who else may write it ----------------------------------------------------------------------


async def test_the_small_model_may_call_too(stage: Stage) -> None:
    served, large, small = await two(stage, small_answer=[CALL], tools="small")
    reply = await stream(served, tools=TOOLS, **USAGE)
    assert calls_of(reply)
    assert large.asked(CHAT) == []
    assert written(small.prompts()[-1]) == THOUGHT
    ours = reply.usages[0]["relaygen"]
    called = len(CALL.pieces) + 1
    assert (ours["large_tokens"], ours["small_tokens"]) == (LARGE_THOUGHT, SMALL_THOUGHT + called)
    assert (ours["handoffs"], ours["segments"]) == (3, 4)


async def whole(served: Served, **request: Any) -> tuple[str, list[str]]:
    """How it was served, and the reason that the log has."""
    with capture_logs() as logs:
        create = served.client.chat.completions.with_raw_response.create
        reply = await create(model=POLICY, messages=USER, **{"tools": TOOLS, **request})
    reasons = [entry["reason"] for entry in logs if entry["event"] == "passed through"]
    return reply.headers["x-relaygen-mode"], reasons


async def test_a_policy_may_leave_it_whole_to_the_large_model(stage: Stage) -> None:
    served, large, small = await two(stage, CALL, tools="whole")
    assert await whole(served) == ("passthrough", ["tools: the policy says so (tools: whole)"])
    assert len(large.decodes) == 1
    assert small.decodes == []


async def test_a_template_that_drops_thoughts_leaves_it_whole(stage: Stage) -> None:
    large = FakeVllm(large_then(CALL), model="big")
    small = FakeVllm(small_then(), model="tiny", tokenizer=large.tokenizer)
    large.chats, large.template = True, "r1"
    served = await stage.pair(large, small)
    mode, [reason] = await whole(served)
    assert (mode, len(large.asked(CHAT)), small.decodes) == ("passthrough", 1, [])
    assert reason.startswith("tools: the chat endpoint of ")


@pytest.mark.parametrize("mode", ["large", "small"])
async def test_one_model_that_writes_all_is_asked_whole(stage: Stage, mode: str) -> None:
    served, large, small = await two(stage, CALL, small_answer=[CALL])
    body = {"relaygen": {"mode": mode}}
    assert (await whole(served, extra_body=body))[0] == "passthrough"
    engine, other = (large, small) if mode == "large" else (small, large)
    [chat] = engine.asked(CHAT)
    assert chat.body == {"model": engine.model, "messages": USER, "tools": TOOLS}
    assert other.decodes == []


async def test_thinking_switched_off_leaves_it_whole(stage: Stage) -> None:
    served, _, small = await two(stage, CALL)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    mode, [reason] = await whole(served, extra_body=off)
    assert mode == "passthrough"
    assert reason == "tools, and the template leaves no thinking to relay"
    assert small.decodes == []


# ---- earlier turns ------------------------------------------------------------------------------

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "How many?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42 of them"},
]


@DIALECTS
async def test_tools_and_earlier_calls_reach_the_templates_of_both_models(
    stage: Stage, dialect: Callable[..., FakeEngine]
) -> None:
    served, large, small = await two(stage, CALL, dialect=dialect)
    await ask(served, messages=HISTORY, tools=TOOLS)
    head = large.rendered(HISTORY, tools=TOOLS)
    assert "42 of them" in head
    assert "look" in head
    for prompt in [*large.prompts(), *small.prompts()]:
        assert prompt.startswith(head)
