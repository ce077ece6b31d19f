"""Hosted APIs: completions of text with the policy's tokenizer, else messages begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.tokenizers import LocalTokenizer
from tests.gateway.fakes import Error, FakeHosted, FakeVllm, Request, Tokenizer, story, writes
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.fakes.script import ASSISTANT
from tests.gateway.support import (
    ANSWER,
    POLICY,
    REASONING,
    STORY,
    USER,
    Served,
    Stage,
    ask,
    events,
    get,
    policy_of,
    stream,
    until_ready,
)
from tests.gateway.test_errors import send
from tests.gateway.test_tokenizers import FOLDER

OPENAI = {"engine": "openai"}


class Hosted(FakeHosted):
    """Refuses a body without a prompt, as real ones do; that is how it is asked for completions."""

    @property
    def decodes(self) -> list[Request]:
        return [request for request in super().decodes if request.body]

    def prompt_of(self, request: Request) -> list[int]:
        if not request.body:
            raise self.refusal("prompt: field required", 422)
        return super().prompt_of(request)


def pair(**options: Any) -> tuple[Hosted, Hosted]:
    script = story(*STORY)
    return Hosted(script, model="big", **options), Hosted(script, model="tiny", **options)


async def serve(
    stage: Stage,
    *engines: FakeHosted,
    base: str = "/v1",
    backend: dict[str, Any] = OPENAI,
    tokenizer: Path | None = None,
    **policy: Any,
) -> Served:
    """A gateway before a large and a small hosted model, with their base URLs ending in `base`."""
    large, small = engines
    backends = {}
    for role, engine in (("large", large), ("small", small)):
        await stage.engine(engine)
        url = engine.url.removesuffix("/v1") + base
        backends[role] = {"urls": [url], **OPENAI, **backend}
        if tokenizer is not None:
            spec = {"backend": role, "model": engine.model, "tokenizer": str(tokenizer)}
            policy[role] = spec
    return await stage.gateway({"backends": backends}, policy_of(large, small, **policy))


async def message(served: Served, **request: Any) -> tuple[str, str]:
    told = (await ask(served, **request))["choices"][0]["message"]
    return told["reasoning_content"], told["content"]


def begun(*engines: FakeHosted) -> list[str]:
    """What of the reply each decode was to go on from."""
    prompts = [prompt for engine in engines for prompt in engine.prompts()]
    return [prompt.rpartition(ASSISTANT)[2] for prompt in prompts]


async def state(served: Served) -> dict[str, Any]:
    policy: dict[str, Any] = (await get(served, "/readyz"))[1]["policies"][POLICY]
    return policy


def fields(engine: FakeHosted) -> set[str]:
    """All fields that it was ever sent in a decode."""
    return {key for decode in engine.decodes for key in decode.body}


# ---- completions of text ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bos_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundled tokenizer with a BOS, which its template writes too."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(FOLDER))
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    folder = tmp_path_factory.mktemp("bos")
    tokenizer.save_pretrained(str(folder))
    yield folder


async def test_with_a_tokenizer_it_goes_on_from_text(stage: Stage) -> None:
    large, small = pair()
    served = await serve(stage, large, small, tokenizer=FOLDER)
    assert (await state(served))["handoff"] == "text"
    assert await message(served, max_tokens=100, seed=3, temperature=0.5) == (REASONING, ANSWER)
    assert {r.path for r in large.decodes + small.decodes} == {COMPLETIONS}
    assert large.prompts()[0] == large.rendered(USER)
    assert all("".join(STORY).startswith(text) for text in begun(large, small))
    ours = {"model", "prompt", "stream", "stream_options", "max_tokens", "seed"}
    assert fields(large) == fields(small) == {*ours, "temperature"}


async def test_its_begin_token_is_taken_off_once(stage: Stage, bos_folder: Path) -> None:
    large, small = pair(tokenizer=Tokenizer(bos=True))
    served = await serve(stage, large, small, tokenizer=bos_folder)
    assert await message(served) == (REASONING, ANSWER)
    for engine in (large, small):
        for decode in engine.decodes:
            assert decode.body["prompt"].startswith("<|im_start|>user")
            assert engine.prompt_of(decode).count(engine.tokenizer.bos) == 1


@pytest.mark.parametrize("prompt", ["Once", "<bos>Once"])
async def test_a_raw_prompt_begins_once(stage: Stage, bos_folder: Path, prompt: str) -> None:
    assert await LocalTokenizer(str(bos_folder)).begin("m")
    large, small = pair(tokenizer=Tokenizer(bos=True))
    large.script = writes(" more")
    served = await serve(stage, large, small, tokenizer=bos_folder)
    reply = await served.client.completions.create(model=POLICY, prompt=prompt)
    assert reply.choices[0].text == " more"
    assert large.decodes[0].body["prompt"] == "Once"


async def test_without_a_tokenizer_a_raw_prompt_is_refused_with_the_remedy(stage: Stage) -> None:
    served = await serve(stage, *pair())
    with pytest.raises(openai.BadRequestError, match="use /v1/chat/completions"):
        await served.client.completions.create(model=POLICY, prompt="Once")


@pytest.mark.parametrize("reports", [True, False])
async def test_a_count_that_is_not_told_is_an_estimate(stage: Stage, reports: bool) -> None:
    large, small = pair()
    large.reports_usage = reports
    served = await serve(stage, large, small, tokenizer=FOLDER)
    reply = await ask(served, extra_body={"relaygen": {"mode": "large"}})
    assert reply["usage"]["relaygen"].get("estimated", False) is not reports
    if reports:
        assert reply["usage"]["completion_tokens"] == len(STORY) + 1
    else:
        assert 0 < reply["usage"]["completion_tokens"] < 3 * len(STORY)


async def test_logprobs_count_where_they_are_asked_for(stage: Stage) -> None:
    large, small = pair()
    large.reports_usage = False
    served = await serve(stage, large, small, tokenizer=FOLDER)
    reply = await ask(served, logprobs=True, extra_body={"relaygen": {"mode": "large"}})
    entries = reply["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "".join(STORY)
    assert reply["usage"]["completion_tokens"] == len(STORY)
    assert "estimated" not in reply["usage"]["relaygen"]


@pytest.mark.parametrize("tokenizer", [FOLDER, None], ids=["completions", "chat"])
@pytest.mark.parametrize("per_chunk", [2, 3, 5, 50])
async def test_several_words_a_chunk_are_cut_where_they_must_be(
    stage: Stage, per_chunk: int, tokenizer: Path | None
) -> None:
    large, small = pair()
    large.tokens_per_chunk = small.tokens_per_chunk = per_chunk
    served = await serve(stage, large, small, tokenizer=tokenizer)
    assert await message(served) == (REASONING, ANSWER)
    assert "<think>Six plus six. Now" in begun(small)[0]


# ---- messages begun -----------------------------------------------------------------------------


async def test_without_completions_it_is_gone_on_by_chat(stage: Stage) -> None:
    large, small = pair()
    large.completions = small.completions = False
    served = await serve(stage, large, small)
    body = await until_ready(served, 200)
    assert body["backends"]["large"][0]["continuation"] == "chat"
    assert "gone on with by chat" in body["policies"][POLICY]["why"]
    assert await message(served, max_tokens=100, seed=3) == (REASONING, ANSWER)
    assert {r.path for r in large.decodes + small.decodes} == {CHAT}
    assert begun(small)[-1] == "<think>" + REASONING + "</think>"
    ours = {"model", "messages", "stream", "stream_options", "max_tokens", "seed"}
    assert fields(large) == fields(small) == ours


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "both", "inline"])
@pytest.mark.parametrize("prefill", ["continues", "echoes"])
async def test_thoughts_are_read_from_any_field_and_a_repetition_is_taken_off(
    stage: Stage, field: Any, prefill: Any
) -> None:
    large, small = pair()
    for engine in (large, small):
        engine.reasoning, engine.prefill = field, prefill
    served = await serve(stage, large, small)
    for _ in "12":
        reply = await stream(served, stream_options={"include_usage": True})
        assert reply.text("reasoning_content") == REASONING
        assert reply.text("content") == ANSWER
    ours = reply.usages[0]["relaygen"]
    assert ours["estimated"] is True
    assert ours["large_tokens"] + ours["small_tokens"] < 2 * len(STORY)
    assert len(small.decodes) == 6


async def test_what_only_looks_like_a_repetition_is_not_lost(stage: Stage) -> None:
    tokens = ("<think>", "Is", " x", ".", " Now", "<", "y", "<", "th", "ink", ".", "</think>", "No")
    large, small = (Hosted(story(*tokens), model=m) for m in ("big", "tiny"))
    served = await serve(stage, large, small)
    assert await message(served) == ("Is x. Now<y<think.", "No")


async def test_a_new_turn_instead_is_told_with_the_remedies(stage: Stage) -> None:
    large, small = pair()
    small.prefill = "new_turn"
    served = await serve(stage, large, small)
    body = await until_ready(served, 503)
    error = body["policies"][POLICY]["error"]
    assert small.url.removesuffix("/v1") in error
    assert "opens a new turn" in error
    assert "a `tokenizer` in the policy" in error
    assert "`prefill` in its backend" in error
    with pytest.raises(openai.InternalServerError, match="does not go on") as caught:
        await ask(served)
    assert caught.value.status_code == 503
    assert large.decodes == []


async def test_the_settings_word_for_it_is_not_tried(stage: Stage) -> None:
    large, small = pair()
    served = await serve(stage, large, small, backend={"prefill": "trailing"})
    assert await message(served) == (REASONING, ANSWER)
    assert not any(b"capital" in r.content for r in large.requests + small.requests)


async def test_it_is_tried_once_for_each_model(stage: Stage) -> None:
    large, small = pair()
    served = await serve(stage, large, small)
    for _ in "123":
        assert await message(served) == (REASONING, ANSWER)
    assert sum(b"capital" in r.content for r in large.requests) in (1, 2)  # two may ask at once


@pytest.mark.parametrize("status", [400, 422])
async def test_a_refusal_of_messages_begun_is_told_as_one(stage: Stage, status: int) -> None:
    large, small = pair()
    large.refusals[CHAT] = (status, b'{"error": {"message": "last must be the user\'s"}}')
    served = await serve(stage, large, small)
    assert "does not go on exactly" in (await state(served))["error"]


ODD = [
    (200, b'{"error": "busy"}'),
    (200, b'{"choices": []}'),
    (200, b"[]"),
    (408, b"{}"),
    (429, b"{}"),
    (500, b""),
]


@pytest.mark.parametrize("odd", ODD)
async def test_what_hinders_the_trial_is_no_verdict(stage: Stage, odd: tuple[int, bytes]) -> None:
    large, small = pair()
    large.refusals[CHAT] = odd
    served = await serve(stage, large, small)
    assert large.url.removesuffix("/v1") in (await state(served))["error"]
    large.refusals.clear()
    await until_ready(served, 200)


async def test_a_hosted_small_model_goes_with_an_own_large_one(stage: Stage) -> None:
    large = FakeVllm(story(*STORY), model="big")
    small = Hosted(story(*STORY), model="tiny")
    for engine in (large, small):
        await stage.engine(engine)
    backends = {"large": {"urls": [large.url]}, "small": {"urls": [small.url], **OPENAI}}
    served = await stage.gateway({"backends": backends}, policy_of(large, small))
    assert await message(served) == (REASONING, ANSWER)
    assert {r.path for r in large.decodes} == {COMPLETIONS}
    assert {r.path for r in small.decodes} == {CHAT}
    assert all(text.startswith("<think>Six") for text in begun(small))


# ---- this and that API --------------------------------------------------------------------------


async def test_deepseek_is_sent_its_thoughts_apart_below_beta(stage: Stage) -> None:
    large, small = pair(style="deepseek")
    served = await serve(stage, large, small, base="/beta", backend={"prefill": "prefix_reasoning"})
    assert await message(served) == (REASONING, ANSWER)
    assert {r.path for r in large.decodes + small.decodes} == {"/beta/chat/completions"}
    last = [decode.body["messages"][-1] for decode in small.decodes]
    thoughts = ["Six plus six. Now", "Six plus six. Now it is twelve. Thus", REASONING]
    assert last == [
        {"role": "assistant", "content": "", "reasoning_content": thought, "prefix": True}
        for thought in thoughts
    ]


async def test_a_thought_that_deepseek_takes_up_again_is_no_answer(stage: Stage) -> None:
    large, small = pair(style="deepseek")
    tokens = (*STORY[:13], " Hm", ".", *STORY[13:])
    small.script = story(*tokens)
    served = await serve(stage, large, small, base="/beta", backend={"prefill": "prefix_reasoning"})
    assert await message(served) == (REASONING, ANSWER)


@pytest.mark.parametrize("prefill", ["continues", "echoes"])
async def test_mistral_is_sent_nothing_that_it_forbids(stage: Stage, prefill: Any) -> None:
    large, small = pair(style="mistral")
    for engine in (large, small):
        engine.prefill = prefill
        engine.refused_fields = frozenset(
            {"add_generation_prompt", "logprobs", "min_tokens", "seed", "stream_options"}
        )
    served = await serve(stage, large, small, base="/mistral/v1")
    assert await message(served, seed=7, extra_body={"min_tokens": 2}) == (REASONING, ANSWER)
    assert {decode.body["random_seed"] for decode in large.decodes} == {7, 9, 11}
    assert all(d.body["messages"][-1]["prefix"] is True for d in small.decodes)


async def test_openrouters_comments_are_passed_over(stage: Stage) -> None:
    served = await serve(stage, *pair(style="openrouter"))
    assert await message(served) == (REASONING, ANSWER)


async def test_openrouters_error_mid_stream_is_an_error(stage: Stage) -> None:
    large, small = pair(style="openrouter")
    large.script = writes("<think>", "Six", Error("Provider disconnected", 502))
    served = await serve(stage, large, small)
    status, wire = await send(served, {"model": POLICY, "messages": USER, "stream": True})
    *chunks, last = events(wire)
    assert (status, last["error"]["type"]) == (200, "upstream_error")
    assert "Provider disconnected" in last["error"]["message"]
    assert chunks[-1]["choices"][0]["delta"] == {"reasoning_content": "Six"}


async def test_an_api_that_lists_no_models_is_believed(stage: Stage) -> None:
    large, small = pair()
    for engine in (large, small):
        engine.refusals["/v1/models"] = (404, b"{}")
    served = await serve(stage, large, small)
    assert await message(served) == (REASONING, ANSWER)
