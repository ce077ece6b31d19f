"""Traces over real sockets: what is recorded, what is asked again, what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gateway.calibrate.files import WorkFolderError, stream_lines
from gateway.calibrate.sides import Side
from gateway.calibrate.tracing import TraceResult, TraceSettings, trace
from gateway.errors import GatewayError, RequestError
from relaygen.calibration.traces import BadLineError, Trace, read_traces
from tests.gateway.calibrate.conftest import QUESTIONS
from tests.gateway.calibrate.engines import ScoringVllm, words
from tests.gateway.fakes import (
    Error,
    FakeHosted,
    FakeLlamaCpp,
    FakeSglang,
    FakeTgi,
    Fin,
    Gate,
    Reset,
    writes,
)
from tests.gateway.fakes.script import Act

COUNT = 2 * len(QUESTIONS)
IDS = [f"{prompt}-{sample}" for prompt in range(1, len(QUESTIONS) + 1) for sample in (1, 2)]


def traces(settings: TraceSettings) -> list[Trace]:
    path = settings.work / "traces.jsonl"
    return list(read_traces(stream_lines(path), str(path)))


def timeless(path: Path) -> list[dict[str, Any]]:
    """A file's records without the times, which no two runs share."""
    return [{**json.loads(t), "first_s": 0, "total_s": 0} for t in path.read_text().splitlines()]


async def recorded(settings: TraceSettings) -> TraceResult:
    return await trace(settings, lambda done, total: None)


async def test_every_token_with_its_id_and_margin(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    given, seen = settings(large), list[tuple[int, int]]()
    result = await trace(given, lambda done, total: seen.append((done, total)))
    found = traces(given)
    assert [t.id for t in found] == IDS
    assert (result.traces, result.asked, result.refused) == (COUNT, COUNT, 0)
    assert seen == [(done, COUNT) for done in range(COUNT + 1)]
    one = found[0]
    assert one.question == QUESTIONS[0]
    assert "".join(one.texts) == "".join(words(one.prompt))
    assert [large.tokenizer.piece(i).decode() for i in one.ids] == list(one.texts)
    assert one.prompt == large.tokenizer.decode(one.prompt_ids)
    assert one.finish == "stop"  # whose token is no text, and no token of the trace
    assert one.margins[0] == pytest.approx(0.778801 - 0.135335, abs=2e-6)
    assert 0 < one.first_s <= one.total_s


async def test_a_seed_for_each_sample(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    await recorded(settings(large, seed=100, temperature=0.6, sampling={"top_p": 0.9}))
    bodies = [request.body for request in large.decodes]
    assert sorted(body["seed"] for body in bodies) == list(range(100, 100 + COUNT))
    assert {(body["temperature"], body["top_p"]) for body in bodies} == {(0.6, 0.9)}


async def test_no_more_at_once_than_told(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    large.delay_s = 0.02
    await recorded(settings(large, concurrency=3))
    assert large.most == 3


async def test_the_order_is_the_prompts_whichever_is_done_first(run: Any, settings: Any) -> None:
    gate = Gate()

    def script(prompt: str) -> Iterable[Act]:
        return [*([gate] if QUESTIONS[0] in prompt else []), *words(prompt)]

    large = await run(ScoringVllm(script))
    given = settings(large, concurrency=3)
    task = asyncio.create_task(recorded(given))
    waiting = given.work / "traces.jsonl.waiting"
    while not waiting.exists() or waiting.read_text().count("\n") < COUNT - 2:
        await asyncio.sleep(0.01)
    assert (given.work / "traces.jsonl").read_text() == ""
    gate.opened.set()
    await task
    assert [t.id for t in traces(given)] == IDS
    assert not waiting.exists()


@pytest.mark.parametrize("breaks", [Reset(), Fin(), Error("queue full", 429), Error("x", 500)])
async def test_what_breaks_is_asked_again(run: Any, settings: Any, breaks: Act) -> None:
    broken = set[str]()

    def script(prompt: str) -> Iterable[Act]:
        if prompt not in broken:
            broken.add(prompt)
            return ["<think>", "We", breaks]
        return words(prompt)

    large = await run(ScoringVllm(script))
    given = settings(large)
    result = await recorded(given)
    assert ["".join(t.texts) for t in traces(given)] == ["".join(words(q)) for q in _prompts(given)]
    assert any("asking again for up to" in note for note in result.notes)


def _prompts(settings: TraceSettings) -> list[str]:
    return [one.prompt for one in traces(settings)]


async def test_an_engine_that_is_away_for_a_while(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    large.delay_s = 0.05
    given = settings(large, concurrency=2)
    task = asyncio.create_task(recorded(given))
    while len(large.decodes) < 3:
        await asyncio.sleep(0.01)
    await large.stop()
    await asyncio.sleep(0.3)
    await large.start()
    assert (await task).traces == COUNT


async def test_an_engine_that_stays_away(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    large.refusals["/v1/completions"] = (503, b'{"error": {"message": "loading"}}')
    with pytest.raises(GatewayError, match="loading"):
        await recorded(settings(large, patience_s=0.2))


async def test_a_prompt_that_is_refused_is_left_out(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    longest = large.rendered([{"role": "user", "content": QUESTIONS[0]}])
    large.context = len(large.tokenizer.encode(longest))
    given = settings(large, concurrency=1)
    result = await recorded(given)
    assert [t.id for t in traces(given)] == IDS[2:]
    assert (result.traces, result.refused) == (COUNT - 2, 2)
    assert [note.partition(",")[0] for note in result.notes] == [
        "prompt 1-1 was refused",
        "prompt 1-2 was refused",
    ]
    large.context = 4096
    await recorded(given)
    assert [t.id for t in traces(given)] == IDS


async def test_what_nobody_may_ask_is_an_error(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    large.refusals["/v1/completions"] = (400, b'{"error": {"message": "bad temperature"}}')
    with pytest.raises(RequestError, match="bad temperature"):
        await recorded(settings(large))


async def test_a_model_that_is_not_served(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words, model="other"))
    with pytest.raises(RequestError, match="serves no model 'model', but: other"):
        await recorded(settings(large))


async def test_another_temperature_in_the_same_folder(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    await recorded(settings(large))
    with pytest.raises(WorkFolderError, match=r"temperature: 0 then, 0\.5 now"):
        await recorded(settings(large, temperature=0.5))


async def test_a_second_run_asks_nothing(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    await recorded(settings(large))
    asked = len(large.decodes)
    assert (await recorded(settings(large))).traces == COUNT
    assert len(large.decodes) == asked


async def test_a_corrupt_trace_is_named_and_made_anew_when_deleted(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    given = settings(large)
    await recorded(given)
    path = given.work / "traces.jsonl"
    expected = timeless(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "{broken\n", *lines[4:]]))
    with pytest.raises(BadLineError, match=r"traces\.jsonl, line 4"):
        await recorded(given)
    path.write_text("".join([*lines[:3], *lines[4:]]))
    await recorded(given)
    assert timeless(path) == expected


def slowly(prompt: str) -> Iterable[Act]:
    """A token every two milliseconds."""
    for number in range(1, 13):
        gate = Gate()
        asyncio.get_running_loop().call_later(0.002 * number, gate.opened.set)
        yield gate
        yield " word"


async def test_speeds_are_measured_once(run: Any, settings: Any) -> None:
    large, small = await run(ScoringVllm(slowly)), await run(FakeLlamaCpp(slowly))
    given = settings(large, small=Side(small.url, "model"))
    speeds = (await recorded(given)).speeds
    assert speeds is not None
    assert 1 < speeds["large_ms"] < 20
    assert 1 < speeds["small_ms"] < 20
    assert speeds["handoff_ms"] >= 0
    asked = len(small.decodes)
    assert (await recorded(given)).speeds == speeds
    assert len(small.decodes) == asked


async def test_a_small_model_that_is_away_costs_only_the_speeds(run: Any, settings: Any) -> None:
    large = await run(ScoringVllm(words))
    given = settings(large, small=Side("http://127.0.0.1:9/v1", "model"))
    result = await recorded(given)
    assert (result.traces, result.speeds) == (COUNT, None)
    assert "the next run does it" in result.notes[-1]


@pytest.mark.parametrize("kind", [FakeLlamaCpp, FakeSglang, FakeTgi])
async def test_the_other_engines(run: Any, settings: Any, kind: Any) -> None:
    large = await run(kind(words))
    given = settings(large)
    if kind is FakeTgi:
        given = TraceSettings(**{**_fields(given), "large": Side(large.url, "tgi")})
    await recorded(given)
    for one in traces(given):
        assert "".join(one.texts) == "".join(words(one.prompt))
        assert [large.tokenizer.piece(i).decode() for i in one.ids] == list(one.texts)


def _fields(settings: TraceSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in TraceSettings.__slots__}


async def test_a_hosted_api(run: Any, settings: Any) -> None:
    large = await run(FakeHosted(writes("<think>", "Well", "</think>", "Yes", ".")))
    given = settings(large)
    side = Side(large.url, "model", "openai")
    given = TraceSettings(**{**_fields(given), "large": side})
    await recorded(given)
    assert {"".join(one.texts) for one in traces(given)} == {"<think>Well</think>Yes."}


async def test_characters_of_several_tokens(run: Any, settings: Any) -> None:
    tokens = ["Hi", *[bytes([b]) for b in "🎉".encode()], "."]
    for engine in (ScoringVllm(writes(*tokens)), FakeLlamaCpp(writes(*tokens))):
        large = await run(engine)
        given = settings(large, limit=1)
        given = TraceSettings(
            **{**_fields(given), "work": given.work / large.listing()["owned_by"]}
        )
        await recorded(given)
        one = traces(given)[0]
        assert one.texts == ("Hi", "", "", "", "🎉", ".")
        assert len(one.ids) == 6


async def test_probabilities_after_sampling_are_told(run: Any, settings: Any) -> None:
    large = await run(FakeSglang(words))
    result = await recorded(settings(large, temperature=0.6))
    assert "after temperature 0.6" in str(result.notes)
    meta = json.loads((settings(large).work / "meta.json").read_text())
    assert meta["large"]["margins"] == "after sampling"


async def test_killed_at_any_moment_it_goes_on(
    run: Any, settings: Any, prompts: Path, tmp_path: Path
) -> None:
    large = await run(ScoringVllm(words))
    await recorded(settings(large))
    expected = timeless(settings(large).work / "traces.jsonl")
    large.delay_s = 0.03
    work = tmp_path / "killed"
    given = {"stage": "trace", "url": large.url, "work": str(work), "prompts": str(prompts)}
    for lines in (1, 5):
        await killed_after(given, work / "traces.jsonl", lines)
        assert len((work / "traces.jsonl").read_text().splitlines()) < COUNT
    asked = len(large.decodes)
    assert await finished(given) == 0
    assert len(large.decodes) - asked <= COUNT - 5
    assert timeless(work / "traces.jsonl") == expected


async def killed_after(given: dict[str, str], path: Path, lines: int) -> None:
    """Runs a stage, and kills it when its file has so many lines."""
    process = await _started(given)
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.returncode is None
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def finished(given: dict[str, str]) -> int:
    return await (await _started(given)).wait()


async def _started(given: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gateway.calibrate.stage", json.dumps(given)
    )
