"""Each of the gateway's errors is raised as the type that a client's SDK has for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.clients.support import Client, scripted
from tests.gateway.fakes import Error, FakeVllm, Gate, Script, Tokenizer, writes
from tests.gateway.support import POLICY, USER, WAIT_S, Served, ask, within

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]

KEY = "sk-right"
SDKS = {"openai", "anthropic", "litellm"}
FINE = writes("<think>", "Yes", "</think>")


def pair(script: Script = FINE) -> tuple[FakeVllm, FakeVllm]:
    words = Tokenizer()
    small = FakeVllm(writes("12"), model="tiny", tokenizer=words)
    return FakeVllm(script, model="big", tokenizer=words), small


async def told(client: Client, served: Served, step: str = "create", **more: Any) -> dict[str, Any]:
    asked = {"url": served.url, "key": KEY, "model": POLICY, "messages": USER, **more}
    found: dict[str, Any] = await client(step, **asked)
    return found


def is_raised(found: dict[str, Any], status: int | None, *kinds: str) -> None:
    assert set(found.get("raised", ())) & set(kinds), found
    assert found["packages"][0] in SDKS or set(found["packages"]) & SDKS
    if status:
        assert found["status"] == status


async def test_an_unknown_model(tmp_path: Path, each_client: Client) -> None:
    async with scripted(tmp_path, *pair()) as served:
        found = await told(each_client, served, model="gpt-9")
    is_raised(found, 404, "NotFoundError")
    assert "gpt-9" in found["message"]


async def test_a_wrong_field(tmp_path: Path, each_client: Client) -> None:
    async with scripted(tmp_path, *pair()) as served:
        found = await told(each_client, served, max_tokens=0)
    is_raised(found, 400, "BadRequestError")
    assert "max_tokens" in found["message"] or "max_completion_tokens" in found["message"]


async def test_a_wrong_key(tmp_path: Path, each_client: Client) -> None:
    async with scripted(tmp_path, *pair(), api_keys=(KEY,)) as served:
        wrong = await told(each_client, served, key="sk-wrong")
        right = await told(each_client, served)
    is_raised(wrong, 401, "AuthenticationError")
    assert right["text"] == "12"


async def test_too_many_generations(tmp_path: Path, each_client: Client) -> None:
    gate = Gate()
    limits = {"generations": 1}
    async with scripted(tmp_path, *pair(writes("<think>", gate)), limits=limits) as served:
        first = asyncio.create_task(ask(served))
        await within(WAIT_S, gate.reached.wait())
        found = await told(each_client, served)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
    is_raised(found, 429, "RateLimitError")


@pytest.mark.parametrize("step", ["stream", "helper"])
async def test_an_engine_that_breaks_in_the_middle(
    tmp_path: Path, each_client: Client, step: str
) -> None:
    async with scripted(tmp_path, *pair(writes("<think>", "One", Error("it broke")))) as served:
        found = await told(each_client, served, step)
    is_raised(found, None, "APIError")
    assert "it broke" in found["message"]


async def test_engines_that_are_down(tmp_path: Path, each_client: Client) -> None:
    large, small = pair()
    async with scripted(tmp_path, large, small) as served:
        assert (await told(each_client, served))["text"] == "12"
        await large.stop()
        await small.stop()
        found = await told(each_client, served)
    is_raised(found, None, "InternalServerError", "APIStatusError")
    assert found["status"] >= 500
