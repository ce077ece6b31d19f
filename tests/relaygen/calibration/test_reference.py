"""The reference implementation's statistics, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from relaygen.calibration.reference import Pool, ReferenceStatistics
from relaygen.policy import Thinking
from tests.relaygen.calibration.support import make_scored


def statistics(
    texts: Sequence[str], margins: Sequence[float | None], *cues: str
) -> ReferenceStatistics:
    found = ReferenceStatistics(cues, Thinking())
    found.add(make_scored(texts, margins))
    return found


def test_the_tokens_from_a_cue_to_the_next_end_are_pooled() -> None:
    found = statistics(["Now", " a", " b", ".", " c"], [0.1, 0.4, 0.6, 0.8, 0.0], "Now")
    pool = found.pools["Now"]
    assert (pool.segments, pool.traces, pool.tokens) == (1, 1, 3)
    assert pool.mean == pytest.approx(0.6)
    assert found.overall.mean == pytest.approx(0.38)


def test_a_cue_counts_inside_a_word() -> None:
    found = statistics(["I", " know", " it", "."], [0.0, 0.0, 0.5, 0.7], "now")
    assert found.pools["now"].mean == pytest.approx(0.6)


@pytest.mark.parametrize("end", [".", "!", "?", "\n"])
def test_each_mark_and_each_line_ends_a_segment(end: str) -> None:
    found = statistics(["Now", " a", end, " b"], [0.0, 0.2, 0.4, 0.9], "Now")
    assert found.pools["Now"].mean == pytest.approx(0.3)


def test_a_decimal_point_ends_it_too() -> None:
    assert statistics(["Now", " 3", ".", "14"], [0, 0.2, 0.4, 0.9], "Now").pools["Now"].tokens == 2


def test_without_an_end_the_segment_is_all_that_is_left_of_the_thinking() -> None:
    found = statistics(["Now", " a", " b", "</think>", " c"], [0, 0.2, 0.4, 1, 1], "Now")
    assert found.pools["Now"].tokens == 2
    assert found.overall.tokens == 3


def test_a_token_that_holds_the_cues_end_is_not_in_the_segment() -> None:
    assert statistics(["Now a", " b", "."], [1.0, 0.2, 0.4], "Now").pools["Now"].tokens == 2


def test_unknown_margins_are_left_out() -> None:
    found = statistics(["Now", " a", "."], [None, None, 0.4], "Now")
    assert (found.pools["Now"].tokens, found.overall.tokens) == (1, 1)


def test_tokens_of_all_traces_are_one_pool_taken_for_independent() -> None:
    found = ReferenceStatistics(("Now", "So"), Thinking())
    for margins in ([0.0, 0.2, 0.4], [0.0, 0.6, 0.8]):
        found.add(make_scored(["Now", " a", "."], margins))
    pool = found.pools["Now"]
    assert (pool.segments, pool.traces, pool.tokens, found.traces) == (2, 2, 4, 2)
    assert pool.spread == pytest.approx(math.sqrt(0.2 / 3))
    assert pool.error == pytest.approx(math.sqrt(0.2 / 3) / 2)
    assert "So" not in found.pools


def test_two_occurrences_are_two_segments() -> None:
    found = statistics([" now", " now", " a", "."], [0.0, 0.2, 0.4, 0.6], "now")
    assert (found.pools["now"].segments, found.pools["now"].traces) == (2, 1)
    assert found.pools["now"].mean == pytest.approx((0.2 + 0.4 + 0.6 + 0.4 + 0.6) / 5)


def test_cues_above_the_mean_of_all_tokens_are_chosen_the_best_first() -> None:
    texts = ["So", " a", ".", " Now", " b", ".", " But", " c", "."]
    margins = [0.5, 0.8, 0.8, 0.5, 0.9, 0.9, 0.5, 0.1, 0.1]
    assert statistics(texts, margins, "So", "Now", "But").chosen == ("Now", "So")


def test_few_tokens_have_no_spread() -> None:
    assert math.isnan(Pool().mean)
    assert math.isnan(Pool().error)
    assert math.isnan(Pool(tokens=1, total=0.5, squares=0.25).spread)
