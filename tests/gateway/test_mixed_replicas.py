"""Replicas of one role that are not alike: a generation that moves is rendered anew."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import resuming
from tests.gateway.fakes import (
    FakeEngine,
    FakeLlamaCpp,
    FakeVllm,
    Gate,
    Reset,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.support import (
    ANSWER,
    POLICY,
    REASONING,
    STORY,
    WAIT_S,
    Stage,
    ask,
    stream,
    within,
)
from tests.gateway.test_balance import Pool, pool
from tests.gateway.test_resuming import after

DIALECTS: list[tuple[type[FakeEngine], type[FakeEngine]]] = [
    (FakeVllm, FakeLlamaCpp),
    (FakeLlamaCpp, FakeVllm),
]
OTHER = 50_000


def pair(
    kinds: tuple[type[FakeEngine], type[FakeEngine]], script: Any, offset: int
) -> list[FakeEngine]:
    """The first breaks; the second has another template and perhaps another vocabulary."""
    first, second = kinds
    return [
        first(script, model="big", system="FIRST "),
        second(story(*STORY), model="big", system="SECOND ", tokenizer=Tokenizer(offset=offset)),
    ]


async def told(p: Pool) -> tuple[str, str, list[str]]:
    reply = await stream(p.served)
    return reply.text("reasoning_content"), reply.text("content"), reply.finishes


@pytest.mark.parametrize("kinds", DIALECTS)
@pytest.mark.parametrize("offset", [0, OTHER])
@pytest.mark.parametrize("count", [1, 4])
async def test_a_generation_goes_on_at_another_kind_of_engine(
    stage: Stage, kinds: tuple[type[FakeEngine], type[FakeEngine]], offset: int, count: int
) -> None:
    engines = pair(kinds, after(count, Reset()), offset)
    p = await pool(stage, engines)
    assert await told(p) == (REASONING, ANSWER, ["stop"])
    first, second = engines
    assert all(prompt.startswith("FIRST ") for prompt in first.prompts())
    assert second.prompts() and all(prompt.startswith("SECOND ") for prompt in second.prompts())
    await p.idle()


@pytest.mark.parametrize("kinds", DIALECTS)
async def test_by_the_very_tokens_where_both_have_one_vocabulary(
    stage: Stage, kinds: tuple[type[FakeEngine], type[FakeEngine]]
) -> None:
    tokens = [*STORY[:3], " s", "ix", *STORY[4:]]  # cut otherwise if it went through text
    vocabulary = Tokenizer()
    engines = pair(kinds, after(6, Reset()), 0)
    engines[0].script = lambda prompt: [*tokens[:6], Reset()]
    engines[1].script = story(*tokens)
    small: list[FakeEngine] = [FakeVllm(story(*tokens), model="tiny")]
    p = await pool(stage, engines, small)
    assert await told(p) == (REASONING, ANSWER, ["stop"])
    sent = engines[1].decodes[0].body["prompt"]
    kept = [vocabulary.id_of(token) for token in tokens[:6]]
    assert sent[-6:] == kept


async def test_by_text_and_for_good_where_the_vocabularies_differ(stage: Stage) -> None:
    engines = pair((FakeVllm, FakeVllm), after(4, Reset()), OTHER)
    p = await pool(stage, engines)
    assert await told(p) == (REASONING, ANSWER, ["stop"])
    moved = [d.body["prompt"] for d in engines[1].decodes]
    tiny = [d.body["prompt"] for d in p.small[0].decodes]
    assert moved and all(isinstance(prompt, str) for prompt in moved)
    assert tiny and all(isinstance(prompt, str) for prompt in tiny)


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
async def test_ids_that_a_client_gave_never_reach_another_vocabulary(
    stage: Stage, field: str
) -> None:
    engines = pair((FakeVllm, FakeVllm), after(4, Reset()), OTHER)
    p = await pool(stage, engines)
    given = {"logit_bias": {"2001": 1}, "allowed_token_ids": [2001]}
    reply = await stream(p.served, extra_body={field: given[field]})
    assert (reply.text("reasoning_content"), reply.text("content")) == (REASONING, ANSWER)
    assert len(engines[0].decodes) > 1 and not engines[1].decodes


async def test_a_prompt_of_ids_stays_with_its_vocabulary(stage: Stage) -> None:
    engines = pair((FakeVllm, FakeVllm), after(4, Reset()), OTHER)
    alike = FakeVllm(story(*STORY), model="big")
    p = await pool(stage, [*engines, alike])
    prompt = Tokenizer().encode("assistant\n")
    reply = await p.served.client.completions.create(model=POLICY, prompt=prompt, max_tokens=99)
    assert reply.choices[0].text == "".join(STORY)
    assert alike.decodes and not engines[1].decodes


async def test_one_that_refuses_the_prompt_is_passed_over(stage: Stage) -> None:
    engines = pair((FakeVllm, FakeLlamaCpp), after(4, Reset()), 0)
    third = FakeVllm(story(*STORY), model="big")
    p = await pool(stage, [*engines, third])
    refusal = b'{"error": {"message": "no such role"}}'
    engines[1].refusals["/apply-template"] = (400, refusal)
    assert await told(p) == (REASONING, ANSWER, ["stop"])
    assert third.decodes and not engines[1].decodes


# ---- how long, and how often --------------------------------------------------------------------


class Full(FakeVllm):
    """Breaks once, then has too much to do for a while."""

    rejected = 6

    async def answer(self, request: Request, connection: Connection) -> None:
        if 1 < len(self.decodes) <= 1 + self.rejected and self.is_decode(request.path):
            connection.whole(b'{"error": {"message": "full"}}', 429)
        else:
            await super().answer(request, connection)


async def test_one_that_has_too_much_to_do_is_waited_for_longer_each_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(resuming, "_wait", lambda times: waits.append(times) or 0.0)
    engine = Full(model="big")
    script = story(*STORY)
    breaks = [["<think>", "Six", Reset()], [" plus", Reset()]]
    engine.script = lambda prompt: breaks.pop(0) if breaks else script(prompt)
    p = await pool(stage, [engine], plain="large", answer="large")
    assert await told(p) == (REASONING, ANSWER, ["stop"])
    assert waits == [*range(1 + engine.rejected), 0], "anew after a new token"


async def test_where_all_are_slow_at_first_the_last_is_kept(stage: Stage) -> None:
    gates = [Gate(), Gate()]
    engines: list[FakeEngine] = [FakeVllm(writes(gate, "Fine"), model="big") for gate in gates]
    p = await pool(stage, engines, slow={"large": {"first_token": 0.05}})
    asked = asyncio.create_task(ask(p.served))
    await within(WAIT_S, gates[1].reached.wait())
    with pytest.raises(TimeoutError):  # longer than the limit
        await asyncio.wait_for(asyncio.shield(asked), 0.3)
    gates[1].opened.set()
    assert (await asked)["choices"][0]["message"]["content"] == "Fine"
    assert [len(engine.decodes) for engine in engines] == [1, 1]
