"""The client's stop strings, over the whole generation."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.stops import StopMatcher


def read(
    stops: Iterable[str], tokens: Iterable[str], *, include: bool = False
) -> tuple[str, str | None]:
    """What is passed on, and the stop string that was found."""
    matcher = StopMatcher(stops, include=include)
    text = "".join([matcher.push(token) for token in tokens] + [matcher.flush()])
    return text, matcher.matched


@pytest.mark.parametrize(
    ("stops", "text", "passed", "stop"),
    [
        (["END"], "abENDcd", "ab", "END"),
        (["END"], "abEN", "abEN", None),
        (["END"], "ENEND", "EN", "END"),
        (["bc", "abc"], "xabcd", "x", "abc"),
        (["b", "abc"], "xabc", "xa", "b"),
        (["", "x"], "abx", "ab", "x"),
        ([], "ab", "ab", None),
        (["END"], "", "", None),
    ],
)
def test_text_passes_up_to_the_stop_string(
    stops: list[str], text: str, passed: str, stop: str | None
) -> None:
    assert read(stops, [text]) == (passed, stop)
    assert read(stops, text) == (passed, stop)


def test_the_stop_string_passes_where_it_is_asked_for() -> None:
    assert read(["END"], ["abE", "NDcd"], include=True) == ("abEND", "END")


def test_text_after_the_stop_string_is_swallowed() -> None:
    assert read(["END"], ["abEND", "cd"]) == ("ab", "END")


def test_what_was_let_go_is_not_matched_again() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ""
    assert matcher.flush() == "EN"
    assert matcher.push("D") == "D"


stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
streams = st.lists(st.text("abc", max_size=4), max_size=8)


@given(stop_lists, streams, st.booleans())
def test_every_cut_of_the_text_stops_where_a_search_finds_it(
    stops: list[str], tokens: list[str], include: bool
) -> None:
    text = "".join(tokens)
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if found:
        end, _, stop = min(found)
        assert read(stops, tokens, include=include) == (
            text[: end if include else end - len(stop)],
            stop,
        )
    else:
        assert read(stops, tokens, include=include) == (text, None)


@given(stop_lists, streams)
def test_no_more_is_held_back_than_may_become_a_stop_string(
    stops: list[str], tokens: list[str]
) -> None:
    matcher, passed, pushed = StopMatcher(stops), "", ""
    for token in tokens:
        passed += matcher.push(token)
        pushed += token
        if matcher.matched:
            return
        starts = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        held = max((start for start in starts if pushed.endswith(start)), key=len)
        assert passed + held == pushed
