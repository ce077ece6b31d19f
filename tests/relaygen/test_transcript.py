"""Kept text becomes deltas: split, watched for stop strings, each with its writer."""

from __future__ import annotations

from typing import Literal

from relaygen.events import Piece, Role
from relaygen.stops import StopMatcher
from relaygen.thinking import Phase, ThinkingSplitter
from relaygen.transcript import Transcript

LARGE, SMALL = Role.LARGE, Role.SMALL


def transcript(
    *stops: str,
    phase: Phase = Phase.THINKING,
    scope: Literal["answer", "all"] = "answer",
    include: bool = False,
) -> Transcript:
    splitter = ThinkingSplitter("<think>", "</think>", phase)
    return Transcript(splitter, StopMatcher(stops, include=include), scope)


def taken(transcript: Transcript) -> list[tuple[str, int, str, str]]:
    return [(d.role.value, d.segment, d.kind.value, d.text) for d in transcript.take()]


def test_text_of_one_writer_and_kind_is_one_delta() -> None:
    t = transcript()
    for text in ("a", "", "b"):
        t.push(LARGE, 0, text)
    assert taken(t) == [("large", 0, "reasoning", "ab")]
    assert taken(t) == []


def test_each_segment_has_deltas_of_its_own() -> None:
    t = transcript()
    t.push(LARGE, 0, "a")
    t.push(SMALL, 1, "b")
    assert taken(t) == [("large", 0, "reasoning", "a"), ("small", 1, "reasoning", "b")]


def test_a_tag_written_by_two_names_both() -> None:
    t = transcript()
    t.push(SMALL, 1, "x</th")
    t.push(LARGE, 2, "ink>y")
    assert taken(t) == [
        ("small", 1, "reasoning", "x"),
        ("small", 1, "tag", "</th"),
        ("large", 2, "tag", "ink>"),
        ("large", 2, "answer", "y"),
    ]


def test_what_was_held_back_keeps_its_writer() -> None:
    t = transcript()
    t.push(SMALL, 1, "</th")
    t.push(LARGE, 2, "at")
    assert taken(t) == [("small", 1, "reasoning", "</th"), ("large", 2, "reasoning", "at")]


def test_a_stop_string_in_the_reasoning_is_text() -> None:
    t = transcript("END")
    t.push(LARGE, 0, "END</think>aENDb")
    assert taken(t)[0] == ("large", 0, "reasoning", "END")
    assert t.stop == "END"


def test_a_stop_string_written_by_two_is_found() -> None:
    t = transcript("END", phase=Phase.ANSWER)
    t.push(LARGE, 0, "aEN")
    t.push(SMALL, 1, "Db")
    assert taken(t) == [("large", 0, "answer", "a")]
    assert t.stop == "END"


def test_a_stop_string_does_not_reach_across_the_end_of_thinking() -> None:
    t = transcript("END", scope="all")
    t.push(LARGE, 0, "EN</think>D")
    t.flush()
    assert taken(t) == [
        ("large", 0, "reasoning", "EN"),
        ("large", 0, "tag", "</think>"),
        ("large", 0, "answer", "D"),
    ]


def test_nothing_follows_a_stop_string_not_even_a_tag() -> None:
    t = transcript("END", scope="all", include=True)
    t.push(LARGE, 0, "aEND</think>b")
    t.push(LARGE, 0, "c")
    t.flush()
    assert taken(t) == [("large", 0, "reasoning", "aEND")]


def test_flush_lets_go_of_what_was_held_back() -> None:
    t = transcript("END", phase=Phase.ANSWER)
    t.push(SMALL, 3, "aEN")
    assert taken(t) == [("small", 3, "answer", "a")]
    t.flush()
    assert taken(t) == [("small", 3, "answer", "EN")]


def test_pieces_ride_on_the_last_delta_that_a_client_surely_sees() -> None:
    t = transcript()
    pieces = [Piece("a", (1,)), Piece("</think>", (2,))]
    t.push(LARGE, 0, "a</think>", pieces)
    text, tag = t.take()
    assert (text.pieces, tag.pieces) == (tuple(pieces), ())


def test_pieces_of_a_tag_wait_for_text() -> None:
    t = transcript()
    t.push(LARGE, 0, "</think>", [Piece("</think>", (1,))])
    [tag] = t.take()
    assert tag.pieces == ()
    t.push(SMALL, 1, "b", [Piece("b", (2,))])
    [text] = t.take()
    assert [piece.ids for piece in text.pieces] == [(1,), (2,)]


def test_pieces_wait_for_the_text_that_was_held_back() -> None:
    t = transcript()
    t.push(LARGE, 0, "</", [Piece("</", (1,))])
    assert t.take() == []
    t.push(LARGE, 0, "b", [Piece("b", (2,))])
    [delta] = t.take()
    assert [piece.ids for piece in delta.pieces] == [(1,), (2,)]
