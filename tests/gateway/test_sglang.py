"""SGLang's dialect: ids in and out, an explicit abort, errors inside streams and flat ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from gateway.engines.reading import token_pieces
from tests.gateway.fakes import (
    Error,
    FakeEngine,
    FakeSglang,
    FakeVllm,
    Fin,
    Gate,
    Raw,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.engines import COMPLETIONS
from tests.gateway.fakes.script import ASSISTANT, Act
from tests.gateway.support import (
    ANSWER,
    GONE_S,
    NO_RESUME,
    POLICY,
    REASONING,
    STORY,
    USER,
    WAIT_S,
    Served,
    Stage,
    ask,
    events,
    policy_of,
    stream,
    until_ready,
    within,
)
from tests.gateway.test_cancellation import client, idle
from tests.gateway.test_errors import send

Dialect = Callable[..., FakeEngine]


def pair(
    large: Dialect = FakeSglang,
    small: Dialect = FakeSglang,
    tokens: tuple[str | bytes, ...] = STORY,
    *,
    offset: int = 0,
    bos: bool = False,
    system: str = "",
) -> tuple[Any, Any]:
    one = Tokenizer(bos=bos)
    other = Tokenizer(bos=bos, offset=offset) if offset else one
    script = story(*tokens)
    return (
        large(script, model="big", tokenizer=one, system=system),
        small(script, model="tiny", tokenizer=other, system=system),
    )


async def message(served: Served, **request: Any) -> tuple[str, str]:
    reply = await ask(served, **request)
    told = reply["choices"][0]["message"]
    return told["reasoning_content"], told["content"]


async def handoff(served: Served) -> str:
    body = await until_ready(served, 200)
    return str(body["policies"][POLICY]["handoff"])


# ---- prompts and handoffs -----------------------------------------------------------------------

ROLES = pytest.mark.parametrize(
    ("large", "small"), [(FakeSglang, FakeSglang), (FakeSglang, FakeVllm), (FakeVllm, FakeSglang)]
)


@ROLES
async def test_equal_vocabularies_hand_over_the_very_tokens(
    stage: Stage, large: Dialect, small: Dialect
) -> None:
    # " tw"+"elve" would be cut otherwise if it went through text.
    tokens = (*STORY[:8], " tw", "elve", *STORY[9:])
    engines = pair(large, small, tokens)
    served = await stage.pair(*engines)
    assert await handoff(served) == "tokens"
    assert await message(served) == (REASONING, ANSWER)
    vocabulary = engines[0].tokenizer
    head = vocabulary.encode(engines[0].rendered(USER))
    ids = [vocabulary.id_of(token) for token in tokens]
    kept = [d.body["prompt"][len(head) :] for e in engines for d in e.decodes]
    assert sorted(map(len, kept)) == [0, 6, 11, 12, 14, 15]
    assert all(prefix == ids[: len(prefix)] for prefix in kept)


@ROLES
async def test_different_vocabularies_hand_over_by_text_and_sglang_is_sent_ids(
    stage: Stage, large: Dialect, small: Dialect
) -> None:
    engines = pair(large, small, offset=50_000)
    served = await stage.pair(*engines)
    assert await handoff(served) == "text"
    assert await message(served) == (REASONING, ANSWER)
    assert len(engines[1].decodes) == 3
    for engine in engines:
        assert all("".join(STORY).startswith(p.rpartition(ASSISTANT)[2]) for p in engine.prompts())
        if isinstance(engine, FakeSglang):
            assert all(isinstance(d.body["prompt"], list) for d in engine.decodes)


@pytest.mark.parametrize("honours", [False, True])
@pytest.mark.parametrize("offset", [0, 50_000])
async def test_there_is_one_begin_token_and_none_in_the_middle(
    stage: Stage, offset: int, honours: bool
) -> None:
    engines = pair(offset=offset, bos=True, system="<bos>")
    for engine in engines:
        engine.tokenize_takes_special = honours
    served = await stage.pair(*engines)
    assert await message(served) == (REASONING, ANSWER)
    for engine in engines:
        for decode in engine.decodes:
            assert decode.body["prompt"].count(engine.tokenizer.bos) == 1
            assert decode.body["prompt"][0] == engine.tokenizer.bos


class BeginsRendered(FakeSglang):
    """Tokenizes what it rendered like any other text: its begin token is added once more."""

    def _ids(self, body: dict[str, Any], prompt: Any) -> list[int]:
        ids = super()._ids(body, prompt)
        return [self.tokenizer.bos, *ids] if "messages" in body and self.tokenizer.bos else ids


async def test_a_begin_token_that_was_added_to_a_rendered_one_is_taken_off(stage: Stage) -> None:
    engines = pair(BeginsRendered, BeginsRendered, bos=True, system="<bos>")
    served = await stage.pair(*engines)
    assert await message(served) == (REASONING, ANSWER)
    for decode in engines[0].decodes:
        assert decode.body["prompt"].count(engines[0].tokenizer.bos) == 1


@pytest.mark.parametrize("prompt", ["Once", "<bos>Once"])
async def test_a_raw_prompt_begins_once(stage: Stage, prompt: str) -> None:
    engines = pair(bos=True)
    engines[0].script = writes(" more")
    served = await stage.pair(*engines)
    await served.client.completions.create(model=POLICY, prompt=prompt)
    vocabulary = engines[0].tokenizer
    assert engines[0].decodes[0].body["prompt"] == vocabulary.encode("Once", special=True)


async def test_template_options_reach_the_rendering(stage: Stage) -> None:
    large, small = FakeSglang(model="big"), FakeSglang(model="tiny")
    served = await stage.pair(large, small)
    await ask(served, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert large.prompts()[0].endswith("</think>\n\n")


# ---- what comes back ----------------------------------------------------------------------------


@pytest.mark.parametrize("per_chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("offset", [0, 50_000])
async def test_characters_split_over_tokens_and_chunks_come_whole(
    stage: Stage, offset: int, per_chunk: int
) -> None:
    party = [bytes([byte]) for byte in "🎉".encode()]
    tokens = ("<think>", *party, ".", " Now", *party, "!", " So", "</think>", *party, ".")
    engines = pair(tokens=tokens, offset=offset)
    for engine in engines:
        engine.tokens_per_chunk = per_chunk
    served = await stage.pair(*engines)
    reply = await stream(served, stream_options={"include_usage": True})
    assert reply.text("reasoning_content") == "🎉. Now🎉! So"
    assert reply.text("content") == "🎉."
    assert reply.usages[0]["completion_tokens"] == len(tokens) + 1


SHARES: list[tuple[str, list[str], list[tuple[str, tuple[int, ...], int]]]] = [
    ("🎉. Now", ["\x89", ".", " Now"], [("🎉", (1,), 1), (".", (2,), 1), (" Now", (3,), 1)]),
    (" Now", [" Now", "ð", "\x9f"], [(" Now", (1,), 1), ("", (2,), 1), ("", (3,), 1)]),
    ("🎉!", ["\x8e", "\x89", "!"], [("🎉", (1, 2), 2), ("!", (3,), 1)]),
    ("🎉", ["\x8e", "\x89", "ð"], [("🎉", (), 3)]),
    ("ok", ["ok", "<|im_end|>"], [("ok", (1,), 1), ("", (2,), 1)]),
    ("", ["<|im_end|>"], [("", (1,), 1)]),
]


@pytest.mark.parametrize(("text", "tokens", "pieces"), SHARES)
def test_each_token_has_its_share_of_the_text(
    text: str, tokens: list[str], pieces: list[tuple[str, tuple[int, ...], int]]
) -> None:
    logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": []}
    ids = list(range(1, len(tokens) + 1))
    read = token_pieces({"text": text, "token_ids": ids, "logprobs": logprobs})
    assert [(piece.text, piece.ids, piece.tokens) for piece in read] == pieces
    assert [piece.logprob for piece in read] == [-0.5 if n == 1 else None for *_, n in pieces]


async def test_several_tokens_a_chunk_are_cut_between_tokens(stage: Stage) -> None:
    engines = pair()
    for engine in engines:
        engine.tokens_per_chunk = 4
    served = await stage.pair(*engines)
    assert await message(served) == (REASONING, ANSWER)
    assert len(engines[1].decodes) == 3


async def test_logprobs_are_passed_on(stage: Stage) -> None:
    engines = pair()
    served = await stage.pair(*engines)
    reply = await ask(served, logprobs=True, top_logprobs=25 - 5)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "".join(STORY)
    assert {entry["logprob"] for entry in entries} == {-0.25}
    assert {len(entry["top_logprobs"]) for entry in entries} == {20}
    assert engines[0].decodes[0].body["logprobs"] == 20


async def test_min_tokens_and_seed_count_over_all_segments(stage: Stage) -> None:
    engines = pair()
    served = await stage.pair(*engines)
    await ask(served, seed=7, extra_body={"min_tokens": 9})
    first, *_ = engines[0].decodes
    assert (first.body["min_tokens"], first.body["seed"]) == (9, 7)
    small, *_ = engines[1].decodes
    assert (small.body["min_tokens"], small.body["seed"]) == (3, 8)


# ---- aborts -------------------------------------------------------------------------------------


async def freed(engine: FakeSglang, number: int = 0) -> str:
    """How a decode ended, which must be known within a second."""
    rid = (await engine.decode(number)).body["rid"]
    return await engine.freeing(rid, GONE_S)


def halting(prompt: str) -> list[Act]:
    """The story, which stands still one token after each cut."""
    rest = list(story(*STORY)(prompt))
    kept = {0: 6, 6: 4, 10: 1, 11: 2, 13: 1}.get(len(STORY) - len(rest), len(rest))
    return [*rest[: kept + 1], *([Gate()] if kept < len(rest) else [])]


async def test_a_cue_and_a_boundary_abort_and_an_end_does_not(stage: Stage) -> None:
    large, small = pair()
    large.script = small.script = halting
    served = await stage.pair(large, small)
    assert await message(served) == (REASONING, ANSWER)
    assert [await freed(large, i) for i in range(3)] == ["abort"] * 3
    assert [await freed(small, i) for i in range(3)] == ["abort", "abort", "end"]
    asked = [d.body["rid"] for d in [*large.decodes, *small.decodes]]
    assert len(set(asked)) == 6
    assert sorted([*large.aborts, *small.aborts]) == sorted(asked[:-1])


@pytest.mark.parametrize("mode", ["large", "small"])
async def test_one_model_that_writes_all_is_never_aborted(stage: Stage, mode: str) -> None:
    large, small = pair()
    served = await stage.pair(large, small)
    for streaming in (False, True):
        extra = {"relaygen": {"mode": mode}}
        await (stream if streaming else ask)(served, extra_body=extra)
    await ask(served, max_tokens=2, extra_body=extra)
    writer = large if mode == "large" else small
    assert [await freed(writer, i) for i in range(3)] == ["end"] * 3
    await idle(served)
    assert large.aborts == small.aborts == []


@pytest.mark.parametrize("before", [(), ("<think>", "Six")], ids=["first token", "mid-stream"])
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_a_client_that_leaves_aborts(
    stage: Stage, streaming: bool, before: tuple[str, ...]
) -> None:
    gate = Gate()
    large = FakeSglang(writes(*before, gate), model="big")
    served = await stage.pair(large, FakeSglang(model="tiny"))
    async with client(served, stream=streaming):
        await within(WAIT_S, gate.reached.wait())
    assert await freed(large) == "abort"
    assert large.aborts == [large.decodes[0].body["rid"]]
    await idle(served)


async def test_a_request_that_was_refused_is_not_aborted(stage: Stage) -> None:
    large = FakeSglang(model="big")
    served = await stage.pair(large, FakeSglang(model="tiny"))
    large.refusals[COMPLETIONS] = (400, b'{"object": "error", "message": "no"}')
    with pytest.raises(openai.BadRequestError):
        await ask(served)
    await idle(served)
    assert large.asked("/abort_request") == []


async def test_an_abort_that_fails_changes_nothing(stage: Stage) -> None:
    large, small = pair()
    served = await stage.pair(large, small)
    for engine in (large, small):
        engine.refusals["/abort_request"] = (500, b"no")
    assert await message(served) == (REASONING, ANSWER)


async def test_the_health_check_that_generates_is_never_used(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.backends._CHECK_S", 0.02)
    large, small = pair()
    served = await stage.pair(large, small)
    await until_ready(served, 200)
    await large.request("/ready", 3)
    assert large.health_checks == 0
    large.refusals["/ready"] = (503, b"")
    await until_ready(served, 503)


# ---- errors -------------------------------------------------------------------------------------


async def replicas(stage: Stage, *large: FakeSglang) -> Served:
    small = FakeSglang(model="tiny")
    for engine in (*large, small):
        await stage.engine(engine)
    backends = {"large": {"urls": [e.url for e in large]}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": backends}, policy_of(large[0], small))
    await until_ready(served, 200)
    return served


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_full_queue_is_passed_over(stage: Stage, streaming: bool) -> None:
    full, free = FakeSglang(model="big"), FakeSglang(writes("Fine"), model="big")
    served = await replicas(stage, full, free)
    full.overloaded = True
    if streaming:
        assert (await stream(served)).text("content") == "Fine"
    else:
        assert (await ask(served))["choices"][0]["message"]["content"] == "Fine"
    assert len(full.decodes) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_full_queue_everywhere_is_a_503(stage: Stage, streaming: bool) -> None:
    served = await replicas(stage, full := FakeSglang(model="big"))
    full.overloaded = True
    with pytest.raises(openai.InternalServerError, match="queue is full") as caught:
        await ask(served, stream=streaming)
    assert caught.value.status_code == 503


async def test_a_flat_error_keeps_its_status_and_message(stage: Stage) -> None:
    served = await stage.pair(FakeSglang(model="big", context=40), FakeSglang(model="tiny"))
    with pytest.raises(openai.BadRequestError, match="longer than the model's context") as caught:
        await ask(served, messages=[{"role": "user", "content": "six " * 50}])
    assert caught.value.body["type"] == "BadRequestError"  # type: ignore[index]


@pytest.mark.parametrize(
    "broken", [Error("out of memory", 500), Fin(), Raw(b'data: {"choices": 7}\n\n')]
)
async def test_what_breaks_mid_stream_is_an_error_and_no_end(stage: Stage, broken: Any) -> None:
    large = FakeSglang(writes("<think>", "Six", broken), model="big")
    served = await stage.pair(large, FakeSglang(model="tiny"), NO_RESUME)
    status, wire = await send(served, {"model": POLICY, "messages": USER, "stream": True})
    *chunks, last = events(wire)
    assert status == 200
    assert last["error"]["type"] == "upstream_error"
    assert chunks[-1]["choices"][0]["delta"] == {"reasoning_content": "Six"}


async def test_a_decode_that_was_aborted_elsewhere_is_an_error(stage: Stage) -> None:
    gate = Gate()
    large = FakeSglang(writes("<think>", "Six", gate), model="big")
    served = await stage.pair(large, FakeSglang(model="tiny"), NO_RESUME)
    async with client(served, stream=True) as (reader, _):
        await within(WAIT_S, gate.reached.wait())
        large._abort(abort_all=True)
        wire = await within(WAIT_S, reader.readuntil(b"}}\n\n"))
    error = json.loads(wire.rpartition(b"data: ")[2])["error"]
    assert "aborted the generation" in error["message"]
