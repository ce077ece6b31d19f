"""What a request may ask beside its messages, and where each of it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Tokenizer, story
from tests.gateway.fakes.engines import CHAT
from tests.gateway.support import POLICY, USER, Served, Stage, ask, stream

STORY = ("<think>", "Six", ".", " Now", " it", " is", ".", " Go", "</think>", "\n\n", "It", ".")
WRITERS = ["large"] * 4 + ["small"] * 3 + ["large"] * 2 + ["small"] * 3
DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])
RENDERING = {FakeVllm: "/tokenize", FakeLlamaCpp: "/apply-template"}


async def pair(
    stage: Stage, dialect: Callable[..., FakeEngine] = FakeVllm, offset: int = 0, **policy: Any
) -> tuple[Served, FakeEngine, FakeEngine]:
    large = dialect(story(*STORY), model="big")
    other = Tokenizer(offset=offset) if offset else large.tokenizer
    small = dialect(story(*STORY), model="tiny", tokenizer=other)
    return await stage.pair(large, small, **policy), large, small


def rendered(engine: FakeEngine) -> list[dict[str, Any]]:
    """What the engine was given to render for the request: after the last greeting."""
    path = RENDERING[type(engine)]  # type: ignore[index]
    bodies = [request.body for request in engine.asked(path) if "messages" in request.body]
    return [body for body in bodies if "Hi" not in str(body["messages"])]


# ---- logprobs -----------------------------------------------------------------------------------


@DIALECTS
@pytest.mark.parametrize("offset", [0, 50_000], ids=["ids", "text"])
async def test_each_tokens_logprob_has_its_writer_beside(
    stage: Stage, dialect: Callable[..., FakeEngine], offset: int
) -> None:
    served, _, _ = await pair(stage, dialect, offset)
    reply = await ask(served, logprobs=True, top_logprobs=2)
    entries = [e for e in reply["choices"][0]["logprobs"]["content"] if e["token"]]
    assert [entry["token"] for entry in entries] == list(STORY)
    assert [entry["role"] for entry in entries] == WRITERS
    for entry in entries:
        assert entry["bytes"] == list(entry["token"].encode())
        assert entry["logprob"] == -0.25
        assert 1 <= len(entry["top_logprobs"]) <= 2


async def test_a_stream_tells_the_same_logprobs(stage: Stage) -> None:
    served, _, _ = await pair(stage)
    whole = await ask(served, logprobs=True, top_logprobs=2)
    reply = await stream(served, logprobs=True, top_logprobs=2)
    told = [c["choices"][0]["logprobs"] for c in reply.chunks]
    entries = [entry for logprobs in told if logprobs for entry in logprobs["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]


async def test_without_alternatives_asked_for_none_are_told(stage: Stage) -> None:
    served, _, _ = await pair(stage)
    reply = await ask(served, logprobs=True)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[]] * len(entries)


# ---- ids of tokens ------------------------------------------------------------------------------

IDS: list[dict[str, Any]] = [{"logit_bias": {"5": -100}}, {"allowed_token_ids": [5, 6]}]


@pytest.mark.parametrize("field", IDS, ids=lambda field: next(iter(field)))
async def test_token_ids_mean_the_same_to_both_models_of_one_vocabulary(
    stage: Stage, field: dict[str, Any]
) -> None:
    served, large, small = await pair(stage)
    await ask(served, extra_body=field)
    decodes = [*large.decodes, *small.decodes]
    assert len(decodes) == 4
    assert all(field.items() <= decode.body.items() for decode in decodes)


@pytest.mark.parametrize("field", IDS, ids=lambda field: next(iter(field)))
async def test_token_ids_with_two_vocabularies_are_served_whole(
    stage: Stage, field: dict[str, Any]
) -> None:
    served, large, small = await pair(stage, offset=50_000)
    with capture_logs() as logs:
        create = served.client.chat.completions.with_raw_response.create
        reply = await create(model=POLICY, messages=USER, extra_body=field)  # type: ignore[call-overload]
    assert reply.headers["x-relaygen-mode"] == "passthrough"
    assert large.asked(CHAT)[0].body == {"model": "big", "messages": USER, **field}
    assert small.decodes == []
    [reason] = [entry["reason"] for entry in logs if entry["event"] == "passed through"]
    assert reason.startswith(f"{next(iter(field))}, and the vocabularies differ")


@pytest.mark.parametrize("mode", ["large", "small"])
async def test_token_ids_for_one_model_alone_are_its_own(stage: Stage, mode: str) -> None:
    served, large, small = await pair(stage, offset=50_000)
    field = {"logit_bias": {"5": -100}, "relaygen": {"mode": mode}}
    reply = await ask(served, extra_body=field)
    assert reply["choices"][0]["message"]["content"] == "\n\nIt."
    engine, other = (large, small) if mode == "large" else (small, large)
    assert [decode.body["logit_bias"] for decode in engine.decodes] == [{"5": -100}]
    assert other.decodes == []


# ---- earlier turns and the template -------------------------------------------------------------


@DIALECTS
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_earlier_thinking_reaches_templates_of_either_name(
    stage: Stage, dialect: Callable[..., FakeEngine], field: str
) -> None:
    served, large, small = await pair(stage, dialect)
    turn = {"role": "assistant", "content": "Five.", field: "Let me count."}
    messages = [*USER, turn, {"role": "user", "content": "Sure?"}]
    await ask(served, messages=messages)
    both = {**turn, "reasoning": "Let me count.", "reasoning_content": "Let me count."}
    for engine in (large, small):
        assert [body["messages"] for body in rendered(engine)] == [[USER[0], both, messages[2]]]


async def test_a_users_reasoning_field_is_left_alone(stage: Stage) -> None:
    served, large, _ = await pair(stage)
    messages = [{"role": "user", "content": "How many?", "reasoning": "odd"}]
    await ask(served, messages=messages)
    assert [body["messages"] for body in rendered(large)] == [messages]


async def test_the_effort_and_other_options_reach_vllms_template(stage: Stage) -> None:
    served, large, small = await pair(stage)
    options = {"chat_template_kwargs": {"style": "plain"}}
    await ask(served, reasoning_effort="low", extra_body=options)
    for engine in (large, small):
        [body] = rendered(engine)
        assert body["chat_template_kwargs"] == {"reasoning_effort": "low", "style": "plain"}


async def test_the_effort_and_other_options_reach_llamacpps_template(stage: Stage) -> None:
    served, large, small = await pair(stage, FakeLlamaCpp)
    options = {"chat_template_kwargs": {"style": "plain"}}
    await ask(served, reasoning_effort="low", extra_body=options)
    for engine in (large, small):
        [body] = rendered(engine)
        assert body["chat_template_kwargs"]["style"] == "plain"
        assert body["reasoning_effort"] == "low"


@DIALECTS
async def test_thinking_switched_off_may_be_relayed_all_the_same(
    stage: Stage, dialect: Callable[..., FakeEngine]
) -> None:
    tokens = ("It", " is", " so", ".", " Now", " all", ".", " Done", ".")

    def script(prompt: str) -> Any:
        return story(*tokens)(prompt.replace("<think>\n\n</think>\n\n", ""))

    served, large, small = await pair(stage, dialect, plain="relay")
    large.script = small.script = script
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    reply = await ask(served, extra_body=off)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "".join(tokens)}
    assert len(small.decodes) == 1


@pytest.mark.parametrize("value", [5, [1], "x"])
async def test_template_options_must_be_an_object(stage: Stage, value: Any) -> None:
    served, _, _ = await pair(stage)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(served, extra_body={"chat_template_kwargs": value})
    assert caught.value.param == "chat_template_kwargs"


# ---- what says nothing of the text --------------------------------------------------------------


@DIALECTS
async def test_accounts_and_labels_reach_no_engine(
    stage: Stage, dialect: Callable[..., FakeEngine]
) -> None:
    served, large, small = await pair(stage, dialect)
    labels = {"metadata": {"a": "b"}, "user": "me", "store": True, "modalities": ["text"]}
    options = {"tool_choice": "none", "parallel_tool_calls": False, "n": 1}
    await ask(served, extra_body={**labels, **options, "odd_field": 7})
    for decode in [*large.decodes, *small.decodes]:
        assert not {*labels, *options, "messages", "relaygen"} & decode.body.keys()
        assert decode.body["odd_field"] == 7


async def test_null_fields_ask_for_nothing(stage: Stage) -> None:
    served, large, _ = await pair(stage)
    fields = ("tools", "tool_choice", "response_format", "n", "seed", "stop", "logprobs", "top_k",
              "max_tokens", "stream_options", "relaygen", "logit_bias", "odd")  # fmt: skip
    reply = await ask(served, extra_body=dict.fromkeys(fields))
    assert reply["choices"][0]["message"]["content"] == "\n\nIt."
    assert not {"top_k", "odd", "logit_bias", "seed"} & large.decodes[0].body.keys()
