"""Which cues are chosen, and why."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from relaygen.boundaries import BoundarySet
from relaygen.calibration.candidates import layers
from relaygen.calibration.segments import Span
from relaygen.calibration.selection import (
    Choice,
    CueStatistic,
    Rule,
    Selection,
    Statistics,
    chances,
    gather,
    select,
    succeeds,
)
from relaygen.calibration.traces import Scored
from relaygen.cues import CueMatch, CueSet
from relaygen.policy import Thinking
from tests.relaygen.calibration.support import ENDS, make_scored

BOUNDARIES, THINKING = BoundarySet(ENDS), Thinking()
FEW = Choice(occurrences=3, traces=2, draws=200)


def selected(
    scored: Sequence[Scored],
    *cues: str,
    choice: Choice = FEW,
    match: CueMatch = CueMatch.WORD,
) -> Selection:
    return select(gather(scored, layers(cues, match), BOUNDARIES, THINKING, choice))


def statistics_of(selection: Selection) -> dict[str, CueStatistic]:
    return {found.cue: found for found in selection.cues}


# ---- the measures -------------------------------------------------------------------------------


def test_a_tokens_chance_is_half_of_one_more_or_less_than_its_margin() -> None:
    scored = make_scored("abcd", [0.8, 0.8, None, 0.4], [True, False, True, None])
    assert chances(scored, 0.9) == [pytest.approx(0.9), pytest.approx(0.1), None, None]


def test_tokens_that_the_large_model_was_not_sure_of_do_not_count() -> None:
    scored = make_scored("abc", [0.8] * 3, own=[0.9, 0.89, None])
    assert chances(scored, 0.9) == [0.9, None, 0.9]


@pytest.mark.parametrize(
    ("hits", "own", "expected"),
    [
        ([True, True], [1.0, 1.0], True),
        ([True, False], [1.0, 1.0], False),
        ([True, False], [1.0, 0.5], True),
        ([True, False], [1.0, None], False),
        ([True, None], [1.0, 1.0], True),
        ([None, False], [1.0, 0.5], None),
    ],
)
def test_a_segment_succeeds_if_all_sure_tokens_are_hit(
    hits: list[bool | None], own: list[float | None], expected: bool | None
) -> None:
    assert succeeds(make_scored("ab", hits=hits, own=own), Span(0, 2), 0.9) is expected


def numbers(rule: Rule) -> Statistics:
    scored = make_scored(
        [*("<think>", "Now", " a", " b", "."), *(" Now", " c", ".", " d", "</think>", "x", ".")],
        [*(1.0, 1.0, 0.6, None, 1.0), *(0.0, 0.5, 1.0, None, 1.0, 0.0, 0.0)],
        [*(True, True, True, True, True), *(False, False, True, None, True, False, False)],
    )
    choice = replace(FEW, rule=rule)
    return gather([scored] * 2, layers(["Now", "Now,"]), BOUNDARIES, THINKING, choice)


def test_success_is_the_product_of_a_segments_chances() -> None:
    found = numbers(Rule.SUCCESS)
    # segments 0.8 and 0.25; sentences 0.8, 0.5 * 0.25 and one of which nothing is known
    assert found.tallies["Now"].mean == pytest.approx((0.8 + 0.25) / 2)
    assert found.overall.mean == pytest.approx((0.8 + 0.125) / 2)
    assert (found.tallies["Now"].count, found.overall.count) == (4, 4)


def test_the_mean_margin_is_over_tokens() -> None:
    found = numbers(Rule.MARGIN)
    assert found.tallies["Now"].mean == pytest.approx((0.6 + 1.0 + 0.5 + 1.0) / 4)
    assert found.overall.mean == pytest.approx((1.0 + 0.6 + 1.0 + 0.0 + 0.5 + 1.0) / 6)


def test_only_the_thinking_counts_and_what_is_unknown_is_told() -> None:
    found = numbers(Rule.SUCCESS)
    assert (found.traces, found.tokens, found.unknown) == (2, 16, 4)
    assert found.lengths == {"Now": 10}
    assert found.seen == {"Now": 2}


def test_a_segment_of_which_nothing_is_known_is_not_counted() -> None:
    scored = make_scored(["Now", " a", "."], [None] * 3, [None] * 3)
    found = gather([scored], layers(["Now"]), BOUNDARIES, THINKING, FEW)
    assert found.tallies == {}
    assert found.seen == {}
    assert select(found).cues == ()
    assert math.isnan(select(found).overall)


# ---- the choice ---------------------------------------------------------------------------------


def trace(rng: random.Random, right: dict[str, float], length: int = 6) -> Scored:
    """Ten sentences for each opener; its tokens are hit with that probability."""
    texts, hits = [], []
    for _ in range(10):
        for opener, chance in right.items():
            texts += [f" {opener}", *[" x"] * length, "."]
            hits += [True, *[rng.random() < chance for _ in range(length + 1)]]
    return make_scored(texts, hits=hits)


def traces(**right: float) -> list[Scored]:
    rng = random.Random(3)
    return [trace(rng, right) for _ in range(20)]


def test_a_cue_with_easier_text_than_the_whole_is_chosen() -> None:
    found = selected(traces(So=1.0, But=0.8, Hm=0.85), "So", "But", "Hm")
    assert [cue.cue for cue in found.chosen] == ["So"]
    [so] = found.chosen
    assert (so.count, so.traces, so.tokens) == (200, 20, 7.0)
    assert so.compared.mean == 1.0
    assert so.why == "its text is easier than the whole"


def test_the_best_is_first_and_every_refusal_has_its_reason() -> None:
    found = selected(traces(So=1.0, Hm=0.98, But=0.8), "So", "But", "Hm")
    assert [cue.cue for cue in found.cues] == ["So", "Hm", "But"]
    told = {cue.cue: cue.why for cue in found.cues}
    assert told["Hm"] == "too often wrong (below 0.95)"
    assert told["But"] == "no easier than the whole (the interval reaches 0)"


def test_what_may_be_chance_is_not_chosen() -> None:
    choice = replace(FEW, least=0.0, alpha=1e-30)
    [so, _] = selected(traces(So=0.97, But=0.93), "So", "But", choice=choice).cues
    assert so.compared.low > 0
    assert so.why == f"may be chance (p = {so.corrected:.3f} after Holm)"


@pytest.mark.parametrize("choice", [replace(FEW, occurrences=201), replace(FEW, traces=21)])
def test_rare_cues_are_not_judged(choice: Choice) -> None:
    assert selected(traces(So=1.0, But=0.8), "So", "But", choice=choice).cues == ()


def test_a_cue_that_a_chosen_one_hides_is_merged_into_it() -> None:
    scored = traces(**{"So": 1.0, "So, so": 1.0, "So, so now": 1.0, "But": 0.5})
    found = selected(scored, "So", "So, so", "So, so now", "But")
    assert [cue.cue for cue in found.chosen] == ["So"]
    assert set(found.chosen[0].hides) == {"So, so", "So, so now"}
    by = statistics_of(found)
    assert by["So, so"].why == by["So, so now"].why == "merged into 'So'"
    assert by["But"].hides == ()


def test_as_substrings_a_cue_inside_a_word_is_merged_too() -> None:
    scored = traces(now=1.0, know=1.0, But=0.5)
    found = selected(scored, "now", "know", "But", match=CueMatch.SUBSTRING)
    assert [cue.cue for cue in found.chosen] == ["now"]
    words = selected(scored, "now", "know", "But")
    assert {cue.cue for cue in words.chosen} == {"now", "know"}


def test_a_longer_cue_than_a_refused_one_may_be_chosen() -> None:
    scored = traces(**{"So": 0.5, "So, then": 1.0, "But": 0.9})
    assert [cue.cue for cue in selected(scored, "So", "So, then", "But").chosen] == ["So, then"]


def test_no_traces_no_cues() -> None:
    found = selected([], "So")
    assert (found.cues, found.traces) == ((), 0)
    assert gather([], [], BOUNDARIES, THINKING, FEW).match is CueMatch.WORD


def test_the_same_traces_give_the_same_selection() -> None:
    scored = traces(So=1.0, But=0.8)
    assert selected(scored, "So", "But") == selected(scored, "So", "But")


def test_style_lowers_the_margin_of_an_easy_cue_but_not_its_success() -> None:
    """After "So" the large model itself is torn between ways to say it, and so is the small one;
    of what is sure it misses nothing. After "But" it misses a token that is."""
    so = [" So", " clearly", " 4", "."], [1.0, 0.1, 1.0, 1.0], [True, False, True, True]
    but = [" But", " it", " 7", "."], [1.0, 1.0, 0.6, 1.0], [True, True, False, True]
    texts, margins, hits, own = [], [], [], []
    for sentence, its_margins, its_hits in (so, but):
        texts += sentence
        margins += its_margins
        hits += its_hits
        own += [1.0, 0.2 if sentence is so[0] else 1.0, 1.0, 1.0]
    scored = [make_scored(texts, margins, hits, own)] * 8
    by_success = selected(scored, "So", "But")
    by_margin = selected(scored, "So", "But", choice=replace(FEW, rule=Rule.MARGIN))
    assert [cue.cue for cue in by_success.chosen] == ["So"]
    assert [cue.cue for cue in by_margin.cues] == ["But", "So"]
    assert statistics_of(by_margin)["So"].compared.mean == pytest.approx(0.7)
    assert "So" not in [cue.cue for cue in by_margin.chosen]


def test_clusters_beyond_the_buckets_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygen.calibration.selection.BUCKETS", 4)
    found = gather(traces(So=1.0), layers(["So"]), BOUNDARIES, THINKING, FEW)
    assert found.traces == 20
    assert [sum(weight > 0 for weight in found.overall.weights)] == [4]
    assert found.tallies["So"].count == 200


def test_sets_of_cues_are_measured_side_by_side() -> None:
    scored = make_scored([" So", ",", " it", " is", "."])
    sets = [CueSet(["So"]), CueSet(["So,"])]
    found = gather([scored], sets, BOUNDARIES, THINKING, FEW)
    assert found.lengths == {"So": 4, "So,": 3}
