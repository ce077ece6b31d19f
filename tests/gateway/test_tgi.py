"""TGI's dialect: texts in, tokens out, by its native endpoint; all its errors come with a 200."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from tests.gateway.fakes import (
    Error,
    FakeEngine,
    FakeTgi,
    FakeVllm,
    Fin,
    Raw,
    Reset,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.fakes.script import ASSISTANT
from tests.gateway.fakes.tgi import GENERATE_STREAM
from tests.gateway.support import (
    ANSWER,
    NO_RESUME,
    POLICY,
    REASONING,
    STORY,
    USER,
    Served,
    Stage,
    ask,
    events,
    policy_of,
    stream,
    until_ready,
)
from tests.gateway.test_errors import send

Dialect = Callable[..., FakeEngine]
STREAMING = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])


def pair(
    large: Dialect = FakeTgi,
    small: Dialect = FakeTgi,
    tokens: tuple[str | bytes, ...] = STORY,
    *,
    bos: bool = False,
    system: str = "",
) -> tuple[Any, Any]:
    vocabulary, script = Tokenizer(bos=bos), story(*tokens)
    return (
        large(script, model="org/big", tokenizer=vocabulary, system=system),
        small(script, model="org/tiny", tokenizer=vocabulary, system=system),
    )


async def message(served: Served, **request: Any) -> tuple[str, str]:
    told = (await ask(served, **request))["choices"][0]["message"]
    return told["reasoning_content"], told["content"]


# ---- handoffs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("large", "small"), [(FakeTgi, FakeTgi), (FakeTgi, FakeVllm), (FakeVllm, FakeTgi)]
)
async def test_either_role_hands_over_by_text_whatever_the_vocabularies(
    stage: Stage, large: Dialect, small: Dialect
) -> None:
    engines = pair(large, small)
    served = await stage.pair(*engines)
    told = (await until_ready(served, 200))["policies"][POLICY]
    assert told["handoff"] == "text"
    assert "takes no token ids" in told["why"]
    assert await message(served) == (REASONING, ANSWER)
    assert len(engines[1].decodes) == 3
    for engine in engines:
        for prompt in engine.prompts():
            begun = prompt.rpartition(ASSISTANT)[2]
            assert "".join(STORY).startswith(begun)
            assert not begun.endswith((" ", "\n"))


async def test_token_handoffs_are_refused_with_the_remedy(stage: Stage) -> None:
    served = await stage.pair(*pair(), handoff="tokens")
    body = await until_ready(served, 503)
    error = body["policies"][POLICY]["error"]
    assert "tgi (large) takes no token ids" in error
    assert "set handoff to auto or text" in error


async def test_ids_as_a_prompt_are_the_clients_error(stage: Stage) -> None:
    served = await stage.pair(*pair())
    for extra in ({}, {"relaygen": {"mode": "large"}}):
        with pytest.raises(openai.BadRequestError, match="send text instead"):
            await served.client.completions.create(
                model=POLICY, prompt=[2001, 2002], extra_body=extra
            )


async def test_a_message_begun_is_not_gone_on_with_silently_in_another_way(stage: Stage) -> None:
    served = await stage.pair(*pair())
    begun = [*USER, {"role": "assistant", "content": "<think>Six "}]
    with pytest.raises(openai.BadRequestError, match="does not go on from exactly"):
        await ask(served, messages=begun)


# ---- begin tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["", "<bos>"], ids=["template without", "template with"])
async def test_there_is_one_begin_token_after_every_handoff(stage: Stage, system: str) -> None:
    engines = pair(bos=True, system=system)
    served = await stage.pair(*engines)
    assert await message(served) == (REASONING, ANSWER)
    for engine in engines:
        for decode in engine.decodes:
            ids = engine.prompt_of(decode)
            assert (ids[0], ids.count(engine.tokenizer.bos)) == (engine.tokenizer.bos, 1)


@pytest.mark.parametrize("prompt", ["Once", "<bos>Once"])
async def test_a_raw_prompt_begins_once(stage: Stage, prompt: str) -> None:
    large, small = pair(bos=True)
    large.script = writes(" more")
    served = await stage.pair(large, small)
    await served.client.completions.create(model=POLICY, prompt=prompt)
    assert large.prompt_of(large.decodes[0]) == large.tokenizer.encode("Once", special=True)


class WideBos(Tokenizer):
    """Its begin token is written in characters of several bytes, as DeepSeek's is."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return super().encode(text.replace("｜bos｜", "<bos>"), special=special)


class ByteOffsets(FakeTgi):
    """Counts offsets in bytes; its template begins with the wide begin token."""

    in_bytes = True

    def _simple(self, ids: list[int]) -> list[dict[str, Any]]:
        wide = "｜bos｜".encode() if self.in_bytes else "｜bos｜"
        more, tokens = len(wide) - len("<bos>"), super()._simple(ids)
        for token in tokens:
            token["stop"] += more * ("<bos>" in self.tokenizer.decode([token["id"]]))
        return tokens


@pytest.mark.parametrize("in_bytes", [True, False])
async def test_offsets_may_count_bytes_or_characters(stage: Stage, in_bytes: bool) -> None:
    large, small = pair(ByteOffsets, ByteOffsets, system="｜bos｜")
    for engine in (large, small):
        engine.in_bytes = in_bytes
        engine.tokenizer = WideBos(bos=True)
    served = await stage.pair(large, small)
    assert await message(served) == (REASONING, ANSWER)
    for decode in [*large.decodes, *small.decodes]:
        assert decode.body["inputs"].startswith("<|im_start|>user")


# ---- parameters ---------------------------------------------------------------------------------

OFF: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"do_sample": False}),
    ({"temperature": 0, "top_p": 0.9, "top_k": 5, "typical_p": 0.5}, {"do_sample": False}),
    ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
    ({}, {"do_sample": True}),
    ({"top_p": 1}, {"do_sample": True}),
    ({"top_p": 0.9}, {"do_sample": True, "top_p": 0.9}),
    ({"top_k": 0}, {"do_sample": True}),
    ({"top_k": -1}, {"do_sample": True}),
    ({"top_k": 20}, {"do_sample": True, "top_k": 20}),
    ({"typical_p": 1.0}, {"do_sample": True}),
    ({"presence_penalty": 0.5}, {"do_sample": True}),
    ({"frequency_penalty": 0.5}, {"do_sample": True, "frequency_penalty": 0.5}),
    ({"seed": -3}, {"do_sample": True, "seed": 2**63 - 3}),
    ({"seed": 5}, {"do_sample": True, "seed": 5}),
    ({"stop": ["12"]}, {"do_sample": True}),
    ({"min_p": 0.1, "user": "me", "min_tokens": 3}, {"do_sample": True}),
]
ALWAYS = {"max_new_tokens": 50, "details": True, "return_full_text": False}


@pytest.mark.parametrize(("given", "sent"), OFF)
async def test_only_what_tgi_takes_is_sent(
    stage: Stage, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    large, small = pair()
    served = await stage.pair(large, small)
    await ask(served, max_tokens=50, extra_body=given)
    assert large.decodes[0].body["parameters"] == {**ALWAYS, **sent}
    assert large.decodes[0].path == GENERATE_STREAM


async def test_what_has_no_effect_is_logged(stage: Stage) -> None:
    served = await stage.pair(*pair())
    with capture_logs() as logs:
        await ask(served, presence_penalty=0.5, temperature=0.5, extra_body={"min_p": 0.1})
    [told] = [line for line in logs if line["event"] == "generation"]
    assert told["ignored"] == ["min_p", "presence_penalty"]


@pytest.mark.parametrize(("asked", "told"), [(0, 0), (3, 3), (5, 5), (20, 5)])
async def test_alternatives_are_told_up_to_its_limit(stage: Stage, asked: int, told: int) -> None:
    served = await stage.pair(*pair())
    reply = await ask(served, logprobs=True, top_logprobs=asked)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "".join(STORY)
    assert {len(entry["top_logprobs"]) for entry in entries} == {told}


async def test_a_clients_stop_string_still_ends_the_answer(stage: Stage) -> None:
    large, small = pair()
    served = await stage.pair(large, small)
    reply = await ask(served, stop=[" 12", "a", "b", "c", "d"])
    assert reply["choices"][0]["message"]["content"] == "\n\nIt is"
    assert all("stop" not in d.body["parameters"] for d in [*large.decodes, *small.decodes])


# ---- its model's name ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", [POLICY, "org/big", "tgi"])
async def test_it_is_asked_for_tgi_whatever_the_client_calls_it(stage: Stage, model: str) -> None:
    large, small = pair()
    served = await stage.pair(large, small)
    await until_ready(served, 200)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for streaming in (False, True):
        await (stream if streaming else ask)(served, model=model, tools=tools)
    assert [r.body["model"] for r in large.asked(CHAT)] == ["tgi", "tgi"]


async def test_completions_by_its_id_are_asked_for_tgi(stage: Stage) -> None:
    large, small = pair()
    large.script = writes("more")
    served = await stage.pair(large, small)
    await until_ready(served, 200)
    await served.client.completions.create(model="org/big", prompt="Once")
    assert large.asked(COMPLETIONS)[0].body["model"] == "tgi"


async def test_it_is_never_asked_for_an_adapter_in_a_relay(stage: Stage) -> None:
    large, small = pair()
    served = await stage.pair(large, small)
    await ask(served)
    assert all("adapter_id" not in sampling for sampling in [*large.sampling, *small.sampling])
    assert all(r.body["model"] == "tgi" for r in large.asked("/chat_tokenize"))


# ---- errors -------------------------------------------------------------------------------------

SHAPES = pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])


async def replicas(stage: Stage, *large: FakeTgi) -> Served:
    small = FakeTgi(model="tiny")
    for engine in (*large, small):
        await stage.engine(engine)
    backends = {"large": {"urls": [e.url for e in large]}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": backends}, policy_of(large[0], small))
    await until_ready(served, 200)
    return served


@SHAPES
@STREAMING
async def test_what_it_refuses_is_a_422(stage: Stage, nested: bool, streaming: bool) -> None:
    engines = FakeTgi(model="big"), FakeTgi(model="big")
    for engine in engines:
        engine.nested_errors = nested
    served = await replicas(stage, *engines)
    with pytest.raises(openai.UnprocessableEntityError, match="strictly positive"):
        await ask(served, stream=streaming, extra_body={"repetition_penalty": 0})
    assert sum(len(engine.decodes) for engine in engines) == 1


@SHAPES
@STREAMING
async def test_an_overload_is_passed_over_or_a_429(
    stage: Stage, nested: bool, streaming: bool
) -> None:
    full, free = FakeTgi(model="big"), FakeTgi(writes("Fine"), model="big")
    full.nested_errors = free.nested_errors = nested
    served = await replicas(stage, full, free)
    full.overloaded = True
    if streaming:
        assert (await stream(served)).text("content") == "Fine"
    else:
        assert (await ask(served))["choices"][0]["message"]["content"] == "Fine"
    free.overloaded = True
    with pytest.raises(openai.RateLimitError, match="overloaded"):
        await ask(served, stream=streaming)


@SHAPES
async def test_a_failure_of_the_model_is_passed_over_or_a_502(stage: Stage, nested: bool) -> None:
    failing = Error("Request failed during generation: Server error: CUDA out of memory")
    broken, sound = FakeTgi(writes(failing), model="big"), FakeTgi(writes("Fine"), model="big")
    broken.nested_errors = sound.nested_errors = nested
    served = await replicas(stage, broken, sound)
    assert (await stream(served)).text("content") == "Fine"
    sound.script = writes(failing)
    with pytest.raises(openai.InternalServerError, match="CUDA") as caught:
        await ask(served)
    assert caught.value.status_code == 502


@SHAPES
@pytest.mark.parametrize(
    "broken", [Error("Request failed during generation: x"), Fin(), Reset(), Raw(b"data: {}\n\n")]
)
async def test_what_breaks_mid_stream_is_an_error_and_no_end(
    stage: Stage, broken: Any, nested: bool
) -> None:
    large = FakeTgi(writes("<think>", "Six", broken), model="big")
    large.nested_errors = nested
    served = await stage.pair(large, FakeTgi(model="tiny"), NO_RESUME)
    status, wire = await send(served, {"model": POLICY, "messages": USER, "stream": True})
    *chunks, last = events(wire)
    assert status == 200
    assert last["error"]["type"] == "upstream_error"
    assert chunks[-1]["choices"][0]["delta"] == {"reasoning_content": "Six"}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_a_template_that_refuses_is_the_clients_error(stage: Stage) -> None:
    large, small = pair()
    served = await stage.pair(large, small)
    await until_ready(served, 200)
    told = {"error": "Template error: roles must alternate", "error_type": "template_error"}
    large.refusals["/chat_tokenize"] = (422, json.dumps(told).encode())
    with pytest.raises(openai.UnprocessableEntityError, match="roles must alternate"):
        await ask(served)


# ---- texts --------------------------------------------------------------------------------------


async def test_characters_split_over_tokens_come_whole(stage: Stage) -> None:
    party = [bytes([byte]) for byte in "🎉".encode()]
    tokens = ("<think>", *party, ".", " Now", *party, "!", " So", "</think>", *party, ".")
    served = await stage.pair(*pair(tokens=tokens))
    reply = await stream(served, stream_options={"include_usage": True})
    assert reply.text("reasoning_content") == "🎉. Now🎉! So"
    assert reply.text("content") == "🎉."
    assert reply.usages[0]["completion_tokens"] == len(tokens) + 1
    assert "estimated" not in reply.usages[0]["relaygen"]


class PlainEos(FakeTgi):
    """A model whose end of turn is no special token to its tokenizer."""

    def reply(self, request: Any) -> Any:
        reply: Any = super().reply(request)
        if told := getattr(reply, "_token", None):
            reply._token = lambda token: {**told(token), "special": False}
        return reply


@pytest.mark.parametrize("dialect", [FakeTgi, PlainEos])
async def test_the_end_of_turn_is_no_text(stage: Stage, dialect: Dialect) -> None:
    served = await stage.pair(*pair(dialect, dialect), thinking={"field": "inline"})
    reply = await ask(served, extra_body={"relaygen": {"mode": "large"}})
    [choice] = reply["choices"]
    assert choice["message"]["content"] == "".join(STORY)
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == len(STORY) + 1


async def test_a_budget_ends_in_length(stage: Stage) -> None:
    served = await stage.pair(*pair())
    reply = await ask(served, max_tokens=13)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 13


@pytest.mark.parametrize("field", [b"data:", b"data: "])
async def test_a_blank_after_data_is_optional(stage: Stage, field: bytes) -> None:
    engines = pair()
    for engine in engines:
        engine.data_field = field
    served = await stage.pair(*engines)
    assert await message(served) == (REASONING, ANSWER)
