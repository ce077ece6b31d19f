"""The select stage on small files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gateway.calibrate import selecting
from gateway.calibrate.selecting import Files, select_by_reference, select_cues
from relaygen.calibration.projection import Replayed
from relaygen.calibration.selection import Choice
from relaygen.calibration.traces import BadLineError, Score, Trace, to_line
from relaygen.policy import Policy

CHOICE = Choice(occurrences=5, traces=5, draws=200)
OPENERS = {"Thus": 1.0, "Zuerst": 1.0, "Hmm": 0.7}  # the scorer's hits; one is not the authors'
TRACES = 12


def policy(**fields: object) -> Policy:
    return Policy.model_validate(
        {
            "version": 1,
            "name": "pair",
            "large": {"backend": "large", "model": "L"},
            "small": {"backend": "small", "model": "S"},
            "cues": {"words": []},
            **fields,
        }
    )


def pair(rng: random.Random, name: str) -> tuple[Trace, Score]:
    texts, hits = ["<think>"], [True]
    for _ in range(8):
        for opener, chance in OPENERS.items():
            sentence = [f" {opener}", " gilt", " es", " größer", "."]
            texts += sentence
            hits += [rng.random() < chance for _ in sentence]
    texts, hits = [*texts, "</think>", " 3"], [*hits, True, False]
    ones = (1.0,) * len(texts)
    ids = tuple(range(len(texts)))
    trace = Trace(name, "?", "?", (1,), tuple(texts), ids, ones, "stop", 0.1, 1.0)
    return trace, Score(name, "small", ones, tuple(hits))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    rng = random.Random(2)
    pairs = [pair(rng, f"t{number}") for number in range(TRACES)]
    found = Files(tmp_path / "traces.jsonl", tmp_path / "scores.jsonl")
    found.traces.write_text("".join(to_line(trace) + "\n" for trace, _ in pairs))
    found.scores.write_text("".join(to_line(score) + "\n" for _, score in pairs))
    return found


def skipping(files: Files) -> Files:
    return Files(files.traces, files.scores, "skip")


def chosen(files: Files, its_policy: Policy | None = None) -> set[str]:
    found = select_cues(files, CHOICE, its_policy or policy())
    return {cue.cue for cue in found.selection.chosen}


def test_cues_of_the_authors_and_of_the_traces_themselves_are_chosen(files: Files) -> None:
    found = select_cues(files, CHOICE, policy())
    assert {cue.cue for cue in found.selection.chosen} == {"Thus", "Zuerst"}
    assert "Hmm" in {cue.cue for cue in found.selection.cues}
    assert (found.selection.traces, found.skipped) == (TRACES, ())
    assert all(cue.hides == (f"{cue.cue} gilt",) for cue in found.selection.chosen)


def test_each_beginning_of_the_list_is_replayed(files: Files) -> None:
    found = select_cues(files, CHOICE, policy(min_large_tokens=0))
    words = [cue.cue for cue in found.selection.chosen]
    assert [cues for cues, _ in found.prefixes] == [(), tuple(words[:1]), tuple(words)]
    alone, _, both = (replayed for _, replayed in found.prefixes)
    assert alone == Replayed(
        traces=TRACES, large=TRACES * 122, small=TRACES, handoffs=TRACES, clean=TRACES
    )
    assert both.segments == TRACES * 16
    assert both.quality == 1.0


def test_only_the_first_traces_are_replayed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "PROJECTED", 3)
    found = select_cues(files, CHOICE, policy())
    assert [replayed.traces for _, replayed in found.prefixes] == [3, 3, 3]


def test_the_thinking_is_the_policys(files: Files) -> None:
    text = files.traces.read_text().replace("think>", "thought>")
    files.traces.write_text(text)
    thinking = {"open": "<thought>", "close": "</thought>"}
    assert chosen(files, policy(thinking=thinking)) == {"Thus", "Zuerst"}


def test_the_boundaries_are_the_policys(files: Files) -> None:
    found = select_cues(files, CHOICE, policy(boundary={"ends": [" gilt"]}))
    assert {cue.tokens for cue in found.selection.cues if cue.cue == "Thus"} == {1.0}


def test_segments_are_no_longer_than_the_policys(files: Files) -> None:
    found = select_cues(files, CHOICE, policy(max_small_tokens=2))
    assert found.selection.choice.longest == 2
    assert {cue.tokens for cue in found.selection.cues if cue.cue == "Thus"} == {2.0}


def test_cues_match_as_the_policys_do(files: Files) -> None:
    text = files.traces.read_text().replace("Thus", "Thusly")
    files.traces.write_text(text)
    assert "Thus" not in chosen(files)
    substring = policy(cues={"match": "substring", "words": []})
    assert "Thus" in chosen(files, substring)


def test_progress_is_told_to_the_end(files: Files) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    select_cues(
        files,
        CHOICE,
        policy(),
        lambda what, done, total: told.setdefault(what, []).append((done, total)),
    )
    size = files.traces.stat().st_size
    assert list(told) == ["sentences", "segments", "projection"]
    assert told["sentences"] == told["segments"]
    assert [total for _, total in told["segments"]] == [size] * TRACES
    assert told["segments"][-1] == (size, size)
    assert told["projection"] == [(n, TRACES) for n in range(1, TRACES + 1)]


# ---- bad lines ----------------------------------------------------------------------------------


def test_a_bad_line_stops_it_by_name(files: Files) -> None:
    files.traces.write_text(files.traces.read_text() + '{"version":1,"id":"torn')
    with pytest.raises(BadLineError, match=rf"{files.traces}, line {TRACES + 1}: "):
        select_cues(files, CHOICE, policy())


def test_skipped_lines_are_told_once(files: Files) -> None:
    files.traces.write_bytes(files.traces.read_bytes() + b'{"version":1,"id":"\xff"}\n{"torn')
    files.scores.write_text(files.scores.read_text() + "[]\n")
    found = select_cues(skipping(files), CHOICE, policy())
    assert [line.partition(": ")[0] for line in found.skipped] == [
        f"{files.scores}, line {TRACES + 1}",
        f"{files.traces}, line {TRACES + 1}",
        f"{files.traces}, line {TRACES + 2}",
    ]
    assert {cue.cue for cue in found.selection.chosen} == {"Thus", "Zuerst"}


def test_a_score_whose_trace_is_not_there_is_an_error(files: Files) -> None:
    lines = files.traces.read_text().splitlines(keepends=True)
    files.traces.write_text("".join(lines[1:]))
    with pytest.raises(BadLineError, match="score t0: no trace has this id"):
        select_cues(files, CHOICE, policy())


def test_traces_not_scored_yet_are_left_out(files: Files) -> None:
    lines = files.scores.read_text().splitlines(keepends=True)
    files.scores.write_text("".join(lines[:10]))
    assert select_cues(files, CHOICE, policy()).selection.traces == 10


def test_no_traces_no_cues(files: Files) -> None:
    files.traces.write_text("")
    files.scores.write_text("")
    found = select_cues(files, CHOICE, policy())
    assert found.prefixes == (((), Replayed()),)


# ---- the reference's rule -----------------------------------------------------------------------


def test_the_references_statistics_are_over_the_same_traces(files: Files) -> None:
    found = select_by_reference(files, policy())
    assert found.traces == TRACES
    assert (found.pools["Thus"].segments, found.pools["Thus"].tokens) == (TRACES * 8, TRACES * 32)
