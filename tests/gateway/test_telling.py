"""The line that the log gets for each generation, how many get one, and what it must not tell."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.gateway.fakes import FakeVllm, Tokenizer
from tests.gateway.fakes.script import story
from tests.gateway.support import ANSWER, POLICY, REASONING, STORY, USER, Served, Stage, ask


async def served(stage: Stage, **log: Any) -> Served:
    same = Tokenizer()
    large = FakeVllm(story(*STORY), model="big", tokenizer=same)
    small = FakeVllm(story(*STORY), model="tiny", tokenizer=same)
    return await stage.pair(large, small, {"log": log})


def lines(logs: list[Any], event: str) -> list[dict[str, Any]]:
    return [line for line in logs if line["event"] == event]


async def test_a_generation_is_told_in_one_line(stage: Stage) -> None:
    gateway = await served(stage)
    with capture_logs() as logs:
        reply = await ask(gateway)
    [told] = lines(logs, "generation")
    usage = reply["usage"]
    for name in ("large_tokens", "small_tokens", "handoffs", "resumes", "discarded_tokens"):
        assert told[name] == usage["relaygen"][name]
    assert (told["policy"], told["large"], told["small"]) == (POLICY, "big", "tiny")
    assert (told["id"], told["finish"], told["outcome"]) == (reply["id"], "stop", "done")
    assert told["prompt_tokens"] == usage["prompt_tokens"]
    assert 0 < told["first_token_ms"] < told["seconds"] * 1e3 + 1
    assert set(told["engines"]) == {"large", "small"}


async def test_texts_are_not_told_unless_asked_for(stage: Stage) -> None:
    gateway = await served(stage)
    with capture_logs() as logs:
        await ask(gateway)
    assert not [line for line in logs if "twelve" in str(line) or "How many" in str(line)]


async def test_texts_are_marked_where_they_are_told(stage: Stage) -> None:
    gateway = await served(stage, texts=True)
    with capture_logs() as logs:
        await ask(gateway)
    [told] = lines(logs, "texts")
    assert told["private"] is True
    assert told["asked"] == USER
    assert told["written"] == f"<think>{REASONING}</think>{ANSWER}"
    assert not [line for line in logs if line is not told and "twelve" in str(line)]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 3, 17), (1.0, 20, 20)])
async def test_a_share_of_the_requests_is_told(
    stage: Stage, share: float, least: int, most: int
) -> None:
    gateway = await served(stage, sample=share)
    with capture_logs() as logs:
        for number in range(20):
            await ask(gateway, extra_headers={"x-request-id": f"request-{number}"})
    assert least <= len(lines(logs, "generation")) <= most


async def test_all_choices_of_a_request_are_told_or_none(stage: Stage) -> None:
    gateway = await served(stage, sample=0.5)
    with capture_logs() as logs:
        for number in range(10):
            await ask(gateway, n=2, extra_headers={"x-request-id": f"request-{number}"})
    ids = [line["id"] for line in lines(logs, "generation")]
    assert ids
    assert all(ids.count(one) == 2 for one in ids)


async def test_a_failure_is_always_told(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    large.refusals["/v1/completions"] = (400, b'{"error": {"message": "no"}}')
    gateway = await stage.pair(large, small, {"log": {"sample": 0}})
    with capture_logs() as logs, pytest.raises(Exception, match="no"):
        await ask(gateway)
    [told] = lines(logs, "generation")
    assert told["outcome"] == "failed"
