"""No generation is lost, and none is falsified, while the engines' connections break.

The short form is in the default suite; `make chaos` runs the long one, with the gateway in a
process of its own. What struck depends on the seed alone, as far as the order of arrival does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.clients import Client, Outcome, generations, plain_session, references
from tests.chaos.growth import running_tasks
from tests.chaos.outcomes import Got, Verdict
from tests.chaos.report import print_report
from tests.chaos.run import GONE_S, Run, left_after, perform
from tests.chaos.schedule import Fault, Kind, Schedule
from tests.chaos.transcripts import Question, transcript
from tests.chaos.world import POLICY, RESUMES, Setting, World, policy, settings, world
from tests.gateway.support import Stage

EQUAL = 0.99 if RESUMES else 0.0
QUESTIONS = 10
IDLE_S = 1.0
SETTLE_S = 5.0
SHORT = [
    Setting("vllm"),
    Setting("vllm", handoff="text"),
    Setting("llamacpp"),
    Setting("sglang:vllm"),
]
LONG = [
    Run(1000, setting=Setting("vllm")),
    Run(300, seed=2, setting=Setting("llamacpp")),
    Run(300, seed=3, setting=Setting("sglang")),
    Run(300, seed=4, setting=Setting("tgi:vllm")),
    Run(300, seed=5, setting=Setting("vllm", handoff="text"), scope="requests"),
]


def whole(got: Got) -> bytes:
    return f"<think>{got.reasoning}</think>{got.content}".encode()


def of(verdict: Verdict, outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(o.question.text, o.why) for o in outcomes if o.verdict is verdict]


@pytest.mark.parametrize("setting", SHORT, ids=str)
async def test_no_generation_is_lost_or_falsified(stage: Stage, setting: Setting) -> None:
    async with world(setting) as made:
        served = await stage.gateway(settings(made.backends(), IDLE_S), policy(setting))
        expected, _ = await performed(made, served.url, warming(), {})
        assert all(
            whole(got) == transcript(number)
            for number, got in expected.items()
            if got.finishes == ["stop"]
        )
        before = running_tasks()
        made.plan(Schedule(seed=7, rate=0.08))
        asked = [Question(trial % QUESTIONS, trial) for trial in range(18)]
        _, outcomes = await performed(made, served.url, asked, expected)
        assert await left_after(made, GONE_S) == 0
        assert not of(Verdict.WRONG, outcomes)
        assert not made.strays
        assert len(of(Verdict.EQUAL, outcomes)) >= EQUAL * len(outcomes)
        assert await tasks_beyond(before) == Counter()
        assert sum(len(proxy.fired) for proxy in made.all_proxies) > 0


def warming() -> list[Question]:
    return [Question(number) for number in range(QUESTIONS)]


async def performed(
    made: World, url: str, asked: list[Question], expected: dict[int, Got]
) -> tuple[dict[int, Got], list[Outcome]]:
    async with plain_session() as session:
        client = Client(session, url, POLICY)
        if not expected:
            return await references(client, range(QUESTIONS), at_once=QUESTIONS), []
        return expected, await generations(client, asked, expected, at_once=len(asked))


async def tasks_beyond(before: Counter[str]) -> Counter[str]:
    """The gateway's tasks that there were not before, once those that just end have ended."""
    end = time.perf_counter() + SETTLE_S
    while (more := running_tasks() - before) and time.perf_counter() < end:
        await asyncio.sleep(0.02)
    return more


class Once:
    """One fault, on the first decode of every replica."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def of_connection(self, replica: str, number: int) -> Fault | None:
        return None

    def of_answer(self, replica: str, number: int, decode: bool) -> Fault | None:
        return self._fault if decode and number == 0 else None


@pytest.mark.parametrize("offset", [0, 60, 130, 700])
async def test_garbage_among_the_chunks_is_an_error_at_once(stage: Stage, offset: int) -> None:
    setting = Setting(replicas=1)
    async with world(setting) as made:
        served = await stage.gateway(settings(made.backends(), idle_s=300), policy(setting))
        made.plan(Once(Fault(Kind.GARBAGE, offset)))
        async with plain_session() as session:
            got = await Client(session, served.url, POLICY).ask(Question(1), limit_s=20)
        assert not got.problem
        assert got.done if RESUMES else got.errors
        assert await left_after(made, GONE_S) == 0


async def test_a_call_sent_again_over_a_fresh_connection_is_no_duplicate(stage: Stage) -> None:
    """SGLang refuses an id that it knows, and it goes on for a while with a call that was cut."""
    setting = Setting("sglang", replicas=1)
    async with world(setting) as made:
        served = await stage.gateway(settings(made.backends()), policy(setting))
        made.plan(Once(Fault(Kind.CUT, 0)))
        async with plain_session() as session:
            got = await Client(session, served.url, POLICY).ask(Question(1))
        assert (got.status, got.errors) == (200, [])
        assert whole(got) == transcript(1)
        assert await left_after(made, GONE_S) == 0


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", LONG, ids=lambda run: str(run.setting))
async def test_a_long_run(run: Run, tmp_path: Path) -> None:
    result = await perform(run, tmp_path, lambda outcome: None)
    print_report(run, result)
    assert result.problems(run) == []
