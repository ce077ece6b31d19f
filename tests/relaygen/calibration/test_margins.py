"""Margins from logprobs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.calibration.margins import margin

logprobs = st.lists(st.floats(max_value=0.0, allow_nan=False), max_size=6)


def test_the_margin_is_what_the_likeliest_has_over_the_next() -> None:
    assert margin([math.log(0.2), math.log(0.7), math.log(0.1)]) == pytest.approx(0.5)


@pytest.mark.parametrize("told", [[], [-0.1], [0.0], [math.nan, -0.1], [9.0, -0.1]])
def test_without_two_alternatives_it_is_unknown(told: list[float]) -> None:
    assert margin(told) is None


def test_an_impossible_alternative_leaves_the_likeliest_its_probability() -> None:
    assert margin([math.log(0.9), -math.inf]) == pytest.approx(0.9)


@given(logprobs)
def test_it_is_a_share_whatever_the_order(told: list[float]) -> None:
    found = margin(told)
    assert found is None or 0.0 <= found <= 1.0
    assert found == margin(told[::-1])
