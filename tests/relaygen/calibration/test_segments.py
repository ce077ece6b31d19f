"""The segments after cues and the sentences of a trace are what the online matchers make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.boundaries import BoundaryMatch, BoundaryMatcher, BoundarySet
from relaygen.calibration import segments
from relaygen.calibration.segments import Segmenter, Span, after_cues, closed, sentences, thought
from relaygen.cues import CueMatch, CueMatcher, CueSet
from relaygen.events import Role
from relaygen.policy import Thinking
from relaygen.thinking import Phase, ThinkingSplitter
from tests.relaygen.calibration.support import ENDS, cue_lists, session_roles, tokens
from tests.relaygen.support import make_policy

BOUNDARIES = BoundarySet(ENDS)
THINKING = Thinking()


def handed_over(texts: Sequence[str], *cues: str, longest: int = 256) -> list[tuple[str, str]]:
    """The cue and the text of each segment."""
    found = after_cues(texts, Span(0, len(texts)), CueSet(cues), BOUNDARIES, longest)
    return [(span.cue, "".join(texts[span.start : span.end])) for span in found]


def cut(texts: Sequence[str]) -> list[str]:
    found = sentences(texts, Span(0, len(texts)), BOUNDARIES)
    return ["".join(texts[span.start : span.end]) for span in found]


# ---- after cues ---------------------------------------------------------------------------------


def test_the_segment_after_a_cue_ends_with_the_sentence() -> None:
    assert handed_over(["Now", " it", " is", ".", " So"], "Now") == [("Now", " it is.")]


def test_every_cue_has_its_segment_also_inside_anothers() -> None:
    texts = [" So", " now", " it", " is", ".", " x"]
    assert handed_over(texts, "So", "now") == [("So", " now it is."), ("now", " it is.")]


def test_a_number_ends_no_segment() -> None:
    texts = ["Now", " is", " 3", ".", "14", ".", " So"]
    assert handed_over(texts, "Now") == [("Now", " is 3.14.")]


def test_the_number_of_a_list_item_ends_no_segment() -> None:
    texts = ["Now", "\n", "1", ".", " it", " is", ".", " So"]
    assert handed_over(texts, "Now") == [("Now", "\n1. it is.")]


def test_a_list_items_line_may_begin_before_the_cue() -> None:
    assert handed_over(["\n", "1", ".", " it", "."], "1") == [("1", ". it.")]


def test_a_segment_is_no_longer_than_the_policy_lets_it_be() -> None:
    assert handed_over(["Now", " a", " b", " c", "."], "Now", longest=2) == [("Now", " a b")]


def test_a_token_whose_text_comes_later_brings_it_along() -> None:
    assert handed_over(["Now", " a", "", " é", "."], "Now", longest=2) == [("Now", " a é")]


def test_a_cue_that_ends_the_thinking_hands_nothing_over() -> None:
    assert handed_over([" it", " Now"], "Now") == []


def test_a_cue_before_the_span_is_none() -> None:
    texts = ["Now", " it", ".", " x", " y", "."]
    assert list(after_cues(texts, Span(3, 6), CueSet(["Now"]), BOUNDARIES, 9)) == []


def test_part_of_a_word_is_no_cue() -> None:
    assert handed_over([" know", " it", "."], "now") == []


def test_the_segment_is_what_the_session_lets_the_small_model_write() -> None:
    texts = ["Let", " us", " see", ".", " Now", ",", " it", " is", " 3", ".", "5", ".", " So"]
    written = dict(session_roles(make_policy("Now"), texts))[Role.SMALL]
    [span] = after_cues(texts, Span(0, len(texts)), CueSet(["Now"]), BOUNDARIES, 256)
    assert (span.start, span.end) == (written.start, written.end)


@given(tokens, cue_lists, st.sampled_from(CueMatch), st.sampled_from(BoundaryMatch), st.data())
def test_segments_are_those_of_matchers_that_read_every_token(
    texts: list[str],
    words: list[str],
    match: CueMatch,
    boundary: BoundaryMatch,
    data: st.DataObject,
) -> None:
    start = data.draw(st.integers(0, len(texts)))
    span = Span(start, data.draw(st.integers(start, len(texts))))
    cues, ends = CueSet(words, match), BoundarySet(ENDS, boundary)
    longest = data.draw(st.integers(1, 9))
    found = list(after_cues(texts, span, cues, ends, longest))
    assert found == list(naive_segments(texts, span, cues, ends, longest))


def naive_segments(
    texts: Sequence[str], span: Span, cues: CueSet, ends: BoundarySet, longest: int
) -> Iterator[Span]:
    matcher = CueMatcher(cues, "".join(texts[: span.start]))
    for i in range(span.start, span.end - 1):
        cut = matcher.push(texts[i])
        if cut is not None:
            yield Span(i + 1, naive_end(texts, i + 1, span.end, ends, longest), cut.text)


def naive_end(
    texts: Sequence[str], start: int, end: int, ends: BoundarySet, longest: int | None
) -> int:
    matcher = BoundaryMatcher(ends, "".join(texts[:start]))
    for i in range(start, end):
        cut = matcher.push(texts[i])
        if cut is not None:
            return i + bool(cut.keep)
        if longest is not None and texts[i] and i + 1 - start >= longest:
            return i + 1
    return end


def test_a_token_that_comes_again_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    push = CueMatcher.push

    def counting(matcher: CueMatcher, text: str, *, armed: bool = True) -> object:
        asked.append(text)
        return push(matcher, text, armed=armed)

    monkeypatch.setattr(CueMatcher, "push", counting)
    assert len(handed_over([" Now", " it", "."] * 50, "Now")) == 50
    assert asked.count(" Now") == 2  # after nothing, and after the dot


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_ANSWERS", 3)
    segmenter = Segmenter([CueSet(["Now"])], BOUNDARIES, 9)
    for i in range(20):
        texts = [f"{i} Now", " it", "."]
        segmenter.read(texts)
        assert [span.cue for span in segmenter.after_cues(Span(0, 3))] == ["Now"]
    assert len(segmenter._answers) <= 4


# ---- sentences ----------------------------------------------------------------------------------


def test_sentences_join_to_the_whole() -> None:
    texts = [" It", " is", " 3", ".", "14", "!", " So", "\n\n", "1", ".", " x"]
    assert cut(texts) == [" It is 3.14!", " So\n\n", "1. x"]


def test_a_blank_after_a_numbers_dot_begins_the_next_sentence() -> None:
    assert cut([" is", " 4", ".", " So", "."]) == [" is 4.", " So."]


def test_a_sentence_is_as_long_as_it_is_unless_it_is_to_be_a_segment() -> None:
    texts = [" a"] * 5
    segmenter = Segmenter([], BOUNDARIES, 2)
    segmenter.read(texts)
    assert list(segmenter.sentences(Span(0, 5), any_length=True)) == [Span(0, 5)]
    assert list(segmenter.sentences(Span(0, 5))) == [Span(0, 2), Span(2, 4), Span(4, 5)]


@given(tokens, st.sampled_from(BoundaryMatch))
def test_sentences_are_those_of_a_matcher_that_reads_every_token(
    texts: list[str], match: BoundaryMatch
) -> None:
    ends, start = BoundarySet(ENDS, match), 0
    for sentence in sentences(texts, Span(0, len(texts)), ends):
        assert sentence == Span(start, naive_end(texts, start, len(texts), ends, None))
        start = sentence.end
    assert start == len(texts)


# ---- the thinking -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "inside", "end"),
    [
        (["<think>", "\n", "a", "</think>", "b"], "\na", 4),
        (["<th", "ink>", "a", "</", "think", ">", "b"], "a", 6),
        ([" <think>", "a"], "a", 2),
        (["a", "b", "</think>", "c"], "ab", 3),
        (["a", "b"], "ab", 2),
        (["a.</", "think>b", "c"], "", 2),
        (["<think></think>"], "", 1),
        (["<think>", "</think>", "a", "</think>"], "", 2),
        ([], "", 0),
    ],
)
def test_the_thinking_is_what_is_between_the_tags(texts: list[str], inside: str, end: int) -> None:
    span = thought(texts, THINKING)
    assert "".join(texts[span.start : span.end]) == inside
    assert closed(texts, THINKING) == end


@given(tokens)
def test_the_thinking_opens_and_closes_where_the_splitter_says(texts: list[str]) -> None:
    opened = "".join(texts).lstrip().startswith(THINKING.open)
    splitter = ThinkingSplitter(
        THINKING.open, THINKING.close, Phase.UNDECIDED if opened else Phase.THINKING
    )
    phases = []
    for text in texts:
        splitter.push(text)
        phases.append(splitter.phase)
    span = thought(texts, THINKING)
    assert phases[: span.start].count(Phase.THINKING) in (0, span.start * (not opened), 1)
    assert Phase.ANSWER not in phases[: closed(texts, THINKING) - 1]
    assert phases[closed(texts, THINKING) - 1 :].count(Phase.THINKING) <= (
        Phase.ANSWER not in phases
    )
    if opened and Phase.THINKING in phases:
        assert span.start == phases.index(Phase.THINKING) + 1
