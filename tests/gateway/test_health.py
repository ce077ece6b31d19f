"""The circuit breaker of one replica and its slow start, by a clock that the tests move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.health import Health
from gateway.settings import HealthSettings

COOLDOWN = 5.0
RAMP = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(HealthSettings(failures=3, cooldown=COOLDOWN, slow_start=RAMP), clock)


def broken(health: Health) -> None:
    for _ in range(3):
        health.failed()


def open_s(health: Health, clock: Clock) -> float:
    """Seconds, whole ones, until it lets a request through."""
    for second in range(1000):
        if not health.open:
            return second
        clock.passes(1)
    raise AssertionError("it never ends")


# ---- opens --------------------------------------------------------------------------------------


def test_a_new_replica_gets_its_full_load(health: Health) -> None:
    assert (health.open, health.resting, health.busy, health.share) == (False, False, False, 1.0)


def test_it_opens_after_failures_in_a_row(health: Health) -> None:
    health.failed()
    health.failed()
    assert not health.open
    health.failed()
    assert health.open and health.resting


def test_a_success_between_failures_keeps_it_closed(health: Health) -> None:
    for _ in range(10):
        health.failed()
        health.failed()
        health.succeeded()
    assert not health.open
    assert health.share == 1.0, "it never was away"


def test_failures_of_what_ran_when_it_opened_do_not_make_it_longer(
    health: Health, clock: Clock
) -> None:
    for _ in range(5000):  # a crash breaks all that runs; also more than a float has powers of two
        health.failed()
    assert open_s(health, clock) == COOLDOWN


# ---- half open ----------------------------------------------------------------------------------


def test_one_trial_is_let_through_and_no_second_at_the_same_time(
    health: Health, clock: Clock
) -> None:
    broken(health)
    clock.passes(COOLDOWN)
    assert not health.open
    health.chosen()
    assert health.open and not health.resting
    health.chosen()
    assert open_s(health, clock) == COOLDOWN, "a trial that tells nothing makes room for another"


def test_requests_before_its_time_is_over_are_no_trial(health: Health, clock: Clock) -> None:
    broken(health)
    clock.passes(COOLDOWN - 1)
    health.chosen()
    clock.passes(1)
    assert not health.open


def test_each_failed_trial_doubles_the_time_up_to_a_minute(health: Health, clock: Clock) -> None:
    broken(health)
    times = []
    for _ in range(7):
        times.append(open_s(health, clock))
        health.chosen()
        health.failed()
    assert times == [5, 10, 20, 40, 60, 60, 60]


def test_a_cooldown_above_a_minute_is_kept(clock: Clock) -> None:
    health = Health(HealthSettings(failures=1, cooldown=90), clock)
    for _ in range(2):
        health.failed()
        assert open_s(health, clock) == 90


def test_a_trial_that_fails_after_its_time_counts_too(health: Health, clock: Clock) -> None:
    broken(health)
    clock.passes(COOLDOWN)
    health.chosen()
    clock.passes(10 * COOLDOWN)
    health.failed()
    assert open_s(health, clock) == 2 * COOLDOWN


def test_success_closes_it_and_forgets(health: Health, clock: Clock) -> None:
    broken(health)
    clock.passes(COOLDOWN)
    health.chosen()
    health.failed()
    health.succeeded()
    assert not health.open
    health.failed()
    health.failed()
    assert not health.open
    health.failed()
    assert open_s(health, clock) == COOLDOWN


# ---- slow start ---------------------------------------------------------------------------------


def test_one_that_is_back_gets_its_load_little_by_little(health: Health, clock: Clock) -> None:
    broken(health)
    clock.passes(COOLDOWN)
    health.succeeded()
    shares = []
    for _ in range(6):
        shares.append(health.share)
        clock.passes(RAMP / 5)
    assert shares == pytest.approx([0.1, 0.2, 0.4, 0.6, 0.8, 1.0])
    health.succeeded()
    assert health.share == 1.0, "further successes do not begin it anew"


def test_one_that_was_down_comes_back_slowly(health: Health) -> None:
    broken(health)
    health.came_back()
    assert (health.open, health.share) == (False, 0.1)


def test_slow_start_can_be_switched_off(clock: Clock) -> None:
    health = Health(HealthSettings(slow_start=0), clock)
    health.came_back()
    assert health.share == 1.0


# ---- patience -----------------------------------------------------------------------------------


def test_it_is_busy_as_long_as_it_asked_and_not_broken(health: Health, clock: Clock) -> None:
    for _ in range(10):
        health.asked_for_patience(3)
    assert health.busy and not health.open
    clock.passes(3)
    assert not health.busy


def test_patience_has_an_end(health: Health, clock: Clock) -> None:
    health.asked_for_patience(99_999)
    clock.passes(60)
    assert not health.busy


# ---- whatever happens ---------------------------------------------------------------------------

EVENTS = st.one_of(
    st.sampled_from(["chosen", "failed", "succeeded", "came_back"]).map(lambda name: (name, ())),
    st.tuples(st.just("asked_for_patience"), st.tuples(st.floats(0, 1e5))),
    st.tuples(st.just("pass"), st.tuples(st.floats(0, 100))),
)
SETTINGS = st.builds(
    HealthSettings,
    failures=st.integers(1, 5),
    cooldown=st.floats(1e-3, 50),
    slow_start=st.floats(0, 50),
)


@given(SETTINGS, st.lists(EVENTS, max_size=60))
def test_the_share_is_bounded_and_an_open_breaker_ends(
    settings: HealthSettings, events: list[tuple[str, tuple[float, ...]]]
) -> None:
    clock = Clock()
    health = Health(settings, clock)
    for name, values in events:
        if name == "pass":
            clock.passes(*values)
        else:
            getattr(health, name)(*values)
        assert 0.1 <= health.share <= 1.0
        assert health.open or not health.resting
    clock.passes(60)
    assert not health.open and not health.busy
