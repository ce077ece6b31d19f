"""The relay on real engines and the clients, each in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.clients.support import Client, Running, client, tiny_relay

CLIENTS = ("openai_node", "anthropic", "litellm", "langchain")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running() -> AsyncIterator[Running]:
    async with tiny_relay() as found:
        yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=CLIENTS)
async def each_client(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with client(request.param) as found:
        yield found
