"""Values brought from one way to cut a text to another."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.calibrate.alignment import brought_back, ends
from gateway.calibrate.scorers import UNKNOWN, Value

_SURE, _LESS, _WRONG = Value(0.9, True), Value(0.4, True), Value(0.7, False)


def test_a_token_gets_the_least_of_what_ends_inside_it() -> None:
    texts, scorer = ["Hello", " world", "!"], ["He", "llo", " wor", "ld", "!"]
    values = [_SURE, _LESS, _SURE, _WRONG, _SURE]
    assert brought_back(texts, scorer, values) == [_LESS, Value(0.7, False), _SURE]


def test_nothing_is_known_where_no_token_of_the_scorer_ends() -> None:
    assert brought_back(["1", "2", "3"], ["123"], [_SURE]) == [UNKNOWN, UNKNOWN, _SURE]


def test_nothing_is_known_where_one_part_is_unknown() -> None:
    assert brought_back(["ab"], ["a", "b"], [_SURE, UNKNOWN]) == [UNKNOWN]


def test_parts_of_a_character_belong_to_it() -> None:
    texts, scorer = ["a", "", "", "🎉", " b"], ["a", "\ufffd", "\ufffd", "\ufffd", " b"]
    values = [_SURE, _LESS, _WRONG, _SURE, _SURE]
    expected = [_SURE, UNKNOWN, UNKNOWN, Value(0.4, False), _SURE]
    assert brought_back(texts, scorer, values) == expected


def test_a_tokenizer_may_drop_the_leading_blank() -> None:
    assert ends("He said so", ["He", "said", "so"]) == [2, 7, 10]


def test_parts_at_the_end() -> None:
    assert ends("a🎉", ["a", "\ufffd", "\ufffd"]) == [1, 2, 2]


@given(st.lists(st.text(min_size=1, max_size=4), max_size=12), st.data())
def test_any_cut_of_a_text_ends_where_it_ends(texts: list[str], data: st.DataObject) -> None:
    text = "".join(texts).replace("\ufffd", "x")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    bounds = [0, *[cut for cut in cuts if cut < len(text)], len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    pieces = [piece for piece in pieces if piece]
    assert ends(text, pieces) == bounds[1 : len(pieces) + 1]
