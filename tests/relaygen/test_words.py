"""Where words begin and end."""

from __future__ import annotations

import pytest

from relaygen.words import is_word_char, joined


@pytest.mark.parametrize("char", ["a", "Ä", "7", "_", "所", "\u0301", "ß"])
def test_letters_digits_marks_and_the_underscore_make_words(char: str) -> None:
    assert is_word_char(char)


@pytest.mark.parametrize("char", [" ", "\n", ",", "'", "’", "-", "<", "。"])
def test_blanks_and_punctuation_do_not(char: str) -> None:
    assert not is_word_char(char)


@pytest.mark.parametrize(("left", "right"), [("k", "n"), ("w", "s"), ("e", "\u0301"), ("x", "1")])
def test_letters_of_one_word_are_joined(left: str, right: str) -> None:
    assert joined(left, right)


@pytest.mark.parametrize(
    ("left", "right"), [(" ", "N"), ("w", ","), ("", "N"), ("w", ""), ("", ""), (".", "N")]
)
def test_a_words_edge_is_not_joined(left: str, right: str) -> None:
    assert not joined(left, right)


@pytest.mark.parametrize(("left", "right"), [("所", "以"), ("た", "が"), ("ก", "ข"), ("a", "所")])
def test_scripts_without_blanks_have_an_edge_at_every_letter(left: str, right: str) -> None:
    assert not joined(left, right)
