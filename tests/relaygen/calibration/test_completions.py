"""In which tokens strings end."""

from __future__ import annotations

import pytest
from hypothesis import given

from relaygen.calibration import completions
from relaygen.calibration.completions import Completions
from tests.relaygen.calibration.support import TOKENS, cue_lists, tokens


def test_a_token_that_completes_a_string_tells_how_far_back_it_begins() -> None:
    found = Completions([["Therefore"], ["for"]]).find(["There", "for", "e"], 0, 3)
    assert list(found) == [(1, 5, (1,)), (2, 8, (0,))]


def test_all_groups_with_a_string_that_ends_in_the_token_are_told() -> None:
    found = Completions([["Now"], ["ow"], ["Now", "x"]]).find([" Now x"], 0, 1)
    assert list(found) == [(0, 0, (0, 1, 2))]


def test_a_string_begun_before_the_start_does_not_count() -> None:
    assert list(Completions([["Therefore"]]).find(["There", "fore"], 1, 2)) == []


@given(tokens, cue_lists)
def test_tokens_are_those_in_which_a_naive_search_finds_an_end(
    texts: list[str], words: list[str]
) -> None:
    known = Completions([words])
    expected = [
        i
        for i, text in enumerate(texts)
        if any(
            "".join(texts[: i + 1])[: len("".join(texts[:i])) + n].endswith(tuple(words))
            for n in range(1, len(text) + 1)
        )
    ]
    for _ in range(2):  # learned, then remembered
        assert [i for i, _, _ in known.find(texts, 0, len(texts))] == expected


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_MAX_KNOWN", 5)
    known = Completions([["Now"]])
    texts = [*TOKENS, *TOKENS]
    found = [texts[i] for i, _, _ in known.find(texts, 0, len(texts))]
    assert found == ["Now", " Now", "Now,"] * 2
    assert sum(map(len, known._states.values())) <= 6
