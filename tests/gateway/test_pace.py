"""How fast each model decodes, and what follows from it: pure, and over made-up streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway import pace as module
from gateway.errors import UpstreamError
from gateway.pace import Pace, Timed
from relaygen.events import DecodeChunk, DecodeFinished, Event, Piece, Role
from relaygen.policy import Policy
from tests.gateway.test_health import Clock

LARGE, SMALL = Role.LARGE, Role.SMALL
LARGE_S = 0.01
"""A token of the large model."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    pace = Pace(clock=clock)
    pace.add(LARGE, 256, 256 * LARGE_S)
    return pace


def small(pace: Pace, ratio: float, tokens: int = 256) -> None:
    """Tokens of the small model, at so many times the large one's seconds."""
    pace.add(SMALL, tokens, tokens * LARGE_S * ratio)


# ---- held ---------------------------------------------------------------------------------------


def test_nothing_is_known_at_first() -> None:
    pace = Pace()
    assert (pace.slower, pace.holds()) == (False, False)
    assert pace.token_seconds(LARGE) is None


def test_speeds_are_told(pace: Pace) -> None:
    assert pace.token_seconds(LARGE) == pytest.approx(LARGE_S)


def test_a_slower_small_model_is_held(pace: Pace) -> None:
    small(pace, 1.3)
    assert pace.slower and pace.holds()


@pytest.mark.parametrize(("larges", "smalls"), [(255, 256), (256, 255), (0, 5000), (5000, 0)])
def test_it_takes_enough_tokens_of_both(clock: Clock, larges: int, smalls: int) -> None:
    pace = Pace(clock=clock)
    pace.add(LARGE, larges, larges * LARGE_S)
    small(pace, 5, smalls)
    assert not pace.slower


@pytest.mark.parametrize(("ratio", "slower"), [(0.2, False), (1.19, False), (1.21, True)])
def test_it_is_held_above_a_fifth_more(pace: Pace, ratio: float, slower: bool) -> None:
    small(pace, ratio)
    assert pace.slower is slower


def test_noise_of_fast_models_holds_nothing(clock: Clock) -> None:
    pace = Pace(clock=clock)
    pace.add(LARGE, 1000, 1000 * 0.0001)
    pace.add(SMALL, 1000, 1000 * 0.0019)
    assert not pace.slower
    pace.add(SMALL, 9000, 9000 * 0.0021)
    assert pace.slower


def test_what_is_long_past_counts_little(pace: Pace) -> None:
    small(pace, 0.5, 256)
    for _ in range(200):
        small(pace, 1.3, 100)
    assert pace.slower


# ---- trials -------------------------------------------------------------------------------------


def test_every_half_minute_exactly_one_generation_tries_it(pace: Pace, clock: Clock) -> None:
    small(pace, 2)
    for _ in range(3):
        clock.passes(29)
        assert [pace.holds() for _ in range(4)] == [True] * 4
        clock.passes(1)
        assert [pace.holds() for _ in range(4)] == [False, True, True, True]


def test_a_trial_that_is_fast_enough_frees_it(pace: Pace, clock: Clock) -> None:
    small(pace, 2)
    small(pace, 0.94, 63)
    assert pace.slower, "too few tokens"
    small(pace, 0.94, 1)
    assert not pace.slower and not pace.holds()


def test_between_both_limits_it_stays_as_it_is(pace: Pace) -> None:
    small(pace, 2)
    small(pace, 1.0, 500)
    assert pace.slower
    other = Pace()
    other.add(LARGE, 256, 256 * LARGE_S)
    small(other, 1.0, 500)
    assert not other.slower


def test_a_trial_that_is_slow_waits_for_the_next(pace: Pace, clock: Clock) -> None:
    small(pace, 2)
    clock.passes(30)
    assert not pace.holds()
    clock.passes(20)
    small(pace, 2, 64)
    clock.passes(20)
    assert pace.holds(), "counted from what the trial showed"
    clock.passes(10)
    assert not pace.holds()


def test_one_that_was_slow_is_free_where_no_speed_is_measured(pace: Pace) -> None:
    small(pace, 2)
    for _ in range(100):
        pace.add(LARGE, 1000, 1000 * 0.0001)
    pace.add(SMALL, 100, 100 * 0.001)
    assert not pace.slower


@example([(LARGE, 256, 0.0, 0.0), (SMALL, 256, 1.0, 0.0)])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(Role), st.integers(0, 10_000), st.floats(0, 1e6), st.floats(0, 60)
        )
    )
)
def test_whatever_is_measured(added: list[tuple[Role, int, float, float]]) -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    for role, tokens, seconds, passed in added:
        pace.add(role, tokens, seconds)
        clock.passes(passed)
        held = pace.holds()
        assert pace.slower or not held
        assert not (pace.slower and not held) or pace.holds(), "one trial at a time"


# ---- the events of one decode -------------------------------------------------------------------

URL = "http://127.0.0.1:1/v1"


class Time:
    """Stands for the module `time`; made-up streams move it."""

    def __init__(self) -> None:
        self.now = 50.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    return time


def timed(first_token_s: float = 60, other: bool = True, **slow: Any) -> Timed:
    policy = Policy.model_validate(
        {
            "version": 1,
            "name": "pair",
            "large": {"backend": "large", "model": "big"},
            "small": {"backend": "small", "model": "tiny"},
            "cues": {"words": ["Now"]},
            "slow": {"large": slow},
        }
    )
    return Timed(LARGE, policy, first_token_s, lambda role: other)


def chunk(tokens: int) -> DecodeChunk:
    return DecodeChunk(tuple(Piece("x", (1,)) for _ in range(tokens)))


async def decode(time: Time, *reads: tuple[float, int]) -> AsyncGenerator[Event]:
    """Each read after so many seconds, with so many tokens."""
    for seconds, tokens in reads:
        time.now += seconds
        yield chunk(tokens)
    yield DecodeFinished("stop", None)


async def events_of(timed: Timed, decode: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    """As a generation reads a decode."""
    async with aclosing(decode):
        yield await timed.first(decode, URL)
        timed.taken()
        async for event in decode:
            timed.came(event)
            yield event
            timed.taken()


async def read(
    timed: Timed, events: AsyncGenerator[Event], between: Callable[[], None] = lambda: None
) -> Sequence[Event]:
    found = []
    async for event in events_of(timed, events):
        found.append(event)
        between()
    return found


async def test_tokens_after_the_first_read_are_measured(time: Time) -> None:
    watch = timed()
    events = await read(watch, decode(time, (7, 3), (0.5, 2), (0.25, 1)))
    assert [type(event) for event in events] == [DecodeChunk] * 3 + [DecodeFinished]
    assert watch.measured == (3, 0.75)


async def test_began_tells_whether_anything_came(time: Time) -> None:
    watch = timed()
    events = events_of(watch, decode(time, (1, 1)))
    assert not watch.began
    await anext(events)
    assert watch.began
    await events.aclose()


async def test_what_a_slow_reader_takes_is_not_the_engines(time: Time) -> None:
    watch = timed(tokens_per_second=10)

    def slowly() -> None:
        time.now += 5

    events = await read(watch, decode(time, *[(0.01, 1)] * 20), slowly)
    assert len(events) == 21
    assert watch.measured == (0, 0)


async def test_leaving_closes_the_decode(time: Time) -> None:
    closed = []

    async def endless() -> AsyncGenerator[Event]:
        try:
            while True:
                yield chunk(1)
        finally:
            closed.append(True)

    events = events_of(timed(), endless())
    await anext(events)
    await events.aclose()
    assert closed == [True]


async def silent() -> AsyncGenerator[Event]:
    await asyncio.Event().wait()
    yield chunk(1)


async def test_a_slow_first_token_is_left_where_there_is_another_engine() -> None:
    watch = timed(first_token=0.01)
    with pytest.raises(UpstreamError, match=r"within 0\.01 s .*slow\.large\.first_token") as caught:
        await read(watch, silent())
    assert (caught.value.cause, caught.value.status, watch.began) == ("slow", 504, False)


async def test_without_another_engine_the_settings_limit_holds() -> None:
    watch = timed(0.02, other=False, first_token=0.01)
    with pytest.raises(UpstreamError, match=r"within 0\.02 s \(timeouts\.first_token\)") as caught:
        await read(watch, silent())
    assert caught.value.cause == "timeout"


async def test_a_policys_limit_above_the_settings_one_means_nothing() -> None:
    with pytest.raises(UpstreamError, match=r"timeouts\.first_token"):
        await read(timed(0.01, first_token=9), silent())


async def test_a_rate_below_the_policys_is_left_where_there_is_another_engine(time: Time) -> None:
    watch = timed(tokens_per_second=20)
    with pytest.raises(UpstreamError, match=r"10 tokens/s.*slow\.large.*\(20\)") as caught:
        await read(watch, decode(time, *[(0.1, 1)] * 50))
    assert caught.value.cause == "slow"
    assert watch.measured[1] == pytest.approx(0.5)


async def test_a_rate_is_judged_by_half_a_second_at_least(time: Time) -> None:
    watch = timed(tokens_per_second=20)
    assert len(await read(watch, decode(time, (9, 1), (0.4, 1)))) == 3


async def test_a_rate_that_is_kept_up_is_left_alone(time: Time) -> None:
    assert len(await read(timed(tokens_per_second=20), decode(time, *[(0.04, 1)] * 50))) == 51


async def test_without_another_engine_a_slow_one_is_told_once_and_kept(time: Time) -> None:
    watch = timed(other=False, tokens_per_second=20)
    with capture_logs() as logs:
        assert len(await read(watch, decode(time, *[(0.1, 1)] * 50))) == 51
    assert [line["event"] for line in logs] == ["slow engine, and no other"]
