"""Many strings found in a text that arrives in pieces."""

from __future__ import annotations

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
