"""Traces and scores as lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.calibration.traces import (
    BadLineError,
    Line,
    Score,
    paired,
    read_scores,
    read_traces,
    to_line,
)
from tests.relaygen.calibration.support import make_scored, make_trace

GOOD = to_line(make_trace([" a", "é"], [0.5, None]))
SCORE = to_line(make_scored([" a", "é"], [0.5, None], [True, None]).score)


def trace_line(**fields: Any) -> str:
    return json.dumps({**json.loads(GOOD), **fields})


def score_line(**fields: Any) -> str:
    return json.dumps({**json.loads(SCORE), **fields})


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.none() | st.floats(0, 1)),
        max_size=6,
    )
)
def test_a_line_is_read_as_it_was_written(tokens: list[tuple[str, float | None]]) -> None:
    texts, margins = [text for text, _ in tokens], [margin for _, margin in tokens]
    scored = make_scored(texts, margins, [m is not None for m in margins], margins)
    [trace] = read_traces([to_line(scored.trace).encode()], "f")
    [score] = read_scores([to_line(scored.score)], "f")
    assert (trace, score) == (scored.trace, scored.score)


def test_a_line_is_one_line() -> None:
    assert "\n" not in to_line(make_trace(["\n\n", "\r"]))


def test_empty_lines_are_none() -> None:
    assert len(list(read_traces(["", GOOD, "  \n", GOOD], "f"))) == 2


def test_ids_may_be_unknown() -> None:
    [trace] = read_traces([trace_line(ids=[])], "f")
    assert trace.ids == ()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "no record of ours"),
        (GOOD[:-9], "no record of ours"),
        ("[1]", "it is no JSON object"),
        ("7", "it is no JSON object"),
        (b'{"id": "\xff"}', "utf-8"),
        ("{}", "field 'version' is missing"),
        (trace_line(version=2), "version 2; this program reads version 1"),
        (json.dumps({"version": 1, "id": "x"}), "field 'question' is missing"),
        (trace_line(texts="ab"), "texts is no list"),
        (trace_line(texts=["a", 1]), "texts has a int in it"),
        (trace_line(ids=["a", "b"]), "ids has a str in it"),
        (trace_line(margins=[0.5]), "different lengths"),
        (trace_line(ids=[1]), "different lengths"),
        (trace_line(margins=[0.5, "x"]), "margins has a str in it"),
        (trace_line(first_s=None), "no record of ours"),
    ],
)
def test_a_bad_line_is_named_with_file_number_and_remedy(line: Line, problem: str) -> None:
    with pytest.raises(BadLineError) as caught:
        list(read_traces([GOOD, line], "traces.jsonl"))
    assert "traces.jsonl, line 2: " in str(caught.value)
    assert problem in str(caught.value)
    assert "--on-bad-line skip" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (score_line(hits=[True]), "margins and hits are of different lengths"),
        (score_line(hits=[1, None]), "hits has a int in it"),
        (score_line(version="1"), "version '1'"),
        (SCORE[:20], "no record of ours"),
    ],
)
def test_a_bad_score_is_named_too(line: str, problem: str) -> None:
    with pytest.raises(BadLineError, match=problem):
        list(read_scores([line], "scores.jsonl"))


def test_what_comes_before_a_bad_line_is_read() -> None:
    traces = read_traces([GOOD, "{"], "f")
    assert next(traces).id == "t"


def test_bad_lines_are_skipped_and_told_on_wish() -> None:
    told: list[str] = []
    traces = list(read_traces(["{", GOOD, "[]", GOOD, GOOD[:30]], "f", "skip", told))
    assert len(traces) == 2
    assert [line.partition(": ")[0] for line in told] == ["f, line 1", "f, line 3", "f, line 5"]
    assert list(read_traces(["{"], "f", "skip")) == []


def test_another_reader_of_json_may_be_used() -> None:
    [trace] = read_traces(["x"], "f", loads=lambda line: json.loads(GOOD))
    assert trace.texts == (" a", "é")


def test_an_error_of_who_reads_the_traces_is_no_bad_line() -> None:
    traces = read_traces([GOOD], "f", "skip")
    next(traces)
    with pytest.raises(KeyError, match="mine"):
        traces.throw(KeyError("mine"))  # type: ignore[attr-defined]


# ---- traces beside scores -----------------------------------------------------------------------


def scores_of(*names: str) -> list[Score]:
    return [make_scored(["a"], name=name).score for name in names]


def test_a_trace_without_a_score_is_left_out() -> None:
    traces = [make_trace(["a"], name=name) for name in "abcd"]
    assert [one.trace.id for one in paired(traces, scores_of("b", "d"))] == ["b", "d"]
    assert [one.trace.id for one in paired(traces, scores_of("a"))] == ["a"]
    assert list(paired(traces, [])) == []


@pytest.mark.parametrize("scores", ["ba", "x", "axb", "abx", "aa"])
def test_scores_out_of_step_are_an_error(scores: str) -> None:
    traces = [make_trace(["a"], name=name) for name in "ab"]
    with pytest.raises(BadLineError, match="no trace has this id, or it is not in the traces'"):
        list(paired(traces, scores_of(*scores)))


def test_a_score_of_another_length_is_an_error() -> None:
    with pytest.raises(BadLineError, match="trace a: it has 2 tokens, its score 1; score it again"):
        list(paired([make_trace(["a", "b"], name="a")], scores_of("a")))
