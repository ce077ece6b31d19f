"""Traces of the tiny pair on real engines, and scores that agree whoever tells them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.calibrate.files import stream_lines
from gateway.calibrate.scorers import Forcing, LlamaCppScorer
from gateway.calibrate.scoring import ScoreSettings, score
from gateway.calibrate.sides import Side
from gateway.calibrate.tracing import TraceSettings, trace
from gateway.demo.paths import PAIR
from gateway.demo.problems import problems
from gateway.demo.processes import tiny_pair
from relaygen.calibration.traces import Score, Trace, read_scores, read_traces
from tests.integration.vllm_server import ROOT, vllm_engine

CLOSE = 0.02
SHARE = 0.99
_FORWARD = Path(__file__).with_name("forward_margins.py")


async def traced(work: Path, large: str, small: str, prompts: int, samples: int) -> Any:
    path = work / "prompts.jsonl"
    work.mkdir(exist_ok=True)
    asked = [{"question": problem.question} for problem in problems(prompts, seed=1112)]
    path.write_text("".join(json.dumps(one) + "\n" for one in asked))
    settings = TraceSettings(
        work,
        str(path),
        Side(f"{large}/v1", "tiny-large"),
        Side(f"{small}/v1", "tiny-small"),
        samples=samples,
        max_tokens=700,
    )
    return await trace(settings, lambda done, total: None)


async def scored(work: Path, url: str, model: str) -> list[Score]:
    """The traces' scores, made anew."""
    path = work / "scores-small.jsonl"
    path.unlink(missing_ok=True)
    settings = ScoreSettings(work, "small", Side(f"{url}/v1", model))
    result = await score(settings, lambda done, total: None)
    assert result.unknown == 0
    return list(read_scores(stream_lines(path), str(path)))


def traces(work: Path) -> list[Trace]:
    path = work / "traces.jsonl"
    return list(read_traces(stream_lines(path), str(path)))


def agreement(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> tuple[float, float]:
    """The share of tokens whose margins are close, and the largest difference."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    apart = [abs(a - b) for a, b in pairs]
    return sum(difference <= CLOSE for difference in apart) / len(apart), max(apart)


def margins(found: Sequence[Score | Trace]) -> list[Sequence[Any]]:
    return [one.margins for one in found]


async def test_the_tiny_pair_on_llamacpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_pair() as (large, small):
        result = await traced(tmp_path / "work", large, small, prompts=3, samples=1)
        assert result.traces == 3
        assert result.speeds["small_ms"] < result.speeds["large_ms"]
        recorded = traces(tmp_path / "work")
        assert all(one.ids and one.finish == "stop" for one in recorded)
        # The large model as its own scorer says what it said as it wrote.
        own = await scored(tmp_path / "work", large, "tiny-large")
        share, worst = agreement(margins(own), margins(recorded))
        with capsys.disabled():
            print(f"\nlarge model, written and forced: {share:.4f} close, worst {worst:.4f}")
        assert share >= SHARE
        by_ids = await scored(tmp_path / "work", small, "tiny-small")
        monkeypatch.setattr(LlamaCppScorer, "forcing", Forcing.TEXT)
        by_text = await scored(tmp_path / "work", small, "tiny-small")
        assert agreement(margins(by_ids), margins(by_text))[0] >= SHARE
        assert {hit for one in by_ids for hit in one.hits} == {True, False}


@pytest.mark.vllm
@pytest.mark.timeout(1200)
async def test_vllm_llamacpp_and_a_forward_pass_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    async with tiny_pair() as (large, small):
        await traced(work, large, small, prompts=10, samples=2)
        llamacpp = margins(await scored(work, small, "tiny-small"))
    async with vllm_engine("small", core=0) as url:
        vllm = margins(await scored(work, url, "tiny-small"))
    forward = _forward(work)
    found = {
        "vLLM and llama.cpp": agreement(vllm, llamacpp),
        "vLLM and transformers": agreement(vllm, forward),
        "llama.cpp and transformers": agreement(llamacpp, forward),
    }
    with capsys.disabled():
        print(f"\n{sum(map(len, forward))} tokens, margins within {CLOSE}:")
        for name, (share, worst) in found.items():
            print(f"  {name}: {share:.4f}, largest difference {worst:.4f}")
    assert min(share for share, _ in found.values()) >= SHARE


def _forward(work: Path) -> list[Sequence[Any]]:
    with (work / "traces.jsonl").open() as lines:
        done = subprocess.run(
            [str(ROOT / ".venv-vllm/bin/python"), str(_FORWARD), str(PAIR / "small-hf")],
            stdin=lines,
            capture_output=True,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines()]
