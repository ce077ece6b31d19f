"""`relaygen calibrate` on two real engines: from prompts to a policy, in one command."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.demo.problems import problems
from gateway.demo.processes import tiny_pair
from gateway.policies import read_policy

PROMPTS = 40
# Of the pair's README: sentences that begin so the small model always ends rightly, given a true
# beginning; and those in which it goes wrong.
EASY = {"Hence", "Thus", "So", "Wait", "First", "To", "Then", "Next", "After", "Therefore", "Now"}
HARD = {"Also", "But", "Let", "Let me", "I", "It", "It is"}


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[tuple[str, str]]:
    async with tiny_pair() as urls:
        yield urls


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    asked = problems(PROMPTS, seed=2602)
    path.write_text("".join(json.dumps({"question": p.question}) + "\n" for p in asked))
    return path


async def calibrate(engines: tuple[str, str], prompts: Path, out: Path, *more: str) -> str:
    """What the command says. It must succeed."""
    large, small = (f"{url}/v1" for url in engines)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "calibrate", *more),
        *("--large", large, "--small", small, "--prompts", str(prompts), "--out", str(out)),
        *("--samples", "1", "--temperature", "0", "--max-tokens", "1000"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told.decode()


async def test_it_finds_easy_cues_and_no_hard_one(
    engines: tuple[str, str], prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.yaml"
    told = await calibrate(engines, prompts, out)
    policy = read_policy(out)
    chosen = set(policy.cues.words)
    assert len(chosen & EASY) >= 4
    assert not chosen & HARD
    assert policy.calibration["expected"]["small_share"] >= 0.28
    assert (policy.large.model, policy.small.model) == ("tiny-large", "tiny-small")
    assert "report.html" in told
    page = tmp_path / "found.calibration" / "report" / "report.html"
    assert all(cue in page.read_text() for cue in chosen)
    await _a_second_run_changes_nothing(engines, prompts, out)


async def _a_second_run_changes_nothing(engines: tuple[str, str], prompts: Path, out: Path) -> None:
    work = out.with_name("found.calibration")
    before = {path.name: path.read_bytes() for path in work.glob("*.jsonl")}
    policy = out.read_text()
    await calibrate(engines, prompts, out)
    assert {path.name: path.read_bytes() for path in work.glob("*.jsonl")} == before
    assert out.read_text() == policy
