"""Scores over real sockets, by every dialect that tells them, against the made-up model itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.calibrate.files import stream_lines
from gateway.calibrate.scorers import UNKNOWN, Value, grammar_string
from gateway.calibrate.scoring import ScoreResult, ScoreSettings, score
from gateway.calibrate.sides import Side
from gateway.calibrate.tracing import TraceSettings, trace
from gateway.errors import GatewayError, RequestError
from relaygen.calibration.margins import margin
from relaygen.calibration.traces import (
    BadLineError,
    Score,
    Trace,
    paired,
    read_scores,
    read_traces,
)
from tests.gateway.calibrate.engines import (
    ScoringLlamaCpp,
    ScoringSglang,
    ScoringVllm,
    judged,
    words,
)
from tests.gateway.calibrate.test_tracing import COUNT, finished, killed_after
from tests.gateway.fakes import FakeHosted, FakeTgi, Tokenizer

Scoring = ScoringVllm | ScoringSglang | ScoringLlamaCpp


@pytest.fixture
async def large(run: Any) -> ScoringVllm:
    engine: ScoringVllm = await run(ScoringVllm(words))
    return engine


@pytest.fixture
async def work(large: ScoringVllm, settings: Any) -> Path:
    """A folder with traces."""
    given: TraceSettings = settings(large)
    await trace(given, lambda done, total: None)
    return given.work


async def scored(work: Path, small: Any, **changes: Any) -> ScoreResult:
    side = Side(small.url, small.model)
    settings = ScoreSettings(work, "small", side, **{"patience_s": 5.0, **changes})
    return await score(settings, lambda done, total: None)


def traces(work: Path) -> list[Trace]:
    path = work / "traces.jsonl"
    return list(read_traces(stream_lines(path), str(path)))


def scores(work: Path, scorer: str = "small") -> list[Score]:
    path = work / f"scores-{scorer}.jsonl"
    return list(read_scores(stream_lines(path), str(path)))


def expected(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[Value]:
    """What the made-up model says at each token."""
    values = []
    for at, token in enumerate(ids):
        top = judged(tokenizer, [*prompt, *ids[:at]], token)
        found = margin([lp for _, lp in top])
        assert found is not None
        values.append(Value(round(found, 6), top[0][0] == token))
    return values


def values(one: Score) -> list[Value]:
    return [Value(m, hit) for m, hit in zip(one.margins, one.hits, strict=True)]


def agrees(work: Path, tokenizer: Tokenizer) -> None:
    found = list(paired(traces(work), scores(work)))
    assert len(found) == COUNT
    for one in found:
        of_trace = one.trace
        assert values(one.score) == expected(tokenizer, of_trace.prompt_ids, of_trace.ids)
    assert {hit for one in scores(work) for hit in one.hits} == {True, False}


@pytest.mark.parametrize("kind", [ScoringVllm, ScoringSglang, ScoringLlamaCpp])
async def test_every_token_is_judged_after_all_before_it(
    run: Any, large: ScoringVllm, work: Path, kind: Any
) -> None:
    small = await run(kind(words, tokenizer=large.tokenizer))
    taught(small, work)
    result = await scored(work, small)
    agrees(work, large.tokenizer)
    assert small.judging == COUNT  # one request a trace
    assert (result.scores, result.traces, result.unknown) == (COUNT, COUNT, 0)
    assert "by the traces' own token ids" in result.how


def taught(small: Any, work: Path) -> None:
    if isinstance(small, ScoringLlamaCpp):
        for one in traces(work):
            small.learn(one.prompt_ids, one.ids)


@pytest.mark.parametrize("splits", [None, " So", "</think>"])
async def test_llamacpp_without_ids_in_grammars(
    run: Any, large: ScoringVllm, work: Path, splits: str | None
) -> None:
    small = await run(ScoringLlamaCpp(words, tokenizer=large.tokenizer))
    small.knows_ids, small.splits = False, splits
    taught(small, work)
    await scored(work, small)
    agrees(work, large.tokenizer)
    # Two more for the refusal of ids, and one where the text came out as other tokens.
    assert small.judging <= COUNT * (2 if splits else 1) + 4


async def test_llamacpp_without_any_grammar(run: Any, large: ScoringVllm, work: Path) -> None:
    small = await run(ScoringLlamaCpp(words, tokenizer=large.tokenizer))
    small.knows_ids = small.knows_text = False
    taught(small, work)
    await scored(work, small)
    agrees(work, large.tokenizer)


async def test_llamacpp_scores_parts_of_characters_after_what_is_before_them(
    run: Any, large: ScoringVllm, settings: Any
) -> None:
    tokens = ["Hi", *[bytes([b]) for b in "🎉".encode()], " you", "."]
    large.script = lambda prompt: tokens
    given: TraceSettings = settings(large, limit=1, samples=1)
    await trace(given, lambda done, total: None)
    small = await run(ScoringLlamaCpp(words, tokenizer=large.tokenizer))
    taught(small, given.work)
    await scored(given.work, small)
    one, of_trace = scores(given.work)[0], traces(given.work)[0]
    right = expected(large.tokenizer, of_trace.prompt_ids, of_trace.ids)
    assert len(right) == 7
    for found, value in zip(values(one), right, strict=True):
        assert found in (value, UNKNOWN)  # where the likeliest one is a part too, none is told
    assert values(one)[:2] == right[:2]
    assert values(one)[-1] == right[-1]


async def test_no_probabilities_are_unknown_and_never_sure(
    run: Any, large: ScoringVllm, work: Path
) -> None:
    small = await run(ScoringLlamaCpp(words, tokenizer=large.tokenizer))
    small.unsure = True
    result = await scored(work, small)
    assert {m for one in scores(work) for m in (*one.margins, *one.hits)} == {None}
    assert result.unknown == result.tokens > 0
    assert "tokens have no score" in result.notes[-1]


async def test_another_vocabulary_is_scored_by_text(run: Any, work: Path) -> None:
    small = await run(ScoringVllm(words, tokenizer=Tokenizer(offset=50_000)))
    result = await scored(work, small)
    assert "by text: its vocabulary is another one" in result.how
    for one, of_trace in zip(scores(work), traces(work), strict=True):
        text = "".join(of_trace.texts)
        prompt = small.tokenizer.encode(of_trace.prompt)
        ids = small.tokenizer.encode(text)
        # The fake tokenizers cut alike: only the numbers are others.
        assert values(one) == expected(small.tokenizer, prompt, ids)


async def test_what_is_beyond_the_context_is_unknown(
    run: Any, large: ScoringVllm, work: Path
) -> None:
    small = await run(ScoringVllm(words, tokenizer=large.tokenizer))
    one = traces(work)[0]
    small.context = len(one.prompt_ids) + 5
    result = await scored(work, small)
    found = values(scores(work)[0])
    assert found[:4] == expected(large.tokenizer, one.prompt_ids, one.ids)[:4]
    assert set(found[4:]) == {UNKNOWN}
    assert f"{result.unknown} of {result.tokens} tokens have no score" in result.notes


async def test_the_large_models_own_margins(work: Path) -> None:
    result = await score(ScoreSettings(work, "large"), lambda done, total: None)
    assert "own margins as it wrote" in result.how
    for one, of_trace in zip(scores(work, "large"), traces(work), strict=True):
        assert one.margins == of_trace.margins
        assert set(one.hits) == {True}
    assert result.notes[0].startswith("scored by the large model's own margins")


@pytest.mark.parametrize("kind", [FakeTgi, FakeHosted])
async def test_engines_that_tell_nothing_of_a_given_text(run: Any, work: Path, kind: Any) -> None:
    small = await run(kind(words))
    side = Side(
        small.url, "tgi" if kind is FakeTgi else "model", "auto" if kind is FakeTgi else "openai"
    )
    with pytest.raises(RequestError, match="take `--scorer large`"):
        await score(ScoreSettings(work, "small", side), lambda done, total: None)


async def test_no_more_at_once_than_told(run: Any, large: ScoringVllm, work: Path) -> None:
    small = await run(ScoringVllm(words, tokenizer=large.tokenizer))
    small.delay_s = 0.02
    await scored(work, small, concurrency=2)
    assert small.most == 2


async def test_an_overloaded_scorer_is_asked_again(
    run: Any, large: ScoringVllm, work: Path
) -> None:
    small = await run(ScoringVllm(words, tokenizer=large.tokenizer))
    small.refusals["/v1/completions"] = (503, b'{"error": {"message": "loading"}}')

    def loaded(note: str) -> None:
        assert "loading; asking again" in note
        small.refusals.clear()

    settings = ScoreSettings(work, "small", Side(small.url, "model"))
    await score(settings, lambda done, total: None, loaded)
    agrees(work, large.tokenizer)


async def test_a_scorer_that_answers_oddly(run: Any, large: ScoringVllm, work: Path) -> None:
    small = await run(ScoringVllm(words, tokenizer=large.tokenizer))
    small._entry = lambda ids, at: {"x": 1}  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(GatewayError, match="no scores that can be read"):
        await scored(work, small, patience_s=0.1)


async def test_a_corrupt_trace_is_named_or_left_out(
    run: Any, large: ScoringVllm, work: Path
) -> None:
    small = await run(ScoringVllm(words, tokenizer=large.tokenizer))
    path = work / "traces.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    broken = [lines[0], "{broken\n", json.dumps({"id": "2-1", "version": 1}) + "\n", *lines[3:]]
    path.write_text("".join(broken))
    with pytest.raises(BadLineError, match=r"traces\.jsonl, line 2"):
        await scored(work, small)
    result = await scored(work, small, on_bad="skip")
    assert len(scores(work)) == COUNT - 2
    assert "line 3: field 'texts' is missing" in str(result.notes) or "line 3" in str(result.notes)


async def test_killed_at_any_moment_it_goes_on(
    run: Any, large: ScoringVllm, work: Path, prompts: Path
) -> None:
    small = await run(ScoringVllm(words, tokenizer=large.tokenizer))
    await scored(work, small)
    path = work / "scores-small.jsonl"
    whole = path.read_text()
    path.unlink()
    small.delay_s = 0.03
    given = {"stage": "score", "url": small.url, "work": str(work), "prompts": str(prompts)}
    for lines in (1, 5):
        await killed_after(given, path, lines)
        assert path.read_text().count("\n") < COUNT
    assert await finished(given) == 0
    assert path.read_text() == whole


def test_a_text_as_a_grammars_literal() -> None:
    assert grammar_string('a "b" \\c\n\t\b\x7f é🎉') == '"a \\"b\\" \\\\c\\n\\t\\x08\x7f é🎉"'
