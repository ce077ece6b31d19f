"""Room for generations: who is let in, who waits, who is told to come back, nobody forgotten."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.admission import Admission
from gateway.context import GATEWAY
from gateway.errors import GatewayError
from gateway.keys import ANYBODY, Key
from gateway.settings import Limits
from tests.gateway.fakes import FakeVllm, Gate, writes
from tests.gateway.support import GONE_S, POLICY, USER, WAIT_S, Stage, ask, leaving, within

PATIENT = 60.0


def room(generations: int, queue: int = 0, seconds: float = PATIENT) -> Admission:
    return Admission(Limits(generations=generations, queue=queue, queue_seconds=seconds))


class Taker:
    """One request: `inside` once it is let in, until `leave`."""

    def __init__(self, admission: Admission, count: int = 1, key: Key = ANYBODY) -> None:
        self.inside = asyncio.Event()
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, count, key))

    async def _run(self, admission: Admission, count: int, key: Key) -> None:
        async with admission.take(count, key):
            self.inside.set()
            await self.done.wait()

    async def leave(self) -> None:
        self.done.set()
        await self.task

    async def gives_up(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def settled() -> AsyncIterator[None]:
    """What can run has run before the block."""
    for _ in range(10):
        await asyncio.sleep(0)
    yield


async def takers(admission: Admission, *counts: int, key: Key = ANYBODY) -> list[Taker]:
    """One after the other, each as far as it gets."""
    made = []
    for count in counts:
        made.append(Taker(admission, count, key))
        async with settled():
            pass
    return made


async def refusal(admission: Admission, count: int = 1, key: Key = ANYBODY) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        async with admission.take(count, key):
            raise AssertionError("let in")
    return caught.value


def inside(made: list[Taker]) -> list[bool]:
    return [taker.inside.is_set() for taker in made]


async def test_without_a_queue_one_too_many_is_refused_at_once() -> None:
    admission = room(2)
    await takers(admission, 1, 1)
    error = await refusal(admission)
    assert (error.status, error.type) == (429, "rate_limit_error")
    assert error.code == "too_many_generations"
    assert "limits.generations allows 2" in error.message
    assert int(error.headers["Retry-After"]) >= 1


async def test_who_waits_is_let_in_in_turn() -> None:
    admission = room(1, queue=3)
    made = await takers(admission, 1, 1, 1, 1)
    assert (admission.taken, admission.waiting) == (1, 3)
    for number, taker in enumerate(made):
        assert inside(made) == [True] * (number + 1) + [False] * (3 - number)
        await taker.leave()
        async with settled():
            pass
    assert (admission.taken, admission.waiting) == (0, 0)


async def test_a_full_queue_refuses() -> None:
    admission = room(1, queue=1)
    await takers(admission, 1, 1)
    error = await refusal(admission)
    assert error.code == "queue_full"
    assert "limits.queue allows 1" in error.message
    assert admission.waiting == 1


async def test_who_waits_too_long_is_refused_and_out_of_the_line() -> None:
    admission = room(1, queue=2, seconds=0.01)
    [first] = await takers(admission, 1)
    error = await refusal(admission)
    assert error.code == "queue_timeout"
    assert "limits.queue_seconds" in error.message
    assert int(error.headers["Retry-After"]) >= 1
    assert admission.waiting == 0
    await first.leave()
    assert admission.taken == 0


async def test_a_request_for_many_is_not_overtaken() -> None:
    admission = room(3, queue=5)
    one, two, three = await takers(admission, 1, 1, 1)
    many, late = await takers(admission, 3, 1)
    for taker in (one, two, three):
        assert not late.inside.is_set()
        await taker.leave()
        async with settled():
            pass
    assert inside([many, late]) == [True, False]
    await many.leave()
    await within(WAIT_S, late.inside.wait())


async def test_a_newcomer_does_not_pass_the_line_even_where_it_would_fit() -> None:
    admission = room(3, queue=5)
    await takers(admission, 2)
    many, small = await takers(admission, 2, 1)
    assert admission.taken == 2
    assert inside([many, small]) == [False, False]


async def test_leaving_the_line_lets_on_those_held_up_behind() -> None:
    admission = room(3, queue=5)
    await takers(admission, 2)
    many, small = await takers(admission, 2, 1)
    await many.gives_up()
    await within(WAIT_S, small.inside.wait())
    assert (admission.taken, admission.waiting) == (3, 0)


async def test_running_out_of_time_lets_on_those_held_up_behind() -> None:
    admission = room(3, queue=5, seconds=0.05)
    [first] = await takers(admission, 2)
    many = Taker(admission, 2)
    async with settled():
        small = Taker(admission, 1)
    await within(WAIT_S, asyncio.wait([many.task]))
    assert many.task.exception() is not None
    # It came after `many`: its own time was not over when that was told.
    await within(WAIT_S, asyncio.wait({small.task, asyncio.create_task(small.inside.wait())},
                                      return_when=asyncio.FIRST_COMPLETED))  # fmt: skip
    assert small.inside.is_set()
    await first.leave()


async def test_leaving_in_the_very_moment_of_being_let_in_passes_the_room_on() -> None:
    admission = room(1, queue=5)
    first, second, third = await takers(admission, 1, 1, 1)
    first.done.set()
    while admission.waiting == 2:
        await asyncio.sleep(0)
    assert not second.inside.is_set()  # it is let in, and has not run yet
    second.task.cancel()
    await within(WAIT_S, third.inside.wait())
    await third.leave()
    assert (admission.taken, admission.waiting) == (0, 0)


async def test_what_can_never_fit_is_refused_though_there_is_a_queue() -> None:
    admission = room(2, queue=5)
    error = await refusal(admission, 3)
    assert (error.status, error.code) == (429, "too_many_generations")
    assert error.headers == {"x-should-retry": "false"}
    assert admission.waiting == 0


async def test_draining_lets_none_in_and_refuses_those_who_wait() -> None:
    admission = room(1, queue=5)
    first, second = await takers(admission, 1, 1)
    draining = asyncio.create_task(admission.drain(WAIT_S))
    await within(WAIT_S, asyncio.wait([second.task]))
    told = second.task.exception()
    assert isinstance(told, GatewayError)
    assert (told.status, told.code) == (503, "shutting_down")
    assert (await refusal(admission)).status == 503
    await first.leave()
    assert await draining == 0
    assert not second.inside.is_set()


async def test_draining_tells_what_still_runs_when_its_time_is_over() -> None:
    admission = room(2)
    await takers(admission, 2)
    assert await admission.drain(0.01) == 2


async def test_nothing_is_lost_in_any_order_of_coming_and_leaving() -> None:
    """Random comings, leavings and cancellations: never too many, at the end nobody."""
    chance = random.Random(7)
    admission = room(4, queue=50, seconds=0.02)
    most = 0

    async def request() -> None:
        nonlocal most
        try:
            async with admission.take(chance.randint(1, 4)):
                most = max(most, admission.taken)
                for _ in range(chance.randint(0, 5)):
                    await asyncio.sleep(0)
        except GatewayError:
            pass

    tasks = []
    for _ in range(500):
        tasks.append(asyncio.create_task(request()))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        if chance.random() < 0.7:
            await asyncio.sleep(0)
    await within(WAIT_S, asyncio.wait(tasks))
    assert most == 4
    assert (admission.taken, admission.waiting) == (0, 0)
    assert await admission.drain(WAIT_S) == 0


# ---- a key's own limit --------------------------------------------------------------------------

ALICE = Key("alice", generations=2)


async def test_a_keys_limit_is_its_own() -> None:
    admission = room(10)
    one, _ = await takers(admission, 1, 1, key=ALICE)
    error = await refusal(admission, 1, ALICE)
    assert (error.status, error.code) == (429, "too_many_generations_for_key")
    assert "'alice'" in error.message
    assert "allows 2" in error.message
    assert int(error.headers["Retry-After"]) >= 1
    [other] = await takers(admission, 5, key=Key("bob"))
    assert other.inside.is_set()
    await one.leave()
    [again] = await takers(admission, 1, key=ALICE)
    assert again.inside.is_set()


async def test_a_key_cannot_fill_the_line() -> None:
    admission = room(1, queue=5)
    await takers(admission, 1)
    await takers(admission, 1, 1, key=ALICE)
    assert admission.waiting == 2
    assert (await refusal(admission, 1, ALICE)).code == "too_many_generations_for_key"


async def test_more_at_once_than_a_key_may_ever_is_not_tried_again() -> None:
    error = await refusal(room(10), 3, ALICE)
    assert error.code == "too_many_generations_for_key"
    assert error.headers == {"x-should-retry": "false"}


async def test_a_refusal_counts_nothing() -> None:
    admission = room(1)
    [one] = await takers(admission, 1)
    await refusal(admission, 1, ALICE)
    await one.leave()
    await takers(admission, 1, key=ALICE)
    assert admission.taken == 1


# ---- when to come back --------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("gateway.admission.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("every", "told"), [(0.01, 1), (3.0, 6), (1000.0, 300)])
async def test_retry_after_is_what_room_took_to_come_free(
    clock: list[float], every: float, told: int
) -> None:
    admission = room(1, queue=1)
    for _ in range(2):
        async with admission.take():
            clock[0] += every
    clock[0] += every
    await takers(admission, 1, 1)  # one is ahead in the line
    error = await refusal(admission)
    # Two came free in two steps: one a step, and two are needed.
    assert int(error.headers["Retry-After"]) == told


# ---- over a socket ------------------------------------------------------------------------------


async def pair(stage: Stage, gate: Gate, **settings: Any) -> tuple[Any, FakeVllm]:
    large = FakeVllm(writes("one", gate, "two"), model="big")
    return await stage.pair(large, FakeVllm(model="tiny"), settings), large


async def waits(served: Any, number: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while served.app[GATEWAY].admission.waiting != number:
            await asyncio.sleep(0)


async def test_a_request_waits_for_room_and_is_served(stage: Stage) -> None:
    gate = Gate()
    served, large = await pair(stage, gate, limits={"generations": 1, "queue": 1})
    async with leaving(served.url, stream=True):
        await within(WAIT_S, gate.reached.wait())
        waiting = asyncio.create_task(ask(served))
        await waits(served, 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(served)
        assert caught.value.code == "queue_full"
        assert len(large.decodes) == 1
        gate.opened.set()
        assert (await waiting)["choices"][0]["message"]["content"] == "onetwo"


async def test_a_client_that_leaves_the_line_frees_its_place(stage: Stage) -> None:
    gate = Gate()
    served, large = await pair(stage, gate, limits={"generations": 1, "queue": 1})
    async with leaving(served.url, stream=True):
        await within(WAIT_S, gate.reached.wait())
        async with leaving(served.url):
            await waits(served, 1)
        await within(GONE_S, waits(served, 0))
    assert len(large.decodes) == 1


async def test_a_keys_limit_holds_over_a_socket(stage: Stage) -> None:
    gate = Gate()
    keys = [{"name": "alice", "key": "any", "generations": 1}, "other"]
    served, _ = await pair(stage, gate, api_keys=keys)
    chunks = await served.client.chat.completions.create(model=POLICY, messages=USER, stream=True)
    await within(WAIT_S, gate.reached.wait())
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(served)
    assert caught.value.code == "too_many_generations_for_key"
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    gate.opened.set()
    assert [chunk async for chunk in chunks]
    assert (await ask(served))["choices"]
