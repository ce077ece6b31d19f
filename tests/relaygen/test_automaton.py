"""Many strings found in a text that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.automaton import Automaton

patterns = st.lists(st.text("ab", min_size=1, max_size=4), max_size=5)


def test_no_patterns_are_never_found() -> None:
    automaton = Automaton([])
    assert automaton.step(0, "a") == 0
    assert automaton.ends[0] == ()


def test_a_pattern_inside_another_is_found_too_the_longest_first() -> None:
    automaton = Automaton(["he", "she", "e", "she"])
    state = 0
    for char in "ushe":
        state = automaton.step(state, char)
    assert automaton.ends[state] == ("she", "he", "e")


@given(patterns, st.text("ab", max_size=20))
def test_it_finds_what_ends_the_text_at_every_character(found: list[str], text: str) -> None:
    automaton, state = Automaton(found), 0
    for end, char in enumerate(text, 1):
        state = automaton.step(state, char)
        expected = sorted({p for p in found if text[:end].endswith(p)}, key=len, reverse=True)
        assert list(automaton.ends[state]) == expected


@given(patterns, st.text("ab", max_size=20))
def test_the_depth_is_the_longest_end_of_the_text_that_begins_a_pattern(
    found: list[str], text: str
) -> None:
    automaton, state = Automaton(found), 0
    for char in text:
        state = automaton.step(state, char)
    begun = {p[:n] for p in found for n in range(len(p) + 1)} | {""}
    assert automaton.depth[state] == max(len(start) for start in begun if text.endswith(start))


def test_quiet_tells_the_state_after_a_text_or_that_a_pattern_ends_in_it() -> None:
    automaton = Automaton(["Now"])
    assert automaton.quiet[0]["x"] == 0
    half = automaton.quiet[0][" No"]
    assert half > 0
    assert automaton.quiet[half]["w"] == -1
    assert automaton.quiet[half]["t"] == 0
    assert automaton.quiet[0]["Now"] == -1


@given(patterns, st.lists(st.text("abc", max_size=4), max_size=8))
def test_quiet_steps_are_those_of_the_characters(found: list[str], texts: list[str]) -> None:
    automaton, state, quiet = Automaton(found), 0, 0
    for text in texts:
        ended = False
        for char in text:
            state = automaton.step(state, char)
            ended = ended or bool(automaton.ends[state])
        quiet = automaton.quiet[quiet][text]
        assert quiet == (-1 if ended else state)
        if ended:
            return


def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygen.automaton._REMEMBERED", 2)
    steps = Automaton(["Now"]).quiet[0]
    for text in ("a", "b", "c", "x" * 100):
        assert steps[text] == 0
    assert list(steps) == ["c"]
