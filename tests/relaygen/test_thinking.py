"""Reasoning, tags and answer, at any cut of the text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.thinking import Phase, ThinkingSplitter

OPEN, CLOSE = "<think>", "</think>"
UNDECIDED, THINKING, ANSWER = Phase.UNDECIDED, Phase.THINKING, Phase.ANSWER


def split(tokens: Iterable[str], phase: Phase = UNDECIDED) -> list[tuple[str, str]]:
    """Kind and text of each part."""
    splitter = ThinkingSplitter(OPEN, CLOSE, phase)
    parts = [part for token in tokens for part in splitter.push(token)] + splitter.flush()
    assert all(part.text for part in parts)
    return [
        (kind.value, "".join(part.text for part in group))
        for kind, group in groupby(parts, lambda part: part.kind)
    ]


@pytest.mark.parametrize(
    ("text", "phase", "parts"),
    [
        (
            "<think>\nhm</think>\n\n446",
            UNDECIDED,
            [("tag", OPEN), ("reasoning", "\nhm"), ("tag", CLOSE), ("answer", "\n\n446")],
        ),
        ("\n<think>hm", UNDECIDED, [("tag", "\n<think>"), ("reasoning", "hm")]),
        ("<think></think>x", UNDECIDED, [("tag", "<think></think>"), ("answer", "x")]),
        ("446", UNDECIDED, [("answer", "446")]),
        (" \n446", UNDECIDED, [("answer", " \n446")]),
        ("<table>", UNDECIDED, [("answer", "<table>")]),
        ("a <think>", UNDECIDED, [("answer", "a <think>")]),
        ("<thi", UNDECIDED, [("answer", "<thi")]),
        (" ", UNDECIDED, [("answer", " ")]),
        ("", UNDECIDED, []),
        ("hm</think>446", THINKING, [("reasoning", "hm"), ("tag", CLOSE), ("answer", "446")]),
        ("a<b</</think", THINKING, [("reasoning", "a<b</</think")]),
        ("x</think></think>", THINKING, [("reasoning", "x"), ("tag", CLOSE), ("answer", CLOSE)]),
        ("a</think>b", ANSWER, [("answer", "a</think>b")]),
        ("<think>", ANSWER, [("answer", "<think>")]),
    ],
)
def test_the_parts_are_the_same_whole_and_byte_by_byte(
    text: str, phase: Phase, parts: list[tuple[str, str]]
) -> None:
    assert split([text], phase) == parts
    assert split(text, phase) == parts


def test_text_that_can_be_no_tag_is_not_held_back() -> None:
    splitter = ThinkingSplitter(OPEN, CLOSE, THINKING)
    assert [part.text for part in splitter.push("so</the")] == ["so</the"]


@pytest.mark.parametrize(("text", "thought"), [("<think>", True), ("446", False), (" ", False)])
def test_it_tells_whether_the_generation_thinks(text: str, thought: bool) -> None:
    splitter = ThinkingSplitter(OPEN, CLOSE)
    splitter.push(text)
    assert splitter.thought is thought


def test_an_answer_after_thinking_was_still_thought_about() -> None:
    splitter = ThinkingSplitter(OPEN, CLOSE, THINKING)
    splitter.push(CLOSE)
    assert (splitter.phase, splitter.thought) == (ANSWER, True)


texts = st.lists(
    st.sampled_from([OPEN, CLOSE, "<", "</", "think", ">", " ", "\n", "hm", "<<", "k>", ""]),
    max_size=10,
)


@given(texts, st.sampled_from(list(Phase)))
def test_every_cut_gives_what_the_whole_text_shows(tokens: list[str], phase: Phase) -> None:
    assert split(tokens, phase) == merged(whole_text_parts("".join(tokens), phase))


def whole_text_parts(text: str, phase: Phase) -> list[tuple[str, str]]:
    opened = re.match(r"\s*<think>", text) if phase is UNDECIDED else None
    if phase is ANSWER or (phase is UNDECIDED and not opened):
        return [("answer", text)]
    tag = opened.group() if opened else ""
    reasoning, close, answer = text[len(tag) :].partition(CLOSE)
    return [("tag", tag), ("reasoning", reasoning), ("tag", close), ("answer", answer)]


def merged(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    groups = groupby((part for part in parts if part[1]), lambda part: part[0])
    return [(kind, "".join(text for _, text in group)) for kind, group in groups]


@given(texts, texts, st.sampled_from(list(Phase)))
def test_where_the_thinking_would_close_is_where_it_then_closes(
    before: list[str], after: list[str], phase: Phase
) -> None:
    splitter = ThinkingSplitter(OPEN, CLOSE, phase)
    pushed = "".join(part.text for token in before for part in splitter.push(token))
    text = "".join(after)
    at, phase_before = splitter.closes_at(text), splitter.phase
    parts = splitter.push(text)
    closes = splitter.phase is ANSWER is not phase_before and splitter.thought
    assert (at is not None) is closes
    if at is not None:
        answer = "".join(part.text for part in parts if part.kind.value == "answer")
        assert text[at:] == answer
        assert (pushed + "".join(part.text for part in parts)).endswith(CLOSE + answer)
