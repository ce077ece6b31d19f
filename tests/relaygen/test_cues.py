"""Where a large segment ends."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygen.cues import CueMatch, CueMatcher, CueSet, Cut
from relaygen.words import joined

WORD, SUBSTRING = CueMatch.WORD, CueMatch.SUBSTRING


def first_cut(
    cues: Iterable[str], tokens: Iterable[str], match: CueMatch = WORD, before: str = ""
) -> tuple[str, Cut] | None:
    """The kept text and the cut of the first cue that ends the segment."""
    matcher, text = CueMatcher(CueSet(cues, match), before), ""
    for token in tokens:
        if cut := matcher.push(token):
            return text + token[: cut.keep], cut
        text += token
    return None


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (["Now"], "Now"),
        (["Now,"], "Now,"),
        (["Now, "], "Now, "),
        ([" Now", " so"], " Now"),
        (["\n\nNow"], "\n\nNow"),
        (["There", "fore", " it"], "Therefore"),
        (["Th", "ere", "fore"], "Therefore"),
        (["Now then Other"], "Now then Other"),
        (["“Now”"], "“Now”"),
    ],
)
def test_a_cue_ends_the_segment_after_its_token(tokens: list[str], kept: str) -> None:
    found = first_cut(["Now", "Therefore", "Other"], tokens)
    assert found is not None
    assert found[0] == kept


@pytest.mark.parametrize(
    "tokens",
    [
        ["know"],
        ["kNow"],
        ["Nowhere"],
        ["Otherwise"],
        [" Otherwise", ","],
        ["k", "Now"],
        ["There", "by"],
        ["There", " fore"],
        ["now"],
        ["Now\u0301"],
        ["_Now"],
        [],
        [""],
    ],
)
def test_part_of_a_word_is_no_cue(tokens: list[str]) -> None:
    assert first_cut(["Now", "Therefore", "Other"], tokens) is None


def test_the_text_before_the_segment_shows_whether_a_word_begins() -> None:
    assert first_cut(["Now"], ["Now"], before="k") is None
    assert first_cut(["Now"], ["Now"], before="k ") is not None


def test_a_cue_that_began_before_the_segment_is_none() -> None:
    assert first_cut(["Therefore"], ["fore"], before="There") is None


def test_an_empty_token_between_changes_nothing() -> None:
    assert first_cut(["Therefore"], ["There", "", "fore"]) == ("Therefore", Cut("Therefore", 4))


def test_a_cue_in_a_script_without_blanks_needs_no_blank() -> None:
    found = first_cut(["所以"], ["我们", "所以", "说"])
    assert found is not None
    assert found[0] == "我们所以"


def test_the_longest_of_the_cues_that_end_together_is_named() -> None:
    found = first_cut(["now", "But now"], ["But now"])
    assert found is not None
    assert found[1].text == "But now"


def test_a_longer_cue_inside_a_word_leaves_the_shorter_one() -> None:
    found = first_cut(["so now", "now"], ["also now"])
    assert found is not None
    assert found[1].text == "now"


def test_a_cue_that_ends_while_not_armed_is_over() -> None:
    matcher = CueMatcher(CueSet(["Now"]))
    assert matcher.push("Now", armed=False) is None
    assert matcher.push(" we") is None
    assert matcher.push(" Now") == Cut("Now", 4)


def test_a_cue_begun_while_not_armed_may_end_later() -> None:
    matcher = CueMatcher(CueSet(["Therefore"]))
    assert matcher.push("There", armed=False) is None
    assert matcher.push("fore") == Cut("Therefore", 4)


def test_a_new_segment_forgets_the_old_one() -> None:
    matcher = CueMatcher(CueSet(["Therefore"]))
    matcher.push("There")
    matcher.reset("There")
    assert matcher.push("fore") is None


def test_substring_cuts_after_the_cues_last_character() -> None:
    assert first_cut(["now"], ["I know, I"], SUBSTRING) == ("I know", Cut("now", 6))


# ---- against naive searches ---------------------------------------------------------------------

words = st.sampled_from(["Now", "No", "so", "There", "Therefore", "ow", "now so"])
cues = st.lists(words, min_size=1, max_size=2)
text = st.sampled_from(["Now", "k", " ", "now", " so", "There", "fore", ",", "", "s", "No w"])
streams = st.lists(text, max_size=3) | st.lists(text, min_size=4, max_size=8)
many = settings(max_examples=300)  # these are cheap


@many
@given(cues, streams)
def test_word_cues_are_what_a_naive_search_finds(words: list[str], tokens: list[str]) -> None:
    found = first_cut(words, tokens)
    assert (found and found[0]) == naive_word_cut(words, tokens)


def naive_word_cut(words: list[str], tokens: list[str]) -> str | None:
    text = ""
    for token in tokens:
        for end in range(1, len(token) + 1):
            seen, following = text + token[:end], token[end : end + 1]
            for word in words:
                start = len(seen) - len(word)
                begins = seen.endswith(word) and not joined(
                    seen[max(0, start - 1) : start], word[0]
                )
                if begins and not joined(seen[-1], following):
                    return text + token
        text += token
    return None


@many
@given(cues, streams, st.text("Nowkso There,", max_size=3))
def test_substring_cues_are_found_at_the_same_place_at_every_cut_of_the_text(
    words: list[str], tokens: list[str], before: str
) -> None:
    text = "".join(tokens)
    ends = [text.find(word) + len(word) for word in words if word in text]
    kept = text[: min(ends)] if ends else None
    for cut_text in (tokens, list(text), [text]):
        found = first_cut(words, cut_text, SUBSTRING, before)
        assert (found and found[0]) == kept


# ---- cues that hide others ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), [("Thus", "Thus,"), ("Thus", "Thus"), ("Now", "But Now"), ("so", "so so")]
)
def test_a_cue_hides_those_that_hold_it_as_a_word(first: str, second: str) -> None:
    assert CueSet([], WORD).hides(first, second)


@pytest.mark.parametrize(
    ("first", "second"), [("now", "know"), ("Other", "Otherwise"), ("Thus,", "Thus"), ("x", "y")]
)
def test_a_cue_inside_a_word_hides_nothing(first: str, second: str) -> None:
    assert not CueSet([], WORD).hides(first, second)


def test_a_later_place_as_a_word_hides_too() -> None:
    assert CueSet([], WORD).hides("no", "know no")


def test_as_a_substring_it_hides_whatever_holds_it() -> None:
    assert CueSet([], SUBSTRING).hides("now", "know")
    assert not CueSet([], SUBSTRING).hides("now", "no")
