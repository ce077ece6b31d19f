"""No generation is lost, and none is falsified, while the engines' connections break.

The short form is in the default suite; `make chaos` runs the long one, with the gateway in a
process of its own. What struck depends on the seed alone, as far as the order of arrival does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.chaos.clients import Client, Outcome, generations, plain_session, references
from tests.chaos.growth import connections_in_use, running_tasks
from tests.chaos.outcomes import Got, Verdict, judge
from tests.chaos.report import print_report
from tests.chaos.run import GONE_S, Run, left_after, perform
from tests.chaos.schedule import Fault, Kind, Schedule
from tests.chaos.transcripts import Question, transcript
from tests.chaos.world import POLICY, RESUMES, Setting, World, policy, settings, world
from tests.gateway.support import Stage

T = TypeVar("T")
EQUAL = 0.99 if RESUMES else 0.0
QUESTIONS = 10
IDLE_S = 1.0
SETTLE_S = 5.0
STEP = 307
"""Bytes, and a prime: chunks of every phase are met."""
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
        assert await settled(lambda: running_tasks() - before) == Counter()
        assert await settled(lambda: connections_in_use(served.app)) == 0
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


async def settled(left: Callable[[], T]) -> T:
    """What is left once all that was just ending has ended."""
    end = time.perf_counter() + SETTLE_S
    while (found := left()) and time.perf_counter() < end:
        await asyncio.sleep(0.02)
    return found


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


# ---- one cut, everywhere ------------------------------------------------------------------------


class Aimed:
    """One fault: at a decode of the one generation that runs, by its number on any replica."""

    def __init__(self) -> None:
        self._left = -1
        self._fault: Fault | None = None

    def aim(self, number: int, fault: Fault | None) -> None:
        self._left, self._fault = number, fault

    def of_connection(self, replica: str, number: int) -> Fault | None:
        return None

    def of_answer(self, replica: str, number: int, decode: bool) -> Fault | None:
        self._left -= decode
        return self._fault if decode and self._left == -1 else None


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", SHORT, ids=str)
async def test_a_cut_at_any_byte_of_any_decode(stage: Stage, setting: Setting) -> None:
    async with world(setting) as made, plain_session() as session:
        served = await stage.gateway(settings(made.backends()), policy(setting))
        client = Client(session, served.url, POLICY)
        expected = await client.ask(Question(1))
        made.hurry()
        aimed = Aimed()
        made.plan(aimed)
        for number in range(int(expected.usage["relaygen"]["segments"])):
            offset = 0
            while await cut(client, aimed, made, expected, number, offset):
                offset += STEP
            assert offset > 0


async def cut(
    client: Client, aimed: Aimed, made: World, expected: Got, number: int, offset: int
) -> bool:
    """Whether the decode was long enough to be cut there."""
    before = sum(len(proxy.fired) for proxy in made.all_proxies)
    aimed.aim(number, Fault(Kind.RESET if offset % 2 else Kind.CUT, offset))
    got = await client.ask(Question(1, trial=offset))
    verdict, why = judge(got, expected)
    assert verdict is not Verdict.WRONG, f"decode {number} cut at byte {offset}: {why}"
    assert verdict is Verdict.EQUAL or not RESUMES, got.errors
    assert not made.strays
    return sum(len(proxy.fired) for proxy in made.all_proxies) > before


# ---- the long form ------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", LONG, ids=lambda run: str(run.setting))
async def test_a_long_run(run: Run, tmp_path: Path) -> None:
    result = await perform(run, tmp_path, lambda outcome: None)
    print_report(run, result)
    assert result.problems(run) == []
