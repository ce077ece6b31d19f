"""The relay on two real llama.cpp engines, with the openai SDK as its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.demo.ask import Target
from gateway.demo.compare import Plan, compare
from gateway.demo.paths import PAIR, bundled_policy
from gateway.demo.processes import gateway, tiny_pair

QUESTION = [{"role": "user", "content": "What is 47*6 + 82*5 - 19?"}]


@dataclass(frozen=True)
class Running:
    large: str
    small: str
    url: str

    @property
    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with (
        tiny_pair() as (large, small),
        gateway(bundled_policy("tiny-pair"), large, small) as url,
    ):
        yield Running(large, small, url)


async def test_the_small_model_writes_a_good_share_and_costs_no_accuracy(running: Running) -> None:
    plan = Plan(
        large=Target(f"{running.large}/v1", "tiny-large"),
        small=Target(f"{running.small}/v1", "tiny-small"),
        relay=Target(f"{running.url}/v1", "tiny-pair"),
        count=24,
        seed=31,
    )
    found = await compare(plan)
    assert found.relay.small_share >= 0.28
    assert found.relay.right >= found.large.right - 2
    assert found.small.right < found.large.right
    assert found.relay.handoffs >= 4 * 24


async def test_both_models_get_the_system_message_and_the_earlier_turns(running: Running) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        *QUESTION,
    ]
    reply = await running.client.chat.completions.create(model="tiny-pair", messages=messages)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    async with aiohttp.ClientSession() as session:
        body = {"content": text + "<|im_start|>assistant\n"}
        async with session.post(f"{running.large}/tokenize", json=body) as response:
            ids = (await response.json())["tokens"]
    assert reply.usage.prompt_tokens == len(ids)
    assert reply.usage.model_extra["relaygen"]["handoffs"] > 0


@pytest.mark.parametrize("role", ["large", "small"])
async def test_the_engines_are_idle_within_a_second_of_the_client_leaving(
    running: Running, role: str
) -> None:
    ask = {"relaygen": {"mode": role}, "ignore_eos": True}
    stream = await running.client.chat.completions.create(
        model="tiny-pair", messages=QUESTION, stream=True, max_tokens=1900, extra_body=ask
    )
    async for _ in stream:
        break
    engine = running.large if role == "large" else running.small
    assert await _busy(engine)
    await stream.close()
    async with asyncio.timeout(1.0):
        while await _busy(engine):
            await asyncio.sleep(0.01)


async def test_a_local_tokenizer_renders_what_the_engine_renders(
    running: Running, tmp_path: Path
) -> None:
    policy = tmp_path / "local.yaml"
    text = bundled_policy("tiny-pair").read_text()
    for role in ("large", "small"):
        text = text.replace(
            f"model: tiny-{role}}}", f"model: tiny-{role}, tokenizer: {PAIR / f'{role}-hf'}}}"
        )
    policy.write_text(text.replace("name: tiny-pair", "name: local"))
    async with gateway(policy, running.large, running.small) as url:
        local = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        theirs = await local.chat.completions.create(model="local", messages=QUESTION)
        ours = await running.client.chat.completions.create(model="tiny-pair", messages=QUESTION)
    assert theirs.choices[0].message == ours.choices[0].message
    assert theirs.usage.prompt_tokens == ours.usage.prompt_tokens


async def _busy(engine: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{engine}/slots") as response:
        return any(slot["is_processing"] for slot in await response.json())
