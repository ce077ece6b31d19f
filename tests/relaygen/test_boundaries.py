"""Where a small segment ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.boundaries import BoundaryMatch, BoundaryMatcher, BoundarySet

ENDS = (".", "!", "?", "\n\n")


def sentence(
    tokens: Iterable[str],
    ends: Sequence[str] = ENDS,
    match: BoundaryMatch = BoundaryMatch.SENTENCE,
    before: str = "",
) -> str | None:
    """The text that the segment keeps; None while no boundary ends it."""
    matcher, text = BoundaryMatcher(BoundarySet(ends, match), before), ""
    for token in tokens:
        if cut := matcher.push(token):
            return text + token[: cut.keep]
        text += token
    return None


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([" it", " is", "."], " it is."),
        ([" is", "!", " Thus"], " is!"),
        ([" is", "?!", " No"], " is?!"),
        ([" is", "...", " No"], " is..."),
        ([" is", '."', " No"], ' is."'),
        ([" is", ".)", " No"], " is.)"),
        ([" is", ".**", " No"], " is.**"),
        ([" ok. Thus"], " ok. Thus"),
        ([" a", "\n\n"], " a\n\n"),
        ([" a", "\n", "\n", "b"], " a\n\n"),
        ([" a", "\n\n\n"], " a\n\n\n"),
        ([" is", " 446", '."', " Thus"], ' is 446."'),
        ([" is", " 446", ".", ")", " Thus"], " is 446.)"),
        ([" is", " 446", ".", ".", " Thus"], " is 446.."),
        ([" 446. Thus"], " 446. Thus"),
        ([" is 3!", " No"], " is 3!"),
    ],
)
def test_a_sentence_end_ends_the_segment_after_its_token(tokens: list[str], kept: str) -> None:
    assert sentence(tokens) == kept


@pytest.mark.parametrize(
    "tokens",
    [
        ["3", ".", "14"],
        ["3.14"],
        ["3", ".14"],
        [" 3.", "14"],
        ["1", ".", "2", ".", "3"],
        ["v", "1.2.3", " is"],
        ["1", ".", ",", " ", "2", ".", ","],
        ["example.com"],
        ["a!=b"],
        ["a", "\n", "b", "\n"],
        [" is", " 446", "."],
        [""],
    ],
)
def test_a_mark_inside_a_number_or_word_ends_nothing(tokens: list[str]) -> None:
    assert sentence(tokens) is None


@pytest.mark.parametrize("following", [" Thus", "\n", "\n\n", "\tx"])
def test_a_blank_after_a_numbers_dot_ends_the_sentence_before_it(following: str) -> None:
    assert sentence([" is", " 446", ".", following]) == " is 446."


def test_a_numbers_dot_waits_through_a_token_without_text() -> None:
    assert sentence([" 446", ".", "", " Thus"]) == " 446."


def test_a_version_ends_its_sentence_at_the_last_dot() -> None:
    assert sentence([" 1", ".", "2", ".", "3", ".", " It"]) == " 1.2.3."


@pytest.mark.parametrize("marker", ["\n1", "\n  2", "\n\t10"])
def test_the_number_of_a_list_item_is_no_sentence(marker: str) -> None:
    assert sentence([*marker, ".", " First"]) is None


def test_the_line_of_a_list_item_may_have_begun_before_the_segment() -> None:
    assert sentence(["1", ".", " First"], before="Now\n") is None
    assert sentence(["1", ".", " First"], before="Now ") == "1."


def test_a_new_segment_forgets_the_waiting_dot() -> None:
    matcher = BoundaryMatcher(BoundarySet(ENDS))
    assert matcher.push("446") is None
    assert matcher.push(".") is None
    matcher.reset("446.")
    assert matcher.push(" Thus") is None


def test_a_new_segment_forgets_half_a_blank_line() -> None:
    matcher = BoundaryMatcher(BoundarySet(ENDS))
    matcher.push("\n")
    matcher.reset()
    assert matcher.push("\n") is None


def test_what_ended_the_segment_is_named() -> None:
    cut = BoundaryMatcher(BoundarySet(ENDS)).push(" ok?!")
    assert cut is not None
    assert cut.text == "?"


def test_other_ends_count_wherever_they_are() -> None:
    assert sentence(["好", "。他"], ends=["。"]) == "好。他"


def test_substring_cuts_after_the_end_anywhere() -> None:
    assert sentence(["is 3", ".14"], match=BoundaryMatch.SUBSTRING) == "is 3."


# ---- against naive searches ---------------------------------------------------------------------

streams = st.lists(
    st.sampled_from(["\n", "\n\n", "a", "\n\n\n", " b\n", "", "3", ".", " "]), max_size=12
)


@given(streams, st.sampled_from(list(BoundaryMatch)))
def test_a_blank_line_is_found_at_every_cut_of_the_text(
    tokens: list[str], match: BoundaryMatch
) -> None:
    text = "".join(tokens)
    end = text.find("\n\n") + 2 if "\n\n" in text else None
    for cut_text in (tokens, list(text), [text]):
        kept = sentence(cut_text, ["\n\n"], match)
        if end is None:
            assert kept is None
        else:
            assert kept is not None
            assert len(kept) >= end
            assert match is not BoundaryMatch.SUBSTRING or len(kept) == end


@given(streams)
def test_substring_ends_are_found_at_the_same_place_at_every_cut(tokens: list[str]) -> None:
    text = "".join(tokens)
    places = [text.find(end) + len(end) for end in ENDS if end in text]
    expected = text[: min(places)] if places else None
    for cut_text in (tokens, list(text), [text]):
        assert sentence(cut_text, match=BoundaryMatch.SUBSTRING) == expected


@given(st.lists(st.text("0123456789", min_size=1, max_size=3), min_size=1), st.data())
def test_no_cut_of_a_dotted_number_ends_a_sentence(groups: list[str], data: st.DataObject) -> None:
    number = ".".join(groups)
    assert sentence(cut_anywhere(data, number)) is None


@given(st.sampled_from([" It is so. ", " Is it so? ", " So! ", " It is 3.14! "]), st.data())
def test_every_cut_of_a_sentence_ends_at_its_mark(text: str, data: st.DataObject) -> None:
    kept = sentence([*cut_anywhere(data, text), "Thus"])
    assert kept is not None
    assert text.rstrip() == kept.rstrip()


def cut_anywhere(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]
