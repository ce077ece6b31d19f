"""Means with their uncertainty, against numbers worked out by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.calibration.statistics import Comparison, Tally, compare, holm


def tally(*segments: tuple[int, float, float]) -> Tally:
    """Of cluster, value and weight."""
    made = Tally()
    for cluster, value, weight in segments:
        made.add(cluster, value, weight)
    return made


def compared(cue: Tally, overall: Tally, draws: int = 1000, seed: int = 0) -> Comparison:
    return compare({"cue": cue}, overall, draws=draws, seed=seed)["cue"]


def test_a_mean_is_a_ratio_of_sums() -> None:
    made = tally((0, 3.0, 4.0), (1, 1.0, 1.0))
    assert (made.count, made.weight, made.mean) == (2, 5.0, 0.8)


def test_the_spread_is_between_segments_by_their_weight() -> None:
    # Means 0.75 and 1.0 by weights 4 and 1: 0.8 +- sqrt((4 * 0.05^2 + 0.2^2) / 5) = 0.1
    assert tally((0, 3.0, 4.0), (1, 1.0, 1.0)).spread == pytest.approx(0.1)


def test_nothing_has_no_mean() -> None:
    assert math.isnan(Tally().mean)
    assert math.isnan(Tally().spread)


# ---- the bootstrap ------------------------------------------------------------------------------

CUE = tally((0, 1.0, 1.0), (1, 1.0, 2.0), (2, 3.0, 3.0))
OVERALL = tally((0, 2.0, 4.0), (1, 2.0, 4.0), (2, 3.0, 4.0))


def test_the_mean_and_the_difference_are_of_the_whole_data() -> None:
    found = compared(CUE, OVERALL)
    assert found.mean == pytest.approx(5 / 6)
    assert found.difference == pytest.approx(5 / 6 - 7 / 12)


def test_the_error_is_that_of_all_draws_of_three_clusters() -> None:
    values, weights = (1.0, 1.0, 3.0), (1.0, 2.0, 3.0)
    means = [
        sum(values[i] for i in drawn) / sum(weights[i] for i in drawn)
        for drawn in product(range(3), repeat=3)
    ]
    centre = sum(means) / 27
    exact = math.sqrt(sum((mean - centre) ** 2 for mean in means) / 27)
    assert compared(CUE, OVERALL, draws=20_000).error == pytest.approx(exact, rel=0.02)


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert compared(CUE, OVERALL, seed=3) == compared(CUE, OVERALL, seed=3)
    assert compared(CUE, OVERALL, seed=3) != compared(CUE, OVERALL, seed=4)


def test_a_cue_is_drawn_alike_whatever_it_is_compared_beside() -> None:
    both = compare({"cue": CUE, "other": OVERALL}, OVERALL)
    assert both["cue"] == compared(CUE, OVERALL)
    assert both["other"].difference == 0
    assert both["other"].p == 1.0


def test_what_is_not_in_a_draw_has_no_mean_there() -> None:
    found = compared(tally((0, 1.0, 1.0)), OVERALL)
    assert (found.mean, found.error) == (1.0, 0.0)
    assert found.low < found.difference < found.high


def test_one_cluster_tells_nothing_of_the_uncertainty() -> None:
    found = compared(tally((5, 1.0, 1.0)), tally((5, 1.0, 2.0)))
    assert (found.difference, found.p) == (0.5, 1.0)
    assert math.isnan(found.low)


def test_nothing_at_all_is_compared_with_nothing() -> None:
    assert compare({}, Tally()) == {}


def test_the_p_value_is_the_normal_tail() -> None:
    rng = random.Random(5)
    overall, cue = Tally(), Tally()
    for cluster in range(60):
        for _ in range(10):
            overall.add(cluster, rng.random(), 1.0)
        cue.add(cluster, 0.1 + rng.random(), 1.0)
    found = compared(cue, overall)
    error = (found.high - found.low) / 2 / 1.96
    z = found.difference / error
    assert found.p == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), rel=0.5)


def test_many_tests_leave_room_for_a_clear_case() -> None:
    """A p-value counted from 1,000 draws would end at 1/1001, and Holm's factor do the rest."""
    rng = random.Random(7)
    overall, easy = Tally(), Tally()
    for cluster in range(40):
        for _ in range(20):
            overall.add(cluster, rng.uniform(0.5, 0.9), 1.0)
        easy.add(cluster, rng.uniform(0.9, 1.0), 1.0)
    corrected = holm({"easy": compared(easy, overall).p, **{str(i): 0.5 for i in range(500)}})
    assert corrected["easy"] < 1e-6


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(100):
        overall, cue = Tally(), Tally()
        for cluster in range(30):
            shift = rng.gauss(0, 0.1)  # tokens of one trace are alike
            for _ in range(5):
                overall.add(cluster, 0.5 + shift + rng.gauss(0, 0.1), 1.0)
                cue.add(cluster, 0.6 + shift + rng.gauss(0, 0.1), 1.0)
        found = compared(cue, overall, draws=200)
        covered += found.low <= 0.1 <= found.high
    assert covered >= 88


def test_tokens_of_one_trace_are_not_taken_for_independent() -> None:
    alike = tally(*[(c, float(c % 2), 1.0) for c in range(20) for _ in range(50)])
    single = tally(*[(c, float(c % 2), 1.0) for c in range(20)])
    assert compared(alike, alike).error == pytest.approx(compared(single, single).error)


# ---- Holm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, {}),
        ({"a": 0.03}, {"a": 0.03}),
        ({"a": 0.01, "b": 0.04, "c": 0.03}, {"a": 0.03, "b": 0.06, "c": 0.06}),
        ({"a": 0.5, "b": 0.001}, {"a": 0.5, "b": 0.002}),
        ({"a": 0.9, "b": 0.8}, {"a": 1.0, "b": 1.0}),
    ],
)
def test_holm_by_hand(told: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert holm(told) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_makes_surer_and_keeps_the_order(told: Sequence[float]) -> None:
    p_values = dict(enumerate(told))
    corrected = holm({str(i): p for i, p in p_values.items()})
    ordered = sorted(p_values, key=lambda i: p_values[i])
    assert all(1 >= corrected[str(i)] >= p for i, p in p_values.items())
    assert [corrected[str(i)] for i in ordered] == sorted(corrected.values())
