"""What each engine is sent: its own rendering of the messages, then exactly what was kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Tokenizer, story
from tests.gateway.fakes.script import ASSISTANT
from tests.gateway.support import STORY, Stage, ask, stream

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "How many?"},
]
Dialect = Callable[..., FakeEngine]
DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])


def written(prompt: str) -> str:
    """What of a prompt the models wrote."""
    return prompt.rpartition(ASSISTANT)[2]


@DIALECTS
async def test_all_turns_reach_both_engines_each_in_its_own_template(
    stage: Stage, dialect: Dialect
) -> None:
    vocabulary = Tokenizer()
    large = dialect(story(*STORY), model="big", tokenizer=vocabulary, system="LARGE ")
    small = dialect(story(*STORY), model="tiny", tokenizer=vocabulary, system="SMALL ")
    served = await stage.pair(large, small)
    await ask(served, messages=MESSAGES)
    for engine in (large, small):
        head = vocabulary.encode(engine.rendered(MESSAGES))
        for decode in engine.decodes:
            assert decode.body["prompt"][: len(head)] == head
            assert decode.body["model"] == engine.model


@DIALECTS
async def test_a_token_handoff_sends_the_very_tokens_that_were_kept(
    stage: Stage, dialect: Dialect
) -> None:
    # " tw"+"elve" would be cut otherwise if it went through text.
    tokens = [*STORY[:8], " tw", "elve", *STORY[9:]]
    vocabulary = Tokenizer()
    large, small = (dialect(story(*tokens), model=m, tokenizer=vocabulary) for m in ("b", "t"))
    served = await stage.pair(large, small)
    await ask(served)
    ids = [vocabulary.id_of(token) for token in tokens]
    head = len(vocabulary.encode(large.rendered([{"role": "user", "content": "How many?"}])))
    kept = [len(d.body["prompt"]) - head for e in (large, small) for d in e.decodes]
    assert sorted(kept) == [0, 6, 11, 12, 14, 15]
    for engine in (large, small):
        for decode in engine.decodes:
            prefix = decode.body["prompt"][head:]
            assert prefix == ids[: len(prefix)]


@DIALECTS
async def test_different_vocabularies_hand_over_by_text(stage: Stage, dialect: Dialect) -> None:
    large = dialect(story(*STORY), model="big")
    small = dialect(story(*STORY), model="tiny", tokenizer=Tokenizer(offset=50_000))
    served = await stage.pair(large, small, thinking={"field": "inline"})
    reply = await ask(served)
    text = reply["choices"][0]["message"]["content"]
    assert text == "".join(STORY)
    for prompt in [*large.prompts(), *small.prompts()]:
        assert text.startswith(written(prompt))
        assert not written(prompt).endswith((" ", "\n")), prompt
    assert len(small.decodes) == 3


async def test_readyz_tells_the_handoff_and_why(stage: Stage) -> None:
    large = FakeVllm(model="big")
    small = FakeVllm(model="tiny", tokenizer=Tokenizer(offset=50_000))
    served = await stage.pair(large, small)
    ready = await served.client.with_options(base_url=served.url).get("/readyz", cast_to=object)
    assert ready["policies"]["pair"]["handoff"] == "text"  # type: ignore[index]
    assert "vocabularies differ" in ready["policies"]["pair"]["why"]  # type: ignore[index]


@DIALECTS
async def test_a_text_prefix_never_ends_in_a_blank(stage: Stage, dialect: Dialect) -> None:
    def large_script(prompt: str) -> list[str]:
        return [" Now", " "] if written(prompt) else ["<think>", "Six.", "\n\n", "Now"]

    def small_script(prompt: str) -> list[str]:
        if "</think>" in written(prompt):
            return ["Done", "."]
        return [" it", " is", ".\n\n"] if "it" not in written(prompt) else ["\n", "</think>"]

    large = dialect(large_script, model="big")
    small = dialect(small_script, model="tiny", tokenizer=Tokenizer(offset=50_000))
    served = await stage.pair(large, small, thinking={"field": "inline"})
    text = (await ask(served))["choices"][0]["message"]["content"]
    prefixes = [written(p) for p in [*large.prompts(), *small.prompts()]]
    assert not any(prefix[-1:].isspace() for prefix in prefixes), prefixes
    assert all(text.startswith(prefix) for prefix in prefixes)


@DIALECTS
@pytest.mark.parametrize("offset", [0, 50_000])
async def test_characters_split_over_tokens_come_whole(
    stage: Stage, dialect: Dialect, offset: int
) -> None:
    party = [bytes([byte]) for byte in "🎉".encode()]
    tokens = ["<think>", *party, ".", " Now", *party, *party, "!", " So", "</think>", *party, "."]
    vocabulary = Tokenizer()
    large = dialect(story(*tokens), model="big", tokenizer=vocabulary)
    other = Tokenizer(offset=offset) if offset else vocabulary
    small = dialect(story(*tokens), model="tiny", tokenizer=other)
    served = await stage.pair(large, small)
    reply = await stream(served, stream_options={"include_usage": True})
    assert reply.text("reasoning_content") == "🎉. Now🎉🎉! So"
    assert reply.text("content") == "🎉."
    assert reply.usages[0]["completion_tokens"] == len(tokens) + 1


@DIALECTS
@pytest.mark.parametrize("offset", [0, 50_000])
async def test_there_are_never_two_begin_tokens(
    stage: Stage, dialect: Dialect, offset: int
) -> None:
    large = dialect(story(*STORY), model="big", tokenizer=Tokenizer(bos=True), system="<bos>")
    small = dialect(
        story(*STORY),
        model="tiny",
        tokenizer=Tokenizer(bos=True, offset=offset) if offset else large.tokenizer,
        system="<bos>",
    )
    served = await stage.pair(large, small)
    await ask(served)
    for engine in (large, small):
        for decode in engine.decodes:
            ids = engine.ids_of(decode.body["prompt"])
            assert ids.count(engine.tokenizer.bos) == 1
            assert ids[0] == engine.tokenizer.bos
            assert not isinstance(decode.body["prompt"], str) or (
                decode.body["add_special_tokens"] is False
            )


async def test_llamacpp_gets_the_begin_token_that_a_template_leaves_out(stage: Stage) -> None:
    vocabulary = Tokenizer(bos=True)
    large, small = (
        FakeLlamaCpp(story(*STORY), model=m, tokenizer=vocabulary) for m in ("big", "tiny")
    )
    served = await stage.pair(large, small)
    await ask(served)
    for decode in [*large.decodes, *small.decodes]:
        assert decode.body["prompt"].count(vocabulary.bos) == 1
        assert decode.body["prompt"][0] == vocabulary.bos


async def test_template_options_reach_the_rendering(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    served = await stage.pair(large, small)
    await ask(served, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert large.prompts() == [
        large.rendered(
            [{"role": "user", "content": "How many?"}],
            chat_template_kwargs={"enable_thinking": False},
        )
    ]
    assert large.prompts()[0].endswith("</think>\n\n")


async def test_template_options_reach_llamacpps_rendering(stage: Stage) -> None:
    large, small = FakeLlamaCpp(model="big"), FakeLlamaCpp(model="tiny")
    served = await stage.pair(large, small)
    await ask(served, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert large.prompts()[0].endswith("</think>\n\n")


async def test_thinking_switched_off_is_left_to_the_large_model(stage: Stage) -> None:
    tokens = ("It", " is", " fine", ".", " Now", " go", " on", ".")
    vocabulary = Tokenizer()
    large, small = (
        FakeVllm(lambda _: tokens, model=m, tokenizer=vocabulary) for m in ("big", "tiny")
    )
    served = await stage.pair(large, small)
    reply = await ask(served, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert reply["choices"][0]["message"]["content"] == "".join(tokens)
    assert small.decodes == []


@DIALECTS
async def test_thinking_opened_by_the_template_is_reasoning_from_the_first_token(
    stage: Stage, dialect: Dialect
) -> None:
    vocabulary = Tokenizer()

    def script(prompt: str) -> list[str]:
        whole = STORY[1:]
        return story("<think>\n", *whole)(prompt)  # type: ignore[return-value]

    large, small = (
        dialect(script, model=m, tokenizer=vocabulary, opens="<think>\n") for m in ("big", "tiny")
    )
    served = await stage.pair(large, small)
    message = (await ask(served))["choices"][0]["message"]
    assert message["reasoning_content"] == "Six plus six. Now it is twelve. Thus twelve."
    assert message["content"] == "\n\nIt is 12."


@DIALECTS
async def test_an_assistant_message_can_be_gone_on_with(stage: Stage, dialect: Dialect) -> None:
    vocabulary = Tokenizer()
    large, small = (dialect(story(*STORY), model=m, tokenizer=vocabulary) for m in ("big", "tiny"))
    served = await stage.pair(large, small)
    begun = {"role": "assistant", "content": "<think>Six plus"}
    reply = await ask(
        served,
        messages=[{"role": "user", "content": "How many?"}, begun],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "reasoning_content": " six. Now it is twelve. Thus twelve.",
        "content": "\n\nIt is 12.",
    }


async def test_null_content_and_lists_of_text_parts_are_fine(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    served = await stage.pair(large, small)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "C"},
    ]
    reply = await ask(served, messages=messages)
    assert reply["choices"][0]["message"]["content"] == "ok"
    assert "<|im_start|>user\nAB<|im_end|>" in large.prompts()[0]


async def test_unknown_fields_travel_to_both_engines(stage: Stage) -> None:
    vocabulary = Tokenizer()
    large, small = (FakeVllm(story(*STORY), model=m, tokenizer=vocabulary) for m in ("big", "tiny"))
    served = await stage.pair(large, small, sampling={"temperature": 0.6, "top_k": 20})
    await ask(served, temperature=0.1, extra_body={"cache_salt": "x", "top_k": None})
    for decode in [*large.decodes, *small.decodes]:
        assert decode.body["cache_salt"] == "x"
        assert decode.body["temperature"] == 0.1
        assert decode.body["top_k"] == 20


async def test_a_roles_sampling_wins_over_the_policys(stage: Stage) -> None:
    vocabulary = Tokenizer()
    large, small = (FakeVllm(story(*STORY), model=m, tokenizer=vocabulary) for m in ("big", "tiny"))
    small_spec = {"backend": "small", "model": "tiny", "sampling": {"temperature": 0.9}}
    served = await stage.pair(large, small, sampling={"temperature": 0.6}, small=small_spec)
    await ask(served)
    assert {decode.body["temperature"] for decode in large.decodes} == {0.6}
    assert {decode.body["temperature"] for decode in small.decodes} == {0.9}


@pytest.mark.parametrize("quirk", ["tokens_per_chunk", "line_end", "comments", "in_one_write"])
@pytest.mark.parametrize("offset", [0, 50_000])
async def test_the_way_an_engine_cuts_its_stream_changes_nothing(
    stage: Stage, quirk: str, offset: int
) -> None:
    value = {"tokens_per_chunk": 3, "line_end": b"\r\n"}.get(quirk, True)
    large = FakeVllm(story(*STORY), model="big")
    other = Tokenizer(offset=offset) if offset else large.tokenizer
    small = FakeVllm(story(*STORY), model="tiny", tokenizer=other)
    for engine in (large, small):
        setattr(engine, quirk, value)
    served = await stage.pair(large, small)
    reply = await ask(served)
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "reasoning_content": "Six plus six. Now it is twelve. Thus twelve.",
        "content": "\n\nIt is 12.",
    }
    ours = reply["usage"]["relaygen"]
    assert (ours["large_tokens"], ours["small_tokens"]) == (8, len(STORY) + 1 - 8)
