"""Going on by the chat endpoint of real engines: inside a thought, and with a grammar after it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
from openai import AsyncOpenAI

from gateway.demo.paths import bundled_model
from gateway.demo.problems import problems
from gateway.demo.processes import gateway, llamacpp_engine
from tests.integration.recorder import recorded_engine
from tests.integration.seam import NEAR_TIE, seam
from tests.integration.variants import TEXT, variant
from tests.integration.vllm_server import vllm_engine

# As reasoning models have it: an earlier thought is a field of its own, with line ends beside it.
_THINKS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_SUM = {
    "type": "json_schema",
    "json_schema": {
        "name": "sum",
        "schema": {
            "type": "object",
            "properties": {"value": {"type": "integer"}},
            "required": ["value"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def by_chat(tmp_path: Path) -> list[str]:
    """Flags for a gateway that goes on by chat in both roles."""
    config = tmp_path / "gateway.yaml"
    backends = {role: {"urls": ["http://x/v1"], "continuation": "chat"} for role in _ROLES}
    config.write_text(json.dumps({"backends": backends}))
    return ["--config", str(config)]


_ROLES = ("large", "small")


@asynccontextmanager
async def _clients(
    policy: Path, large: str, small: str, flags: list[str]
) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    async with gateway(policy, large, small, flags=flags) as url:
        yield (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
            AsyncOpenAI(base_url=f"{large}/v1", api_key="none"),
        )


async def _holds(policy: Path, large: str, small: str, flags: list[str], count: int) -> None:
    questions = [problem.question for problem in problems(count, seed=41)]
    async with _clients(policy, large, small, flags) as (relay, engine):
        result = await seam(questions, engine, "tiny-large", relay, "seam")
    assert min(result.handoffs) >= 3
    assert result.worst < NEAR_TIE


async def test_llamacpp_goes_on_by_chat_where_it_was(seam_policy: Path, by_chat: list[str]) -> None:
    async with llamacpp_engine("large") as large, llamacpp_engine("large") as small:
        await _holds(seam_policy, large, small, by_chat, 8)


@pytest.mark.vllm
@pytest.mark.timeout(1000)
async def test_vllm_goes_on_by_chat_where_it_was(seam_policy: Path, by_chat: list[str]) -> None:
    async with vllm_engine("large", core=0) as large, vllm_engine("large", core=1) as small:
        await _holds(seam_policy, large, small, by_chat, 8)


async def test_llamacpp_goes_on_inside_a_thought_that_its_template_keeps_apart(
    seam_policy: Path, by_chat: list[str], tmp_path: Path
) -> None:
    async with _thinking_engine(tmp_path) as engine:
        [question] = [problem.question for problem in problems(1, seed=41)]
        messages: Any = [{"role": "user", "content": question}]
        async with _clients(seam_policy, engine, engine, by_chat) as (relay, alone):
            reply = await relay.chat.completions.create(model="seam", messages=messages)
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            raw = await alone.completions.create(
                model="tiny-large", prompt=prompt, max_tokens=700, temperature=0
            )
    thought = reply.choices[0].message.model_extra["reasoning_content"]
    assert f"<think>{thought}" == raw.choices[0].text.partition("</think>")[0]
    assert reply.usage.model_extra["relaygen"]["handoffs"] >= 3


async def test_a_grammar_holds_for_what_follows_a_relayed_thought(
    seam_policy: Path, tmp_path: Path
) -> None:
    async with _thinking_engine(tmp_path) as engine:
        messages: Any = [{"role": "user", "content": "What is 47*6 + 82*5?"}]
        asked: Any = {"model": "seam", "messages": messages, "response_format": _SUM}
        async with _clients(seam_policy, engine, engine, []) as (relay, _):
            raw = await relay.chat.completions.with_raw_response.create(**asked)
            chunks = await relay.chat.completions.create(stream=True, **asked)
            streamed = [c.choices[0].delta.content or "" async for c in chunks if c.choices]
    assert raw.headers["x-relaygen-mode"] == "relay"
    reply = raw.parse()
    assert set(json.loads(reply.choices[0].message.content)) == {"value"}
    assert json.loads("".join(streamed)) == json.loads(reply.choices[0].message.content)
    assert "Now" in reply.choices[0].message.model_extra["reasoning_content"]
    assert reply.usage.model_extra["relaygen"]["handoffs"] >= 3


@asynccontextmanager
async def _thinking_engine(folder: Path) -> AsyncIterator[str]:
    changed = {gguf.Keys.Tokenizer.CHAT_TEMPLATE: (TEXT, _THINKS)}
    model = variant(bundled_model("large"), folder / "thinks.gguf", changed)
    async with recorded_engine(model, "tiny-large", parallel=4) as (url, _):
        yield url
