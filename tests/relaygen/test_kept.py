"""Ids and text of what was kept always agree."""

from __future__ import annotations

import pytest

from relaygen.events import Piece
from relaygen.kept import KeptText


def kept(*pieces: Piece, with_ids: bool = True, move_blanks: bool = True) -> KeptText:
    kept = KeptText(with_ids=with_ids, move_blanks=move_blanks)
    for piece in pieces:
        kept.add([piece], piece.text)
    return kept


def test_the_prefix_is_ids_while_all_are_known() -> None:
    assert kept(Piece("a", (7,)), Piece("bc", (8, 9), 2)).prefix() == (7, 8, 9)


def test_ids_of_tokens_without_text_come_with_the_text() -> None:
    text = KeptText(with_ids=True)
    text.add([Piece("", (7,)), Piece("é", (8,))], "é")
    assert (text.prefix(), text.text()) == ((7, 8), "é")


def test_text_whose_tokens_all_came_before_it_keeps_the_ids() -> None:
    text = KeptText(with_ids=True)
    text.add([Piece("", (7,)), Piece("é", (), 0)], "é")
    assert text.prefix() == (7,)


@pytest.mark.parametrize("piece", [Piece("b"), Piece("b", (8,), 2), Piece("b", (), 0)])
def test_a_piece_that_lacks_an_id_makes_the_prefix_text_for_good(piece: Piece) -> None:
    assert kept(Piece("a", (7,)), piece, Piece("c", (9,))).prefix() == "abc"


def test_a_piece_kept_in_part_makes_the_prefix_text() -> None:
    text = KeptText(with_ids=True)
    text.add([Piece("know", (7,))], "kno")
    assert text.prefix() == "kno"


def test_a_last_blank_is_out_at_once_with_ids() -> None:
    assert kept(Piece("a \n", (7,))).text() == "a \n"


def test_without_ids_a_last_blank_waits_for_more_text() -> None:
    text = KeptText(with_ids=False)
    assert [text.add([], part) for part in ("a ", "\n", "b")] == ["a", "", " \nb"]


def test_a_dropped_blank_is_for_the_next_engine_to_write() -> None:
    text = kept(Piece("a "), with_ids=False)
    text.drop_blank()
    text.add([], " b")
    assert text.prefix() == "a b"


def test_a_released_blank_is_text_like_any_other() -> None:
    text = kept(Piece("a "), with_ids=False)
    assert text.release_blank() == " "
    assert text.release_blank() == ""
    assert text.text() == "a "


def test_blanks_stay_where_they_are_if_asked() -> None:
    assert kept(Piece("a "), with_ids=False, move_blanks=False).prefix() == "a "


@pytest.mark.parametrize(("length", "tail"), [(1, "f"), (4, "cdef"), (6, "abcdef"), (9, "abcdef")])
def test_the_tail_is_the_end_of_the_text(length: int, tail: str) -> None:
    assert kept(Piece("ab", (1,)), Piece("cde", (2,)), Piece("f", (3,))).tail(length) == tail


def test_the_tail_of_nothing_is_nothing() -> None:
    assert kept().tail(4) == ""
