"""Saved text played through the session: which segments would each model have written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.policy import Policy
from relaygen.replay import replay
from tests.relaygen.support import make_policy, policies

POLICY = make_policy("Thus", "Now")


def rows(text: str, policy: Policy = POLICY) -> list[tuple[str, str, str | None]]:
    return [(s.role.value, s.text, s.trigger) for s in replay(policy, text)]


def test_cues_and_sentence_ends_part_the_reasoning() -> None:
    assert rows("Take 3. Now it is 3.14 wide. Thus we know.") == [
        ("large", "Take 3. Now", "Now"),
        ("small", " it is 3.14 wide.", "."),
        ("large", " Thus", "Thus"),
        ("small", " we know.", "."),
    ]


def test_the_answer_is_its_own_segment() -> None:
    assert rows("<think>\nhm\n</think>\n\nThus 446.") == [
        ("large", "<think>\nhm\n</think>", "</think>"),
        ("small", "\n\nThus 446.", None),
    ]


def test_the_role_that_answers_anyway_goes_on() -> None:
    policy = make_policy("Thus", answer="large")
    assert rows("hm</think>446.", policy) == [("large", "hm</think>446.", None)]


def test_a_segment_that_grew_too_long_is_ended_by_its_boundary() -> None:
    assert rows("Now a b c d", make_policy("Now", max_small_tokens=2)) == [
        ("large", "Now", "Now"),
        ("small", " a b", "boundary"),
        ("large", " c d", None),
    ]


def test_a_number_at_a_sentences_end_belongs_to_it() -> None:
    assert rows("Now is 446. Then") == [
        ("large", "Now", "Now"),
        ("small", " is 446.", "."),
        ("large", " Then", None),
    ]


def test_substring_cuts_inside_words() -> None:
    policy = make_policy("now", match="substring", boundary="substring")
    assert rows("I know 3.14", policy) == [
        ("large", "I know", "now"),
        ("small", " 3.", "."),
        ("large", "14", None),
    ]


def test_a_blank_that_ends_a_segment_stays_where_it_is() -> None:
    assert [text for _, text, _ in rows("Now a.\n\nb", make_policy("Now", ends=["\n\n"]))] == [
        "Now",
        " a.\n\n",
        "b",
    ]


def test_no_text_has_no_segments() -> None:
    assert rows("") == []


def test_an_opening_tag_is_the_large_models() -> None:
    assert rows(" <think>Now. So") == [
        ("large", " <think>Now", "Now"),
        ("small", ".", "."),
        ("large", " So", None),
    ]


@pytest.mark.parametrize(
    "text", ["  two  blanks ", "a\n\n\tb", "x²_y é\u0301 😀", "<thi", "\r\n \x1c"]
)
def test_any_text_comes_back_whole(text: str) -> None:
    assert "".join(row[1] for row in rows(text)) == text


fragments = st.sampled_from(
    ["Now", " so", ".", " 3.14", "\n\n", "<think>", "</think>", "know", "所以", " ", "!", "1. "]
)


@given(policies(), st.text(max_size=30) | st.lists(fragments, max_size=15).map("".join))
def test_the_segments_joined_are_the_text(policy: Policy, text: str) -> None:
    segments = list(replay(policy, text))
    assert "".join(segment.text for segment in segments) == text
    assert all(segment.text for segment in segments)
    assert all(segment.trigger for segment in segments[:-1])
