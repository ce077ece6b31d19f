"""Tools after a relayed thinking: limits and usage of both together, odd thoughts, what breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import openai
import pytest

from tests.gateway.fakes import Error, FakeEngine, FakeSglang, Fin, Gate, Raw, Reset
from tests.gateway.fakes.engines import CHAT
from tests.gateway.fakes.script import Act
from tests.gateway.support import GONE_S, USER, WAIT_S, Stage, ask, stream, within
from tests.gateway.test_cancellation import client, idle
from tests.gateway.tooling import (
    CALL,
    DIALECTS,
    LARGE_THOUGHT,
    SMALL_THOUGHT,
    THOUGHT,
    TOOLS,
    USAGE,
    calls_of,
    raw,
    two,
    written,
)

# ---- usage and limits ---------------------------------------------------------------------------


@DIALECTS
async def test_usage_is_the_thinking_and_the_answer_by_their_roles(
    stage: Stage, dialect: Callable[..., FakeEngine]
) -> None:
    served, large, _ = await two(stage, CALL, dialect=dialect)
    reply = await stream(served, tools=TOOLS, **USAGE)
    [usage] = reply.usages
    called = len(CALL.pieces) + 1  # and the end of turn
    ours = usage["relaygen"]
    assert (ours["large_tokens"], ours["small_tokens"]) == (LARGE_THOUGHT + called, SMALL_THOUGHT)
    assert usage["completion_tokens"] == LARGE_THOUGHT + SMALL_THOUGHT + called
    assert (ours["handoffs"], ours["segments"]) == (2, 3)
    assert usage["prompt_tokens"] == len(large.tokenizer.encode(large.rendered(USER, tools=TOOLS)))
    assert "estimated" not in ours


async def test_limits_hold_for_thinking_and_call_together(stage: Stage) -> None:
    served, large, _ = await two(stage, CALL)
    more = {"min_tokens": 30, "include_stop_str_in_output": True}
    asked = {"max_tokens": 100, "seed": 7, "stop": ["END"], "temperature": 0.1}
    await ask(served, tools=TOOLS, extra_body=more, **asked)
    body = large.asked(CHAT)[-1].body
    thought = LARGE_THOUGHT + SMALL_THOUGHT
    assert (body["max_tokens"], body["min_tokens"]) == (100 - thought, 30 - thought)
    assert (body["stop"], body["include_stop_str_in_output"]) == (["END"], True)
    assert (body["seed"], body["temperature"]) == (7 + 2, 0.1)


async def test_a_budget_that_the_thinking_spends_calls_nothing(stage: Stage) -> None:
    served, large, _ = await two(stage, CALL)
    reply = await stream(served, tools=TOOLS, max_tokens=LARGE_THOUGHT + SMALL_THOUGHT)
    assert reply.finishes == ["length"]
    assert large.asked(CHAT) == []


async def test_logprobs_come_with_the_answer(stage: Stage) -> None:
    served, large, _ = await two(stage, "{", "}")
    reply = await raw(served, tools=None, response_format={"type": "json_object"}, logprobs=True)
    entries = [e for c in reply.choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert "".join(e["token"] for e in entries if e["token"] != "<|im_end|>") == THOUGHT + "{}"
    assert large.asked(CHAT)[-1].body["logprobs"] is True


async def test_every_choice_calls_by_itself_and_with_a_seed_of_its_own(stage: Stage) -> None:
    served, large, _ = await two(stage, CALL)
    reply = await ask(served, tools=TOOLS, n=2, seed=5)
    for choice in reply["choices"]:
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    seeds = [chat.body["seed"] for chat in large.asked(CHAT)]
    assert len(set(seeds)) == 2
    called = len(CALL.pieces) + 1
    expected = 2 * (LARGE_THOUGHT + SMALL_THOUGHT + called)
    assert reply["usage"]["completion_tokens"] == expected


# ---- models that think oddly --------------------------------------------------------------------


async def test_a_model_that_does_not_think_writes_its_reply_by_chat(stage: Stage) -> None:
    served, large, small = await two(stage)
    large.script = lambda prompt: ("I", " look", ".", CALL)
    reply = await stream(served, tools=TOOLS, **USAGE)
    assert reply.text("content") + reply.text("reasoning_content") + reply.text("reasoning") == (
        "I look."
    )
    assert len(calls_of(reply)) == len(CALL.arguments) + 1
    assert written(large.prompts()[-1]) == ""
    assert small.decodes == []
    ours = reply.usages[0]["relaygen"]
    assert ours["large_tokens"] == 3 + len(CALL.pieces) + 1
    assert ours["discarded_tokens"] >= 1


async def test_a_thought_that_the_model_never_closes_is_closed_for_it(stage: Stage) -> None:
    served, large, _ = await two(stage)

    def script(prompt: str) -> Iterable[Act]:
        return [CALL] if "</think>" in prompt else ["<think>", "Six", "."]

    large.script = script
    reply = await stream(served, tools=TOOLS, **USAGE)
    assert reply.text("reasoning_content") == "Six.\n"
    assert written(large.prompts()[-1]) == "<think>Six.\n</think>"
    assert reply.finishes == ["tool_calls"]
    assert reply.usages[0]["completion_tokens"] == 3 + len(CALL.pieces) + 1


async def test_a_thought_that_the_template_opens_is_not_opened_twice(stage: Stage) -> None:
    served, large, small = await two(stage)
    large.opens = small.opens = "<think>\n"
    large.script = lambda prompt: [CALL] if "</think>" in prompt else ["Six", ".", "</think>"]
    reply = await stream(served, tools=TOOLS)
    assert reply.text("reasoning_content") == "Six."
    assert written(large.prompts()[-1]) == "<think>\nSix.</think>"
    assert reply.finishes == ["tool_calls"]


# ---- what breaks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        Error("cache full"),
        Reset(),
        Fin(),
        Raw(b"data: {nonsense\n\n"),
        Raw(b"data: []\n\n"),
        Raw(b'data: {"choices": [5]}\n\n'),
        Raw(b'data: {"choices": [{"finish_reason": "abort"}]}\n\ndata: [DONE]\n\n'),
    ],
    ids=["error", "reset", "fin", "no json", "no object", "no choice", "abort"],
)
async def test_what_breaks_in_a_call_is_an_error_event_and_no_end(
    stage: Stage, failure: Act
) -> None:
    served, _, _ = await two(stage, "One", CALL, failure)
    reply = await raw(served)
    assert reply.status == 200
    assert "error" in reply.chunks[-1]
    assert "[DONE]" not in reply.data
    assert not any(c["finish_reason"] for c in reply.choices)
    with pytest.raises(openai.APIError):
        await stream(served, tools=TOOLS)
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(served, tools=TOOLS)
    assert caught.value.status_code >= 429


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (500, 502), (503, 503)])
async def test_a_chat_that_is_refused_is_told(stage: Stage, status: int, seen: int) -> None:
    served, large, _ = await two(stage, CALL)
    large.refusals[CHAT] = (status, b'{"error": {"message": "no such tool"}}')
    reply = await raw(served)
    assert "no such tool" in reply.chunks[-1]["error"]["message"]
    assert "[DONE]" not in reply.data
    with pytest.raises(openai.APIStatusError, match="no such tool") as caught:
        await ask(served, tools=TOOLS)
    assert caught.value.status_code == seen


async def test_an_answer_in_one_piece_is_told_as_deltas(stage: Stage) -> None:
    served, large, _ = await two(stage)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    usage = {"completion_tokens": 5, "prompt_tokens": 9, "total_tokens": 14}
    large.refusals[CHAT] = (200, json.dumps({**whole, "usage": usage}).encode())
    reply = await stream(served, tools=TOOLS, **USAGE)
    assert [c["index"] for c in calls_of(reply)] == [0, 1]
    assert [{**c, "index": 0} for c in calls_of(reply)] == [{**call, "index": 0}] * 2
    assert reply.finishes == ["tool_calls"]
    thought = LARGE_THOUGHT + SMALL_THOUGHT
    assert reply.usages[0]["completion_tokens"] == thought + 5


@pytest.mark.parametrize("streaming", [True, False])
async def test_leaving_in_a_call_reaches_the_engine(stage: Stage, streaming: bool) -> None:
    gate = Gate()
    served, large, _ = await two(stage, CALL, gate)
    async with client(served, stream=streaming, tools=TOOLS):
        await within(WAIT_S, gate.reached.wait())
    await within(GONE_S, large.asked(CHAT)[0].left.wait())
    await idle(served)


async def test_leaving_in_a_call_aborts_it_where_closing_alone_does_not(stage: Stage) -> None:
    gate = Gate()
    served, large, _ = await two(stage, gate, dialect=FakeSglang)
    async with client(served, stream=True, tools=TOOLS):
        await within(WAIT_S, gate.reached.wait())
    assert isinstance(large, FakeSglang)
    rid = large.asked(CHAT)[-1].body["rid"]
    assert await within(GONE_S, large.freeing(rid)) == "abort"
