"""Several choices of one request: relayed side by side, each by itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import openai
import pytest

from gateway.context import GATEWAY
from tests.gateway.fakes import (
    Error,
    FakeVllm,
    Gate,
    Reset,
    Script,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.engines import COMPLETIONS
from tests.gateway.fakes.script import Act
from tests.gateway.support import GONE_S, POLICY, USER, WAIT_S, Served, Stage, ask, stream, within
from tests.gateway.test_cancellation import client, idle
from tests.gateway.test_errors import send

STORY = ("<think>", "Six", ".", " Now", " it", " is", ".", "</think>", "\n\n", "It", " is", ".")
TOKENS = len(STORY) + 1  # and the end of turn
MESSAGE = {"role": "assistant", "reasoning_content": "Six. Now it is.", "content": "\n\nIt is."}
PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])


async def two(
    stage: Stage, large: Script, small: Script, settings: Mapping[str, Any] = {}, /, **policy: Any
) -> tuple[Served, FakeVllm, FakeVllm]:
    vocabulary = Tokenizer()
    engines = (
        FakeVllm(large, model="big", tokenizer=vocabulary),
        FakeVllm(small, model="tiny", tokenizer=vocabulary),
    )
    return await stage.pair(*engines, settings, **policy), *engines


async def telling(stage: Stage) -> tuple[Served, FakeVllm, FakeVllm]:
    """Two engines that write the same story, whoever goes on."""
    return await two(stage, story(*STORY), story(*STORY))


def one_each(*scripts: Iterable[Act]) -> Script:
    """The first decode has the first script, and so on; later ones have the last."""
    left = [list(script) for script in scripts]
    return lambda prompt: left.pop(0) if len(left) > 1 else left[0]


# ---- each choice is a relay of its own ----------------------------------------------------------


async def test_every_choice_is_relayed(stage: Stage) -> None:
    served, large, small = await telling(stage)
    reply = await ask(served, n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["message"] for choice in reply["choices"]] == [MESSAGE] * 3
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop"] * 3
    assert (len(large.decodes), len(small.decodes)) == (6, 6)


async def test_every_choice_has_a_role_and_an_end_of_its_own_in_a_stream(stage: Stage) -> None:
    served, _, _ = await telling(stage)
    reply = await stream(served, n=3, stream_options={"include_usage": True})
    for index in range(3):
        mine = [c["choices"][0] for c in reply.chunks if c["choices"]]
        mine = [choice for choice in mine if choice["index"] == index]
        deltas = [choice["delta"] for choice in mine]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:])
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "Six. Now it is."
        assert "".join(d.get("content", "") for d in deltas) == "\n\nIt is."
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
    assert {c["id"] for c in reply.chunks} == {reply.chunks[0]["id"]}
    assert "usage" in reply.chunks[-1]
    assert len(reply.usages) == 1


@PATHS
async def test_choices_come_side_by_side(stage: Stage, path: str) -> None:
    """None of them waits for another's end."""
    gates = [Gate(), Gate()]
    scripts = [[f"<think>{i}", gate, "x"] for i, gate in enumerate(gates)]
    served, _, _ = await two(stage, one_each(*scripts), writes("ok"))
    body = {"prompt": "How many?"} if path == COMPLETIONS else {}
    async with client(served, path, n=2, stream=True, **body) as (reader, _):
        await within(WAIT_S, gates[0].reached.wait())
        await within(WAIT_S, gates[1].reached.wait())
        for number in (1, 0):
            gates[number].opened.set()
            wire = await within(WAIT_S, reader.readuntil(b'"finish_reason":"stop"'))
            event = wire.rpartition(b"data: ")[2]
            assert b'"index":' in event


async def test_the_one_that_writes_first_is_not_always_the_first(stage: Stage) -> None:
    held, free = Gate(), Gate()
    served, large, _ = await two(stage, one_each([held, "late"], ["soon", free]), writes("ok"))
    chunks = await served.client.chat.completions.create(
        model=POLICY, messages=USER, n=2, stream=True
    )
    texts: list[str] = []
    async for chunk in chunks:
        texts += [c.delta.content for c in chunk.choices if c.delta.content]
        if texts == ["soon"]:
            held.opened.set()
            free.opened.set()
    assert texts == ["soon", "late"]
    assert len(large.decodes) == 2


async def test_the_trace_tells_each_choices_own_segments(stage: Stage) -> None:
    served, _, _ = await telling(stage)
    reply = await stream(served, n=2, extra_body={"relaygen": {"trace": True}})
    for index in range(2):
        mine = [c for c in reply.chunks if c["choices"] and c["choices"][0]["index"] == index]
        segments = [chunk["relaygen"]["segment"] for chunk in mine]
        assert segments == sorted(segments)
        assert set(segments) == {0, 1, 3}  # of the third there is but the closing tag


# ---- what they share, and what they do not ------------------------------------------------------


async def test_seeds_of_two_choices_never_meet(stage: Stage) -> None:
    served, large, small = await telling(stage)
    await ask(served, n=3, seed=11)
    seeds = [decode.body["seed"] for decode in [*large.decodes, *small.decodes]]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) == 11


async def test_the_first_choice_is_the_one_that_a_lone_choice_would_be(stage: Stage) -> None:
    served, large, small = await telling(stage)
    await ask(served, seed=11)
    alone = {decode.body["seed"] for decode in [*large.decodes, *small.decodes]}
    await ask(served, seed=11, n=2)
    both = [decode.body["seed"] for decode in [*large.decodes, *small.decodes]]
    assert {seed for seed in both if both.count(seed) == 2} == alone


async def test_without_a_seed_none_is_made_up(stage: Stage) -> None:
    served, large, _ = await telling(stage)
    await ask(served, n=2)
    assert not any("seed" in decode.body for decode in large.decodes)


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_usage_counts_every_choice_and_the_prompt_once(stage: Stage, streaming: bool) -> None:
    served, large, _ = await telling(stage)
    if streaming:
        options = {"stream_options": {"include_usage": True}}
        [usage] = (await stream(served, n=3, **options)).usages
    else:
        usage = (await ask(served, n=3))["usage"]
    prompt = len(large.tokenizer.encode(large.rendered(USER)))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 3 * TOKENS)
    assert usage["total_tokens"] == prompt + 3 * TOKENS
    ours = usage["relaygen"]
    assert ours["large_tokens"] + ours["small_tokens"] == 3 * TOKENS
    assert (ours["handoffs"], ours["segments"]) == (9, 12)


async def test_each_choice_has_the_whole_budget(stage: Stage) -> None:
    served, _, _ = await telling(stage)
    reply = await ask(served, n=2, max_tokens=4)
    assert [c["finish_reason"] for c in reply["choices"]] == ["length", "length"]
    assert reply["usage"]["completion_tokens"] == 8


async def test_the_prompt_is_rendered_once(stage: Stage) -> None:
    served, large, _ = await telling(stage)
    await ask(served)
    asked = len(large.asked("/tokenize"))
    await ask(served, n=5)
    assert len(large.asked("/tokenize")) == asked + 1


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_completions_of_several_prompts_have_their_choices_in_order(
    stage: Stage, streaming: bool
) -> None:
    served, large, _ = await two(
        stage, lambda prompt: [f"after {prompt[-1]}"], writes("never"), plain="large"
    )
    create = served.client.completions.create
    given: Any = {"model": POLICY, "prompt": ["a", "b"], "n": 2}
    texts = dict.fromkeys(range(4), "")
    if streaming:
        async for chunk in await create(**given, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        texts = {c.index: c.text for c in (await create(**given)).choices}
    assert texts == {0: "after a", 1: "after a", 2: "after b", 3: "after b"}
    assert len(large.decodes) == 4


# ---- what breaks --------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [Error("queue full"), Reset()], ids=["error", "reset"])
async def test_one_that_breaks_ends_them_all(stage: Stage, failure: Act) -> None:
    told, held = Gate(), Gate()
    served, large, _ = await two(
        stage, one_each(["one", held], ["two", told, failure]), writes("ok")
    )
    chunks = await served.client.chat.completions.create(
        model=POLICY, messages=USER, n=2, stream=True
    )
    seen: list[Any] = []
    with pytest.raises(openai.APIError):
        async for chunk in chunks:
            seen += chunk.choices
            if {"one", "two"} <= {choice.delta.content for choice in seen}:
                told.opened.set()
    assert not any(choice.finish_reason for choice in seen)
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)


async def test_a_broken_choice_is_an_error_event_and_no_done(stage: Stage) -> None:
    served, _, _ = await two(stage, one_each(["one"], ["two", Error("queue full")]), writes("ok"))
    _, wire = await send(served, {"model": POLICY, "messages": USER, "n": 2, "stream": True})
    last = json.loads(wire.strip().rpartition(b"data: ")[2])
    assert "queue full" in last["error"]["message"]
    assert b"[DONE]" not in wire


async def test_in_one_piece_a_broken_choice_is_an_http_error(stage: Stage) -> None:
    served, _, _ = await two(stage, one_each(["one"], ["two", Reset()]), writes("ok"))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served, n=2)
    assert caught.value.status_code == 502


async def test_an_error_before_anything_came_is_an_http_error(stage: Stage) -> None:
    served, large, _ = await telling(stage)
    large.refusals[COMPLETIONS] = (422, b'{"error": {"message": "too hot"}}')
    for streaming in (True, False):
        with pytest.raises(openai.UnprocessableEntityError, match="too hot"):
            await ask(served, n=3, stream=streaming)
    await idle(served)


async def test_a_bug_in_a_choice_ends_the_reply_and_does_not_hang(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, _, _ = await telling(stage)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.choices._finish", broken)
    with pytest.raises(openai.InternalServerError) as caught:
        await within(WAIT_S, ask(served, n=2))
    assert caught.value.code == "internal_error"
    await idle(served)


# ---- leaving, slow readers, limits --------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_leaving_closes_the_streams_of_all_choices(
    stage: Stage, streaming: bool, path: str
) -> None:
    gates = [Gate() for _ in range(4)]
    served, large, _ = await two(
        stage, one_each(*(["<think>", "Six", gate] for gate in gates)), writes("ok")
    )
    body = {"prompt": "How many?"} if path == COMPLETIONS else {}
    async with client(served, path, n=4, stream=streaming, **body):
        for gate in gates:
            await within(WAIT_S, gate.reached.wait())
    for decode in large.decodes:
        await within(GONE_S, decode.left.wait())
    assert len(large.decodes) == 4
    await idle(served)


async def test_a_slow_reader_slows_every_choice(stage: Stage) -> None:
    flood = [f" {'x' * 4000}"] * 5000
    served, large, small = await two(stage, writes(*flood, Gate()), writes("ok"))
    large.context = small.context = 100_000
    async with client(served, n=2, stream=True) as (reader, _):
        await within(WAIT_S, reader.readuntil(b"xxx"))
        await large.decode(1)
        connections = [large.connections[decode.connection] for decode in large.decodes]
        for connection in connections:
            await within(WAIT_S, connection.unread.wait())
        for connection in connections:
            with pytest.raises(TimeoutError):
                await within(0.3, connection.read.wait())
    for decode in large.decodes:
        await within(GONE_S, decode.left.wait())


async def test_the_limit_of_generations_counts_choices(stage: Stage) -> None:
    gate = Gate()
    settings = {"limits": {"generations": 3}}
    served, _, _ = await two(stage, writes("one", gate), writes("ok"), settings)
    with pytest.raises(openai.RateLimitError):
        await ask(served, n=4)
    async with client(served, n=2, stream=True):
        await within(WAIT_S, gate.reached.wait())
        assert served.app[GATEWAY].admission.taken == 2
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(served, n=2)
        assert caught.value.code == "too_many_generations"
        gate.opened.set()
        assert len((await ask(served, n=1))["choices"]) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "n": 129}),
        (COMPLETIONS, {"prompt": "x", "n": 129}),
        (COMPLETIONS, {"prompt": ["x", "y"], "n": 65}),
        (COMPLETIONS, {"prompt": ["x"] * 129}),
    ],
)
async def test_too_many_choices_are_refused_by_name(
    stage: Stage, path: str, body: dict[str, Any]
) -> None:
    served, large, _ = await telling(stage)
    status, content = await send(served, {"model": POLICY, **body}, path)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, "n")
    assert "128" in error["message"]
    assert large.decodes == []
