"""/v1/completions: a raw prompt is gone on with by both models, tags and thinking in the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Tokenizer
from tests.gateway.fakes.engines import COMPLETIONS
from tests.gateway.support import POLICY, Served, Stage

PROMPT = "Q: How many? A:"
STORY = ("<think>", "Six", ".", " Now", " it", " is", ".", " Go", " on", ".", "</think>",
         "It", " is", " 1", "2", ".")  # fmt: skip
TEXT = "".join(STORY)
TOKENS = len(STORY) + 1  # and the end of turn
DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])
STREAMING = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])


def after(prompt: str) -> Callable[[str], Iterable[str]]:
    """Goes on with the story from wherever the text after `prompt` has come to."""

    def script(whole: str) -> list[str]:
        begun = whole.removeprefix("<bos>").removeprefix(prompt)
        left, rest = len(begun), []
        assert TEXT.startswith(begun), begun
        for token in STORY:
            if left < len(token):
                rest.append(token[left:])
            left = max(0, left - len(token))
        return rest

    return script


async def pair(
    stage: Stage,
    dialect: Callable[..., FakeEngine] = FakeVllm,
    *,
    prompt: str = PROMPT,
    offset: int = 0,
    bos: bool = False,
    **policy: Any,
) -> tuple[Served, FakeEngine, FakeEngine]:
    large = dialect(after(prompt), model="big", tokenizer=Tokenizer(bos=bos))
    other = Tokenizer(offset=offset, bos=bos) if offset else large.tokenizer
    small = dialect(after(prompt), model="tiny", tokenizer=other)
    return await stage.pair(large, small, **policy), large, small


async def complete(served: Served, *, streaming: bool = False, **request: Any) -> dict[str, Any]:
    """Whole, or folded from a stream: text, logprobs and finish of each choice; the usage."""
    given = {"model": POLICY, "prompt": PROMPT, "max_tokens": 100, **request}
    create = served.client.completions.create
    if not streaming:
        return dict((await create(**given)).to_dict(mode="json"))
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    async for chunk in await create(**given, stream=True, stream_options={"include_usage": True}):
        data = chunk.to_dict(mode="json")
        assert data["object"] == "text_completion"
        usage = data.get("usage") or usage
        for part in data["choices"]:  # type: ignore[union-attr]
            add(choices.setdefault(part["index"], {"text": "", "logprobs": {}}), part)
    ordered = [{"index": i, **choice} for i, choice in sorted(choices.items())]
    return {"choices": ordered, "usage": usage}


def add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["text"] += part["text"]
    for key, values in (part["logprobs"] or {}).items():
        choice["logprobs"].setdefault(key, []).extend(values)
    choice["finish_reason"] = part["finish_reason"] or choice.get("finish_reason")


# ---- prompts ------------------------------------------------------------------------------------


@DIALECTS
@STREAMING
@pytest.mark.parametrize("offset", [0, 50_000], ids=["ids", "text"])
async def test_a_text_is_gone_on_with_by_both(
    stage: Stage, dialect: Callable[..., FakeEngine], streaming: bool, offset: int
) -> None:
    served, large, small = await pair(stage, dialect, offset=offset)
    reply = await complete(served, streaming=streaming)
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    assert all(p.startswith(PROMPT) for p in [*large.prompts(), *small.prompts()])
    assert (len(large.decodes), len(small.decodes)) == (2, 2)
    usage = reply["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["prompt_tokens"] == len(large.tokenizer.encode(PROMPT))
    ours = usage["relaygen"]
    assert (ours["large_tokens"], ours["small_tokens"], ours["handoffs"]) == (8, 9, 3)


async def test_ids_are_gone_on_with_by_both(stage: Stage) -> None:
    served, large, small = await pair(stage)
    ids = large.tokenizer.encode(PROMPT)
    reply = await complete(served, prompt=ids)
    assert reply["choices"][0]["text"] == TEXT
    assert all(d.body["prompt"][: len(ids)] == ids for d in [*large.decodes, *small.decodes])


async def test_ids_mean_nothing_to_another_vocabulary(stage: Stage) -> None:
    served, large, _ = await pair(stage, offset=50_000)
    with pytest.raises(openai.BadRequestError, match="send text instead") as caught:
        await complete(served, prompt=large.tokenizer.encode(PROMPT))
    assert caught.value.param == "prompt"


@STREAMING
async def test_lists_of_texts_and_of_ids_have_a_choice_each(stage: Stage, streaming: bool) -> None:
    served, large, _ = await pair(stage)
    ids = large.tokenizer.encode(PROMPT)
    for prompt in ([PROMPT, PROMPT], [ids, ids], [PROMPT, ids]):
        reply = await complete(served, streaming=streaming, prompt=prompt)
        assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, TEXT), (1, TEXT)]
        assert reply["usage"]["prompt_tokens"] == 2 * len(ids)
        assert reply["usage"]["completion_tokens"] == 2 * TOKENS


async def test_a_prompt_inside_its_thinking_is_relayed_from_there(stage: Stage) -> None:
    prompt = PROMPT + "<think>Six."
    served, _, small = await pair(stage)
    reply = await complete(served, prompt=prompt)
    assert reply["choices"][0]["text"] == TEXT.removeprefix("<think>Six.")
    assert len(small.decodes) == 2


@pytest.mark.parametrize("prompt", [[[]], [PROMPT, 5], [-1], [2**31], [True]])
async def test_what_is_no_prompt_is_refused_by_name(stage: Stage, prompt: Any) -> None:
    served, large, _ = await pair(stage)
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(served, prompt=prompt)
    assert caught.value.param == "prompt"
    assert large.decodes == []


@DIALECTS
@pytest.mark.parametrize("offset", [0, 50_000], ids=["ids", "text"])
@pytest.mark.parametrize("begun", ["", "<bos>"], ids=["bare", "with BOS"])
async def test_there_is_one_begin_token(
    stage: Stage, dialect: Callable[..., FakeEngine], offset: int, begun: str
) -> None:
    served, large, small = await pair(stage, dialect, offset=offset, bos=True)
    reply = await complete(served, prompt=begun + PROMPT)
    assert reply["choices"][0]["text"] == TEXT
    for engine in (large, small):
        assert engine.decodes
        for decode in engine.decodes:
            ids = engine.prompt_of(decode)
            assert (ids[0], ids.count(engine.tokenizer.bos)) == (engine.tokenizer.bos, 1)


# ---- what may be asked --------------------------------------------------------------------------


@STREAMING
async def test_without_a_limit_it_is_16_tokens(stage: Stage, streaming: bool) -> None:
    served, large, _ = await pair(stage)
    reply = await complete(served, streaming=streaming, max_tokens=None)
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"
    assert large.decodes[0].body["max_tokens"] == 16


@STREAMING
@pytest.mark.parametrize("form", ["text", "ids"])
async def test_echo_begins_with_the_prompt(stage: Stage, streaming: bool, form: str) -> None:
    served, large, _ = await pair(stage)
    prompt: Any = PROMPT if form == "text" else large.tokenizer.encode(PROMPT)
    reply = await complete(served, streaming=streaming, prompt=prompt, echo=True)
    assert reply["choices"][0]["text"] == PROMPT + TEXT
    assert reply["usage"]["completion_tokens"] == TOKENS


async def test_echo_repeats_each_choices_own_prompt(stage: Stage) -> None:
    served, _, _ = await pair(stage)
    both = [PROMPT, PROMPT + "<think>Six."]
    reply = await complete(served, prompt=both, echo=True)
    assert [c["text"] for c in reply["choices"]] == [PROMPT + TEXT] * 2


@STREAMING
async def test_logprobs_are_lists_with_the_role_of_each_token(
    stage: Stage, streaming: bool
) -> None:
    served, _, _ = await pair(stage)
    reply = await complete(served, streaming=streaming, logprobs=2)
    [choice] = reply["choices"]
    told = choice["logprobs"]
    tokens = [token for token in told["tokens"] if token]
    assert "".join(tokens) == TEXT
    assert tokens == list(STORY)
    assert told["token_logprobs"] == [-0.25] * len(told["tokens"])
    assert (
        told["roles"][: len(STORY)] == ["large"] * 4 + ["small"] * 3 + ["large"] * 4 + ["small"] * 5
    )
    assert told["top_logprobs"][1] == {"Six": -0.25, "other0": -2.0}


async def test_each_token_is_told_where_it_begins_in_the_text(stage: Stage) -> None:
    served, _, _ = await pair(stage)
    [choice] = (await complete(served, logprobs=0))["choices"]
    told = choice["logprobs"]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert told["top_logprobs"] == [None] * len(told["tokens"])


async def test_without_logprobs_none_are_told(stage: Stage) -> None:
    served, _, _ = await pair(stage)
    [choice] = (await complete(served))["choices"]
    assert choice["logprobs"] is None


@STREAMING
async def test_a_stop_string_cuts_the_text(stage: Stage, streaming: bool) -> None:
    served, _, _ = await pair(stage)
    reply = await complete(served, streaming=streaming, stop=" is 12")
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT.removesuffix(" is 12."), "stop")


async def test_a_stream_without_include_usage_has_none(stage: Stage) -> None:
    served, _, _ = await pair(stage)
    given: Any = {"model": POLICY, "prompt": PROMPT, "max_tokens": 100}
    chunks = [c async for c in await served.client.completions.create(**given, stream=True)]
    assert not any(chunk.usage for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    assert {(c.id, c.model) for c in chunks} == {(chunks[0].id, POLICY)}


async def test_the_trace_is_on_every_chunk(stage: Stage) -> None:
    served, _, _ = await pair(stage)
    given: Any = {"model": POLICY, "prompt": PROMPT, "max_tokens": 100}
    stream = await served.client.completions.create(
        **given, stream=True, extra_body={"relaygen": {"trace": True}}
    )
    marks = [chunk.to_dict()["relaygen"] async for chunk in stream]
    assert [mark["segment"] for mark in marks] == sorted(mark["segment"] for mark in marks)  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"best_of": 2}, "best_of > 1"),
        ({"suffix": "the end"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "logprobs of the prompt (echo)"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_relaying_cannot_serve_goes_whole_to_the_large_model(
    stage: Stage, fields: dict[str, Any], reason: str
) -> None:
    served, large, small = await pair(stage)
    with capture_logs() as logs:
        create = served.client.completions.with_raw_response.create
        reply = await create(model=POLICY, prompt=PROMPT, **fields)
    assert reply.http_response.content == large.whole_reply
    assert [e["reason"] for e in logs if e["event"] == "passed through"] == [reason]
    [request] = large.asked(COMPLETIONS)
    expected = {**fields, **fields.get("extra_body", {})}
    expected.pop("extra_body", None)
    assert request.body == {"model": "big", "prompt": PROMPT, **expected}
    assert small.asked(COMPLETIONS) == []
