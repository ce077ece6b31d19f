"""Tool calls as the engine sends them, and requests of any legal shape."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import case
from tests.cases.support import BY_CHAT, Answer, pair_of, post, served_by
from tests.gateway.fakes import FakeVllm, ToolCall, story
from tests.gateway.fakes.asking import Asking
from tests.gateway.fakes.engines import CHAT, FakeEngine
from tests.gateway.support import REASONING, STORY, USER, Served, Stage

THOUGHT = STORY[: STORY.index("</think>") + 1]
PARAMETERS = {
    "type": "object",
    "properties": {"of": {"type": "array", "items": {"anyOf": [{"type": "null"}, {}]}}},
    "$defs": {"deep": [{"deeper": {"deepest": None}}]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("add", "look")
]
CALLS = {
    "as OpenAI sends them": (ToolCall("add", id="a"), ToolCall("look", id="b", index=1)),
    "no index": (ToolCall("add", id="a", index=None), ToolCall("look", id="b", index=None)),
    "index from 1": (ToolCall("add", id="a", index=1), ToolCall("look", id="b", index=2)),
    "no id": (ToolCall("add", id=None), ToolCall("look", id=None, index=1)),
    "the id in every delta": (ToolCall("add", repeats_id=True), ToolCall("look", index=1)),
}
REPORTS = (
    "vllm-project/vllm#18412", "sgl-project/sglang#7048", "openai/openai-python#3246",
    "pipecat-ai/pipecat#4987",
)  # fmt: skip


def calling(*calls: ToolCall) -> tuple[FakeEngine, FakeEngine]:
    """Thinks by the story; then calls."""
    large, small = pair_of(FakeVllm, *THOUGHT)

    def large_script(prompt: str) -> Any:
        return calls if prompt.endswith("</think>") else story(*THOUGHT)(prompt)

    large.script = large_script
    return large, small


def calls_of(answer: Answer) -> list[dict[str, Any]]:
    choices = [c for event in answer.events[:-1] for c in event["choices"]]
    return [call for c in choices for call in c["delta"].get("tool_calls") or []]


async def own_calls(large: FakeEngine, served: Served) -> list[dict[str, Any]]:
    """What the engine itself streams for the request that it was sent."""
    import aiohttp

    last = large.asked(CHAT)[-1]
    async with aiohttp.ClientSession(large.url.removesuffix("/v1")) as session:
        reply = await Asking(session)(CHAT, **last.body)
    return [call for c in reply.choices for call in c["delta"].get("tool_calls") or []]


# ---- tool calls ---------------------------------------------------------------------------------


@case(37, *REPORTS)
@pytest.mark.parametrize("policy", ["large", "whole"])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
async def test_the_deltas_of_tool_calls_are_the_engines_own(
    stage: Stage, calls: tuple[ToolCall, ...], policy: str
) -> None:
    """Catches ids made up, indices put in order, and deltas of parallel calls joined."""
    large, small = calling(*calls)
    if policy == "whole":
        large.script = lambda prompt: calls
    served = await served_by(stage, large, small, BY_CHAT, tools=policy)
    answer = await post(served, stream=True, tools=TOOLS)
    told = calls_of(answer)
    assert told == await own_calls(large, served)
    assert [call["function"]["name"] for call in told if "name" in call["function"]] == [
        "add",
        "look",
    ]
    finishes = [c["finish_reason"] for e in answer.events[:-1] for c in e["choices"]]
    assert [reason for reason in finishes if reason] == ["tool_calls"]


@case(37, *REPORTS)
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
async def test_parallel_calls_stay_apart_in_one_piece(
    stage: Stage, calls: tuple[ToolCall, ...]
) -> None:
    """Catches calls with no index that end up as one."""
    large, small = calling(*calls)
    served = await served_by(stage, large, small, BY_CHAT)
    reply = await served.client.chat.completions.create(
        model="pair",
        messages=USER,
        tools=TOOLS,  # type: ignore[arg-type]
    )
    message = reply.choices[0].message
    assert message.tool_calls is not None
    told = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]  # type: ignore[union-attr]
    assert told == [(call.id, call.name, "{}") for call in calls]
    assert message.content is None


@case(37, *REPORTS)
async def test_no_model_takes_over_within_a_tool_call(stage: Stage) -> None:
    """Catches cues and sentence ends that cut a call's arguments."""
    arguments = ('{"say": "', " Now", " wait", ".", " Thus", " it", " is", '."}')
    large, small = calling(ToolCall("add", arguments))
    served = await served_by(stage, large, small, BY_CHAT)
    answer = await post(served, stream=True, tools=TOOLS, relaygen={"trace": True})
    assert answer.text("reasoning_content") == REASONING
    assert "".join(c["function"]["arguments"] for c in calls_of(answer)) == "".join(arguments)
    writers = {
        (chunk["relaygen"]["role"], chunk["relaygen"]["segment"])
        for chunk in answer.events[:-1]
        for choice in chunk["choices"]
        if choice["delta"].get("tool_calls")
    }
    assert {role for role, _ in writers} == {"large"}
    assert len(writers) == 1
    assert len(small.decodes) == 2  # the sentences of the thinking


# ---- shapes -------------------------------------------------------------------------------------

TEXTS = [{"type": "text", "text": "Add "}, {"type": "text", "text": "them."}]
CALLED = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"of":[]}'}}
HISTORY = [
    {"role": "user", "content": TEXTS, "name": "me"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED], "odd": {"kept": [None]}},
    {"role": "tool", "tool_call_id": "a", "content": "12"},
    *USER,
]
MANY = {
    "chat_template_kwargs": {"enable_thinking": True, "deep": {"er": [1]}},
    "cache_salt": "x",
    "vendor": {"nested": [None, {"a": 1}]},
    "stream": True,
    "stream_options": {"include_usage": True},
}
STRICT = ("lm-sys/RouteLLM routellm/openai_server.py", "thu-nics/R2R http_server.py")


@case(38, *STRICT)
async def test_null_and_list_content_and_unknown_fields_are_relayed(stage: Stage) -> None:
    """Catches models of the request that know flat texts alone, and drop what they don't know."""
    large, small = pair_of(FakeVllm)
    served = await stage.pair(large, small)
    answer = await post(served, messages=HISTORY, **MANY)
    assert answer.text("reasoning_content") == REASONING
    for engine in (large, small):
        rendered = [r.body for r in engine.asked("/tokenize") if "messages" in r.body]
        [ours] = [body for body in rendered if body["messages"] == HISTORY]
        assert ours["chat_template_kwargs"] == MANY["chat_template_kwargs"]
        for decode in engine.decodes:
            assert decode.body["cache_salt"] == "x"
            assert decode.body["vendor"] == MANY["vendor"]
    assert answer.events[-2]["usage"]["completion_tokens"] == len(STORY) + 1


@case(38, *STRICT)
@pytest.mark.parametrize("policy", ["large", "whole"])
async def test_nested_schemas_and_calls_in_the_history_reach_the_engine_whole(
    stage: Stage, policy: str
) -> None:
    """Catches a 422 for an assistant's turn without content, and schemas made flat."""
    large, small = calling(ToolCall("add"))
    served = await served_by(stage, large, small, BY_CHAT, tools=policy)
    answer = await post(served, messages=HISTORY, tools=TOOLS, **MANY)
    assert answer.status == 200
    body = large.asked(CHAT)[-1].body
    assert body["tools"] == TOOLS
    assert body["messages"][: len(HISTORY)] == HISTORY
    assert {key: body[key] for key in MANY} == MANY
