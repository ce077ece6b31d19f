"""What LangChain's ChatOpenAI can do beside chats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.support import ANSWER, POLICY, QUESTION, Client, Running, client

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]

_SCHEMA = {
    "title": "total",
    "description": "The result.",
    "type": "object",
    "properties": {"total": {"type": "integer"}},
    "required": ["total"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def langchain() -> AsyncIterator[Client]:
    async with client("langchain") as found:
        yield found


def asked(running: Running) -> dict[str, Any]:
    given = {"url": running.url, "key": "any", "model": POLICY, "temperature": 0}
    return {**given, "messages": [{"role": "user", "content": QUESTION}]}


async def test_structured_output(running: Running, langchain: Client) -> None:
    told = await langchain("structured", schema=_SCHEMA, max_tokens=300, **asked(running))
    assert list(told) == ["total"], told
    assert isinstance(told["total"], int)


async def test_responses(running: Running, langchain: Client) -> None:
    told = await langchain("response", **asked(running))
    assert told["text"].endswith(f"is {ANSWER}."), told
    assert told["kinds"] == ["reasoning", "text"]
    assert told["status"] == "completed"
