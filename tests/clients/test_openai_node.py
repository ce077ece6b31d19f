"""What the openai package of npm can do beside chats."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.clients.support import ANSWER, POLICY, QUESTION, Client, Running, client

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node() -> AsyncIterator[Client]:
    async with client("openai_node") as found:
        yield found


async def test_completions(running: Running, node: Client) -> None:
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    asked = {"model": POLICY, "prompt": prompt, "temperature": 0, "max_tokens": 1024}
    told = await node("completion", url=running.url, key="any", **asked)
    assert told["text"].startswith("<think>")
    assert told["text"].endswith(f"is {ANSWER}.")
    assert told["finish"] == "stop"


async def test_responses(running: Running, node: Client) -> None:
    asked = {"model": POLICY, "input": QUESTION, "temperature": 0}
    told = await node("response", url=running.url, key="any", **asked)
    assert told["text"].endswith(f"is {ANSWER}."), told
    assert told["status"] == "completed"
    assert told["items"] == ["reasoning", "message"]
    assert told["kinds"][0] == "response.created"
    assert told["kinds"][-1] == "response.completed"


async def test_models(running: Running, node: Client) -> None:
    assert await node("models", url=running.url, key="any") == [POLICY, "tiny-large", "tiny-small"]
