"""Calibration's pure core: traces in, cues with their evidence out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.boundaries import BoundarySet
from relaygen.calibration.candidates import REFERENCE, Beginnings, beginnings, hidden_by, layers
from relaygen.calibration.margins import margin
from relaygen.calibration.projection import Replayed, Speeds, replayed, roles
from relaygen.calibration.reference import Pool, ReferenceStatistics
from relaygen.calibration.segments import Span, after_cues, sentences, thought
from relaygen.calibration.selection import (
    Choice,
    Rule,
    Selection,
    chances,
    gather,
    select,
    succeeds,
)
from relaygen.calibration.statistics import Tally, compare, holm
from relaygen.calibration.traces import (
    BadLineError,
    Score,
    Scored,
    Trace,
    paired,
    read_scores,
    read_traces,
    to_line,
)
from relaygen.cues import CueSet
from relaygen.policy import Policy, Thinking
from relaygen.replay import replay

ENDS = BoundarySet((".", "!", "?", "\n\n"))
EASY = (" Now", " it", " is", " so", ".")
HARD = (" Also", " 4", "2", " more", ".")
PLAIN = (" Well", " then", ".")


def trace_of(texts: Sequence[str], name: str = "1-1", margins: Sequence[float] = ()) -> Trace:
    own = tuple(margins) or (1.0,) * len(texts)
    return Trace(name, "q", "p", (1,), tuple(texts), (), own, "stop", 0.1, 1.0)


def scored(
    texts: Sequence[str], wrong: Sequence[str] = (), open_: Sequence[str] = (), name: str = "1-1"
) -> Scored:
    """The scorer misses the `wrong` tokens; the large model leaves the `open_` ones open."""
    trace = trace_of(texts, name, [0.1 if text in open_ else 1.0 for text in texts])
    hits = tuple(text not in wrong for text in texts)
    margins = tuple(0.2 if text in open_ or text in wrong else 0.99 for text in texts)
    return Scored(trace, Score(name, "small", margins, hits))


def thinking(*parts: Sequence[str]) -> tuple[str, ...]:
    return ("<think>", *(token for part in parts for token in part), "</think>", " 7", ".")


def policy(*words: str) -> Policy:
    model = {"backend": "x", "model": "m"}
    data = {"version": 1, "name": "p", "large": model, "small": model, "min_large_tokens": 0}
    return Policy.model_validate({**data, "cues": {"words": words}})


# ---- traces -------------------------------------------------------------------------------------


def test_records_come_back_from_their_lines() -> None:
    one = scored(thinking(EASY))
    assert list(read_traces([to_line(one.trace), "\n"], "t")) == [one.trace]
    assert list(read_scores([to_line(one.score)], "s")) == [one.score]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        to_line(trace_of("ab")).replace('"version":1', '"version":2'),
        to_line(trace_of("ab")).replace('"texts":["a","b"]', '"texts":["a"]'),
        to_line(trace_of("ab")).replace('"texts":["a","b"]', '"texts":"ab"'),
        to_line(trace_of("ab")).replace('"margins":[1.0,1.0]', '"margins":["x",1.0]'),
    ],
)
def test_a_bad_line_is_named_and_skipped_only_by_choice(line: str) -> None:
    good = to_line(trace_of("ok"))
    with pytest.raises(BadLineError, match=r"traces, line 2.*--on-bad-line skip"):
        list(read_traces([good, line], "traces"))
    told: list[str] = []
    assert len(list(read_traces([good, line], "traces", "skip", told))) == 1
    assert "traces, line 2" in told[0]
    assert len(list(read_traces([good, line], "traces", "skip"))) == 1


def test_a_score_of_other_lengths_is_bad() -> None:
    line = json.dumps({**json.loads(to_line(scored("ab").score)), "hits": [True]})
    with pytest.raises(BadLineError, match="lengths"):
        list(read_scores([line], "s"))


def test_traces_without_a_score_are_left_out() -> None:
    one, two = scored("ab", name="1"), scored("cd", name="2")
    assert list(paired([one.trace, two.trace], [two.score])) == [two]
    assert list(paired([one.trace, two.trace], [one.score])) == [one]


def test_a_score_of_no_trace_is_refused() -> None:
    with pytest.raises(BadLineError, match="score the traces again"):
        list(paired([trace_of("ab", "1")], [scored("ab", name="2").score]))


def test_a_score_of_another_length_is_refused() -> None:
    with pytest.raises(BadLineError, match="score it again"):
        list(paired([trace_of("abc")], [scored("ab").score]))


def test_margins_and_what_is_not_known_of_them() -> None:
    assert margin([math.log(0.2), math.log(0.7)]) == pytest.approx(0.5)
    assert margin([0.0]) is None
    assert margin([]) is None
    assert margin([math.nan, -1.0]) is None


# ---- segments -----------------------------------------------------------------------------------


def test_the_thought_is_between_the_tags() -> None:
    texts = thinking(EASY)
    assert thought(texts, Thinking()) == Span(1, 6)
    assert thought(EASY, Thinking()) == Span(0, 5)


def test_a_number_is_no_sentence_end() -> None:
    texts = (" 3", ".", "1", "4", " is", " it", ".", " Yes", ".")
    assert list(sentences(texts, Span(0, 9), ENDS)) == [Span(0, 7), Span(7, 9)]


def test_the_segment_after_a_cue_ends_with_its_sentence() -> None:
    texts = (*EASY, *HARD)
    found = list(after_cues(texts, Span(0, 10), CueSet(["Now", "Also"]), ENDS, 256))
    assert found == [Span(1, 5, "Now"), Span(6, 10, "Also")]
    short = list(after_cues(texts, Span(0, 10), CueSet(["Now"]), ENDS, 2))
    assert short == [Span(1, 3, "Now")]


@given(st.lists(st.sampled_from([EASY, HARD, PLAIN]), min_size=1, max_size=8))
def test_segments_are_what_the_session_would_hand_over(parts: list[Sequence[str]]) -> None:
    texts = thinking(*parts, ("\n",))
    trace = trace_of(texts)
    ours = list(roles(policy("Now", "Also"), trace))
    assert [span.start for _, span in ours[1:]] == [span.end for _, span in ours[:-1]]
    by_replay = [(s.role, s.text) for s in replay(policy("Now", "Also"), "".join(texts))]
    assert [(role, "".join(texts[s.start : s.end])) for role, s in ours] == by_replay


def test_a_token_without_text_belongs_to_the_next_one() -> None:
    texts = (" Now", " it", "", " is", ".", "", " 5", ".", "", "\n", "x")
    found = list(after_cues(texts, Span(0, 11), CueSet(["Now"]), ENDS, 2))
    assert found == [Span(1, 4, "Now")]
    assert list(sentences(texts, Span(5, 11), ENDS)) == [Span(5, 9), Span(9, 11)]


def test_a_line_end_that_does_not_end_a_sentence_is_read_over() -> None:
    texts = (" a", "\n", " b", "\n", "\n", " c")
    assert list(sentences(texts, Span(0, 6), ENDS)) == [Span(0, 5), Span(5, 6)]


def test_a_dot_after_the_last_digit_waits_for_good() -> None:
    assert list(sentences((" 5", "."), Span(0, 2), ENDS)) == [Span(0, 2)]


def test_a_cue_within_the_first_tokens_is_over() -> None:
    late = policy("Now").model_copy(update={"min_large_tokens": 5})
    texts = thinking(EASY, ("\n",), EASY, ("\n",))
    spans = [span for _, span in roles(late, trace_of(texts))]
    assert spans[0] == Span(0, 8)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [c.cue for c in chosen(Rule.SUCCESS).cues]
    monkeypatch.setattr("relaygen.calibration.segments._MAX_ANSWERS", 0)
    monkeypatch.setattr("relaygen.calibration.completions._MAX_KNOWN", 1)
    assert [c.cue for c in chosen(Rule.SUCCESS).cues] == before


# ---- candidates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        (" Let me see.", ("Let", "Let me")),
        ("Now, it", ("Now",)),
        (" 42 is", ()),
        ("", ()),
        ("Überlegen wir.", ("Überlegen", "Überlegen wir")),
        ("因此它", ("因", "因此", "因此它")),
        ("_x", ()),
    ],
)
def test_what_a_sentence_begins_with(sentence: str, found: tuple[str, ...]) -> None:
    assert beginnings(sentence) == found


def test_frequent_beginnings_need_sentences_and_traces() -> None:
    seen = Beginnings()
    for _ in range(3):
        seen.add((*EASY, *EASY), Span(0, 10), ENDS)
    assert seen.frequent(sentences=6, traces=3)[0] == "Now"
    assert seen.frequent(sentences=7, traces=3) == ()
    assert seen.frequent(sentences=6, traces=4) == ()


def test_rare_beginnings_are_forgotten_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relaygen.calibration.candidates._MAX_SEEN", 4)
    seen = Beginnings()
    for word in ("A", "B", "C", "D", "E", "F"):
        seen.add((f" {word}", " x", ".", *EASY), Span(0, 8), ENDS)
    assert "Now" in seen.frequent(sentences=2, traces=2)


def test_cues_that_hide_each_other_are_measured_apart() -> None:
    sets = layers(["Now", "Now,", "Thus"])
    assert [cues.words for cues in sets] == [("Now", "Thus"), ("Now,",)]
    assert hidden_by("Now,", ["Now"], CueSet(["Now"])) == "Now"
    assert {"Thus", "Thus,", "thus", "thus,"} <= set(REFERENCE)


# ---- statistics ---------------------------------------------------------------------------------


def test_a_tally_is_a_ratio_of_sums() -> None:
    tally = Tally()
    tally.add(0, 3.0, 4.0)
    tally.add(1, 1.0, 1.0)
    assert (tally.count, tally.mean) == (2, pytest.approx(0.8))
    assert tally.spread == pytest.approx(0.1)
    assert math.isnan(Tally().mean)
    assert math.isnan(Tally().spread)


def test_the_interval_is_of_traces_drawn_as_a_whole() -> None:
    overall, easy, one = Tally(), Tally(), Tally()
    for cluster in range(40):
        overall.add(cluster, float(cluster % 2), 1.0)
        easy.add(cluster, 1.0, 1.0)
    one.add(3, 1.0, 1.0)
    found = compare({"easy": easy, "one": one}, overall, draws=300)
    assert found["easy"].low > 0.3
    assert found["easy"].high < 0.7
    assert found["easy"].p < 0.001
    assert compare({"easy": easy}, overall, draws=300)["easy"] == found["easy"]
    alone = compare({"easy": one}, one, draws=10)["easy"]
    assert (alone.p, math.isnan(alone.low)) == (1.0, True)


def test_equal_means_are_no_difference() -> None:
    same = Tally()
    for cluster in range(5):
        same.add(cluster, 1.0, 1.0)
    found = compare({"same": same}, same, draws=50)["same"]
    assert (found.difference, found.p) == (0.0, 1.0)


def test_holms_correction_by_hand() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert found == {"a": pytest.approx(0.03), "c": pytest.approx(0.06), "b": pytest.approx(0.06)}


# ---- selection ----------------------------------------------------------------------------------


def many(count: int = 20) -> Iterator[Scored]:
    for number in range(count):
        texts = thinking(PLAIN, EASY, HARD, PLAIN)
        wrong = ("2",) if number % 2 else ()
        yield scored(texts, wrong, open_=(" it",), name=str(number))


def chosen(rule: Rule, **more: float) -> Selection:
    choice = Choice(rule=rule, draws=200, **more)  # type: ignore[arg-type]
    sets = layers(["Now", "Also", "Now it", "Well", "Rare"])
    return select(gather(many(), sets, ENDS, Thinking(), choice))


def test_an_easy_cue_is_chosen_and_a_hard_one_is_not() -> None:
    found = {cue.cue: cue for cue in chosen(Rule.SUCCESS).cues}
    assert found["Now"].chosen
    assert found["Now"].hides == ("Now it",)
    assert found["Now it"].why == "merged into 'Now'"
    assert not found["Also"].chosen
    assert "Rare" not in found
    assert found["Now"].count == found["Now"].traces == 20


def test_margins_take_freedom_for_difficulty() -> None:
    assert "Now" not in {cue.cue for cue in chosen(Rule.MARGIN).chosen}


def test_a_cue_must_be_right_often_enough() -> None:
    found = {cue.cue: cue for cue in chosen(Rule.SUCCESS, least=1.0).cues}
    assert found["Now"].why == "too often wrong (below 1)"


def test_what_may_be_chance_is_not_chosen() -> None:
    found = {cue.cue: cue for cue in chosen(Rule.SUCCESS, alpha=0.0).cues}
    assert "may be chance" in found["Now"].why


def test_success_counts_what_the_large_model_was_sure_of() -> None:
    one = scored(EASY, wrong=(" it", "."), open_=(" it",))
    known = [pytest.approx(chance) for chance in (0.995, 0.995, 0.995, 0.4)]
    assert [c for c in chances(one, 0.9) if c is not None] == known
    assert chances(one, 0.9)[1] is None
    assert succeeds(one, Span(0, 4), 0.9) is True
    assert succeeds(one, Span(0, 4), 0.0) is False
    assert succeeds(one, Span(1, 2), 0.9) is None


def test_what_is_unknown_is_not_counted() -> None:
    trace = trace_of(EASY)
    nothing = Scored(trace, Score("1-1", "small", (None,) * 5, (None,) * 5))
    for rule in Rule:
        choice = Choice(rule=rule, occurrences=1, traces=1)
        statistics = gather([nothing], layers(["Now"]), ENDS, Thinking(), choice)
        assert (statistics.unknown, statistics.tallies) == (5, {})
        assert select(statistics).cues == ()


# ---- the reference's rule -----------------------------------------------------------------------


def test_the_references_numbers_by_hand() -> None:
    texts = (" I", " know", " that", ".", " now", " go", "\n", "on")
    margins = (0.5, 0.5, 0.9, 0.7, 0.1, 0.3, 0.2, None)
    one = Scored(trace_of(texts), Score("1-1", "small", margins, (True,) * 8))
    found = ReferenceStatistics(("now", "zzz"), Thinking())
    found.add(one)
    pool = found.pools["now"]
    # in "know": " that" and "."; after " now": " go" and the line end
    assert (pool.segments, pool.traces, pool.tokens) == (2, 1, 4)
    assert pool.mean == pytest.approx((0.9 + 0.7 + 0.3 + 0.2) / 4)
    deviation = math.sqrt(sum((m - 0.525) ** 2 for m in (0.9, 0.7, 0.3, 0.2)) / 3)
    assert pool.error == pytest.approx(deviation / 2)
    assert found.overall.mean == pytest.approx(3.2 / 7)
    assert found.chosen == ("now",)


def test_a_pool_of_nothing_and_of_one() -> None:
    assert math.isnan(Pool().mean)
    assert math.isnan(Pool().error)
    one = Pool()
    one.add([0.5])
    assert math.isnan(one.error)


def test_a_segment_without_an_end_goes_to_the_end() -> None:
    one = Scored(trace_of((" now", " on")), Score("1-1", "small", (0.1, 0.2), (True, True)))
    found = ReferenceStatistics(("now",), Thinking())
    found.add(one)
    assert found.pools["now"].tokens == 1


# ---- projection ---------------------------------------------------------------------------------


def test_the_projection_adds_up() -> None:
    found = replayed(policy("Now", "Also"), list(many()), 0.9)
    assert found.traces == 20
    assert found.large + found.small == 20 * len(thinking(PLAIN, EASY, HARD, PLAIN))
    assert found.quality == pytest.approx(0.5)
    assert 0 < found.large_share < 1
    none = replayed(policy("Never"), list(many(2)), 0.9)
    assert none.handoffs == 2  # the answer


def test_who_writes_the_answer_goes_on() -> None:
    texts = thinking(PLAIN)
    model = {"backend": "x", "model": "m"}
    large = Policy.model_validate(
        {
            "version": 1,
            "name": "p",
            "large": model,
            "small": model,
            "answer": "large",
            "cues": {"words": []},
        }
    )
    assert [span for _, span in roles(large, trace_of(texts))] == [Span(0, len(texts))]
    unclosed = texts[:-3]
    assert [span for _, span in roles(policy(), trace_of(unclosed))] == [Span(0, len(unclosed))]


def test_break_even_by_hand() -> None:
    sums = Replayed(traces=1, large=60, small=40, handoffs=4, segments=2, clean=1)
    speeds = Speeds(large_ms=10.0, small_ms=2.0, handoff_ms=5.0)
    assert sums.break_even_ms(speeds) == pytest.approx(80.0)
    assert sums.speed_up(speeds) == pytest.approx(1000 / (600 + 80 + 20))
    assert sums.speed_up(Speeds(10.0, 2.0, 80.0)) == pytest.approx(1.0)
    assert Replayed().break_even_ms(speeds) is None
    assert (Replayed().speed_up(speeds), Replayed().quality, Replayed().large_share) == (1, 1, 1)
