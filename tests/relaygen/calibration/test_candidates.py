"""Which cues are tried."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.boundaries import BoundarySet
from relaygen.calibration import candidates
from relaygen.calibration.candidates import REFERENCE, Beginnings, beginnings, hidden_by, layers
from relaygen.calibration.segments import Span
from relaygen.cues import CueMatch, CueSet
from tests.relaygen.calibration.support import ENDS, WORDS

BOUNDARIES = BoundarySet((*ENDS, "。"))


def counted(traces: Iterable[list[str]]) -> Beginnings:
    counts = Beginnings(BOUNDARIES)
    for texts in traces:
        counts.add(texts, Span(0, len(texts)))
    return counts


def test_the_authors_list_has_each_word_with_a_comma_and_in_lower_case() -> None:
    assert {"Therefore", "Therefore,", "therefore", "therefore,", "double-check,"} <= set(REFERENCE)
    assert len(REFERENCE) == len(set(REFERENCE)) == 94


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (" Let me see.", ("Let", "Let me")),
        ("\n\nSo, it is.", ("So",)),
        ("Double-check it", ("Double-check", "Double-check it")),
        ("It's so", ("It's", "It's so")),
        ("Außerdem gilt das.", ("Außerdem", "Außerdem gilt")),
        ("Zuna\u0308chst ist", ("Zuna\u0308chst", "Zuna\u0308chst ist")),
        ("इसलिए हम", ("इसलिए", "इसलिए हम")),
        ("所以我们说。", ("所", "所以", "所以我", "所以我们")),
        ("嗯。", ("嗯",)),
        ("ดังนั้นเรา", ("ดั", "ดัง", "ดังนั้", "ดังนั้น")),
        ("Hm -x", ("Hm",)),
        ("So  two", ("So",)),
        ("So", ("So",)),
        ("3 is", ()),
        ("x2 is", ()),
        ("So x2 is", ("So",)),
        ("所以3", ("所", "所以")),
        ("_a", ()),
        ("- So", ()),
        ("", ()),
        (" ", ()),
    ],
)
def test_a_sentence_begins_with_one_word_or_two(sentence: str, expected: tuple[str, ...]) -> None:
    assert beginnings(sentence) == expected


@given(st.text(max_size=12))
def test_what_a_sentence_begins_with_is_its_beginning(sentence: str) -> None:
    assert all(sentence.lstrip().startswith(text) for text in beginnings(sentence))


def test_frequent_beginnings_are_in_many_sentences_and_traces() -> None:
    often = ["So", " it", " is", ".", " Let", " me", "."]
    counts = counted([often, often, [" Let", " us", "."], [" Hm", "."] * 9])
    assert counts.frequent(sentences=2, traces=2) == ("Let", "So", "So it", "Let me")
    assert "Hm" in counts.frequent(sentences=3, traces=1)
    assert counts.frequent(sentences=3, traces=3) == ("Let",)


def test_sentences_of_other_scripts_are_counted_too() -> None:
    counts = counted([["所以", "我们", "说", "。", "所以", "是", "。"]] * 2)
    assert counts.frequent(sentences=4, traces=2) == ("所", "所以")


def test_the_rarest_are_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_MAX_SEEN", 10)
    rare = [chr(ord("a") + i) for i in range(26)]
    counts = counted(
        [["So", ".", *(part for one in rare for part in (f" {one}", "."))]]
        + [["So", "."] for _ in range(5)]
    )
    assert counts.frequent(sentences=6, traces=6) == ("So",)
    assert len(counts._sentences) <= 10
    assert counts._traces.keys() == counts._sentences.keys()


def test_only_the_most_frequent_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_MAX_OWN", 1)
    counts = counted([["So", ".", " So", ".", " Hm", "."]])
    assert counts.frequent(sentences=1, traces=1) == ("So",)


# ---- layers -------------------------------------------------------------------------------------


def test_a_cue_that_another_hides_is_measured_apart() -> None:
    sets = layers(["Now,", "Now", "So", "So now", "Now, so", "Now"])
    assert [one.words for one in sets] == [("Now", "So"), ("Now,", "So now"), ("Now, so",)]


def test_as_substrings_more_is_hidden() -> None:
    assert [one.words for one in layers(["know", "now"])] == [("know", "now")]
    sets = layers(["know", "now"], CueMatch.SUBSTRING)
    assert [one.words for one in sets] == [("now",), ("know",)]
    assert all(one.match is CueMatch.SUBSTRING for one in sets)


@given(st.lists(st.sampled_from(WORDS)), st.sampled_from(CueMatch))
def test_layers_hold_each_cue_once_and_none_hides_another(cues: list[str], match: CueMatch) -> None:
    sets = layers(cues, match)
    assert sorted(word for one in sets for word in one.words) == sorted(set(cues))
    assert all(hidden_by(word, one.words, one) is None for one in sets for word in one.words)


def test_what_hides_a_cue_is_named() -> None:
    match = CueSet([])
    assert hidden_by("Now, so", ["Now, so", "x", "so", "Now"], match) == "so"
    assert hidden_by("Now", ["Now", "Now,"], match) is None
