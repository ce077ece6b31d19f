"""A replica's breaker: what opens it, what leaves it as it is, what closes it."""

from __future__ import annotations

from gateway.health import Health
from gateway.settings import HealthSettings
from tests.gateway.fakes import Error, FakeVllm
from tests.gateway.support import Stage, stream, until_ready
from tests.gateway.test_resuming import after


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def health(clock: Clock) -> Health:
    return Health(HealthSettings(failures=2, cooldown=5.0, slow_start=0), clock)


def test_so_many_failures_in_a_row_open_it() -> None:
    found = health(Clock())
    assert found.failed() is None
    found.succeeded()
    assert [found.failed(), found.failed()] == [None, 5.0]
    assert found.open


def test_what_still_ran_there_does_not_keep_it_open_longer() -> None:
    clock = Clock()
    found = health(clock)
    assert [found.failed() for _ in range(9)] == [None, 5.0, *[None] * 7]
    clock.now = 5.0
    assert not found.open


def test_a_trial_that_fails_opens_it_for_twice_as_long() -> None:
    clock = Clock()
    found = health(clock)
    assert [found.failed(), found.failed()] == [None, 5.0]
    clock.now = 5.0
    found.chosen()
    assert found.failed() == 10.0
    clock.now = 14.9
    assert found.open


def test_a_trial_that_succeeds_closes_it() -> None:
    clock = Clock()
    found = health(clock)
    assert [found.failed(), found.failed()] == [None, 5.0]
    clock.now = 5.0
    found.chosen()
    assert found.succeeded()
    assert not found.open
    assert not found.succeeded()


async def test_what_is_passed_through_counts_as_a_success_too(stage: Stage) -> None:
    """Failures that are not in a row open nothing."""
    large = FakeVllm(after(2, Error()), model="big")
    large.chats = True
    settings = {"health": {"failures": 2}, "resume": {"seconds": 0}}
    served = await stage.pair(large, FakeVllm(model="tiny"), settings)
    await until_ready(served, 200)
    broken, sound = large.script, after(99, None)
    for script, model in ((broken, "pair"), (sound, "big"), (broken, "pair")):
        large.script = script
        try:
            await stream(served, model=model)
        except Exception as error:  # noqa: BLE001 - what breaks is told elsewhere
            assert script is broken, error
    states = [r["state"] for r in (await until_ready(served, 200))["backends"]["large"]]
    assert states == ["up"]
