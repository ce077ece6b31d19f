"""A new policy on a share of the traffic, and answers compared with the large model's own."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from gateway import shadow
from gateway.errors import UpstreamError
from tests.gateway.fakes import FakeVllm, Tokenizer
from tests.gateway.fakes.script import story
from tests.gateway.support import (
    STORY,
    WAIT_S,
    Served,
    Stage,
    ask,
    backends_of,
    get,
    policy_of,
    until_ready,
    within,
)
from tests.gateway.test_metrics import counted


def engines(small_says: str = " 1") -> tuple[FakeVllm, FakeVllm]:
    same = Tokenizer()
    told = [small_says if token == " 1" else token for token in STORY]
    return (
        FakeVllm(story(*STORY), model="big", tokenizer=same),
        FakeVllm(story(*told), model="tiny", tokenizer=same),
    )


async def canary(stage: Stage, weights: dict[str, float], **settings: Any) -> Served:
    large, small = engines()
    await stage.engine(large)
    await stage.engine(small)
    policies = [policy_of(large, small, name=name) for name in ("old", "new")]
    models = {"public": {"weights": weights}}
    given = {"backends": backends_of(large, small), "models": models, **settings}
    return await stage.gateway(given, *policies)


async def answered_by(served: Served, model: str, count: int) -> list[str]:
    replies = [await ask(served, model=model) for _ in range(count)]
    assert {reply["model"] for reply in replies} == {model}
    return [reply["usage"]["relaygen"]["policy"] for reply in replies]


# ---- one name, several policies -----------------------------------------------------------------


async def test_requests_go_to_policies_by_weight(stage: Stage) -> None:
    served = await canary(stage, {"old": 90, "new": 10})
    await until_ready(served, 200)
    found = await answered_by(served, "public", 100)
    assert set(found) == {"old", "new"}
    assert 60 <= found.count("old") <= 99  # off its bounds once in some 10^9 runs
    assert await answered_by(served, "new", 3) == ["new"] * 3


async def test_a_policy_that_is_not_loaded_gets_none(stage: Stage) -> None:
    served = await canary(stage, {"gone": 1000, "new": 1})
    told = await until_ready(served, 200)
    assert await answered_by(served, "public", 10) == ["new"] * 10
    weights = {"gone": 1000, "new": 1}
    assert told["models"] == {"public": {"ready": True, "weights": weights, "missing": ["gone"]}}


async def test_a_name_with_no_policy_is_told(stage: Stage) -> None:
    served = await canary(stage, {"gone": 1})
    with pytest.raises(openai.APIStatusError, match=r"'public'.*gone.*models\.public\.weights"):
        await ask(served, model="public")
    told = await until_ready(served, 503)
    assert told["models"]["public"]["ready"] is False


async def test_a_public_name_goes_before_a_policys_own(stage: Stage) -> None:
    served = await canary(stage, {}, models={"old": {"weights": {"new": 1}}})
    await until_ready(served, 200)
    assert await answered_by(served, "old", 3) == ["new"] * 3


async def test_public_names_are_listed_with_their_weights(stage: Stage) -> None:
    served = await canary(stage, {"old": 3, "new": 1})
    _, answer = await get(served, "/v1/models")
    [told] = [model for model in answer["data"] if model["id"] == "public"]
    assert told["relaygen"] == {"weights": {"old": 3, "new": 1}}


async def test_a_key_for_the_public_name_needs_none_for_its_policies(stage: Stage) -> None:
    keys = [{"name": "a", "key": "any", "policies": ["public"]}]
    served = await canary(stage, {"old": 1, "new": 1}, api_keys=keys)
    await ask(served, model="public")
    with pytest.raises(openai.NotFoundError):
        await ask(served, model="old")


@pytest.mark.parametrize("weights", [{}, {"old": 0}, {"old": -1}])
async def test_weights_are_checked(stage: Stage, weights: dict[str, float]) -> None:
    with pytest.raises(Exception, match=r"models\.public\.weights"):
        await canary(stage, weights)


# ---- compared with the large model alone --------------------------------------------------------


async def shadowed(stage: Stage, small_says: str = " 1", **given: Any) -> tuple[Served, FakeVllm]:
    large, small = engines(small_says)
    settings = {"shadow": {"share": 1.0, **given}}
    served = await stage.pair(large, small, settings, answer="small")
    await until_ready(served, 200)
    return served, large


async def outcome(served: Served) -> dict[str, float]:
    """What was counted of the next comparison."""
    count = await counted(served)
    async with asyncio.timeout(WAIT_S):
        reply = asyncio.ensure_future(ask(served))
        while True:
            found = await count.look()
            told = {name: n for name, n in found.items() if name.startswith("relaygen_shadows")}
            if told and reply.done():
                return {**found, **told}
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("small_says", "told"), [(" 1", "agrees"), (" 3", "differs")])
async def test_the_final_answers_are_compared(stage: Stage, small_says: str, told: str) -> None:
    served, _ = await shadowed(stage, small_says)
    with capture_logs() as logs:
        found = await outcome(served)
    assert found[f'relaygen_shadows_total{{outcome="{told}",policy="pair"}}'] == 1
    [line] = [line for line in logs if line["event"] == "shadow"]
    assert line["agrees"] is (told == "agrees")
    assert line["large_seconds"] > 0 < line["relay_seconds"]
    assert "twelve" not in str(line)


async def test_the_shadow_is_no_generation_of_a_client(stage: Stage) -> None:
    served, _ = await shadowed(stage)
    found = await outcome(served)
    assert found['relaygen_generations_total{outcome="done",policy="pair"}'] == 1


async def test_a_comparison_that_fails_is_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise UpstreamError("no engine")

    monkeypatch.setattr(shadow, "_alone", fails)
    served, _ = await shadowed(stage)
    with capture_logs() as logs:
        found = await outcome(served)
    assert found['relaygen_shadows_total{outcome="failed",policy="pair"}'] == 1
    [line] = [line for line in logs if line["event"] == "shadow failed"]
    assert line["error"] == "no engine"


async def test_clients_do_not_wait_and_what_is_beyond_the_limit_is_left_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(shadow, "_alone", waits)
    served, _ = await shadowed(stage, concurrent=1)
    count = await counted(served)
    await within(WAIT_S, ask(served))
    await within(WAIT_S, ask(served))
    found = await count.look()
    assert found['relaygen_shadows_total{outcome="skipped",policy="pair"}'] == 1


async def test_one_that_takes_too_long_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(shadow, "_alone", waits)
    served, _ = await shadowed(stage, seconds=0.05)
    found = await outcome(served)
    assert found['relaygen_shadows_total{outcome="failed",policy="pair"}'] == 1


async def test_it_is_off_unless_asked_for(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await until_ready(served, 200)
    usage = (await ask(served))["usage"]["relaygen"]
    assert len(large.decodes) + len(small.decodes) == usage["segments"]
