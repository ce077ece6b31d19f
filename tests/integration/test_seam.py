"""No handoff leaves a trace: one model in both roles writes what it writes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import AsyncOpenAI

from gateway.demo.problems import problems
from gateway.demo.processes import gateway, llamacpp_engine
from tests.integration.seam import NEAR_TIE, Seam, seam
from tests.integration.vllm_server import vllm_engine

PROMPTS = 24


async def _seam(large: str, small: str, policy: Path) -> Seam:
    questions = [problem.question for problem in problems(PROMPTS, seed=2602)]
    async with gateway(policy, large, small) as url:
        relay = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        engine = AsyncOpenAI(base_url=f"{large}/v1", api_key="none")
        return await seam(questions, engine, "tiny-large", relay, "seam")


def _holds(result: Seam, capsys: pytest.CaptureFixture[str], engines: str) -> None:
    with capsys.disabled():
        print(f"\nseam, {engines}: {result}")
    assert min(result.handoffs) >= 3
    assert result.worst < NEAR_TIE


async def test_llamacpp_and_llamacpp(seam_policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with llamacpp_engine("large") as large, llamacpp_engine("large") as small:
        _holds(await _seam(large, small, seam_policy), capsys, "llama.cpp + llama.cpp")


@pytest.mark.vllm
@pytest.mark.timeout(3000)
async def test_vllm_and_vllm_and_vllm_and_llamacpp(
    seam_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with vllm_engine("large", core=0) as large, vllm_engine("large", core=1) as small:
        _holds(await _seam(large, small, seam_policy), capsys, "vLLM + vLLM")
        async with llamacpp_engine("large") as mixed:
            _holds(await _seam(large, mixed, seam_policy), capsys, "vLLM + llama.cpp")
