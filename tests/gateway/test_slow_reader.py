"""A client that stops reading: its engine is slowed, nobody else is, and nothing piles up."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI

from tests.gateway.fakes import Connection, FakeVllm
from tests.gateway.support import POLICY, USER, WAIT_S, Stage, openai_client, within
from tests.gateway.test_process import START_S, relaygen, serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORD = "x" * 8000
WORDS = 1000  # 8 MB of text, thrice that with logprobs: more than the sockets hold
FLOOD = [f" {WORD}"] * WORDS
TEXT = "".join(FLOOD)
BOUND_MIB = 16
"""Growth of the gateway's memory for one such client, far below the flood and its JSON."""
OTHERS = 8
READ_S = 60.0


def script(prompt: str) -> list[str]:
    return FLOOD if "Flood" in prompt else ["Six", " plus", " six", "."]


@dataclass(frozen=True)
class Running:
    url: str
    pid: int
    client: AsyncOpenAI
    large: FakeVllm

    @property
    def memory_mib(self) -> float:
        """The gateway's resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        return int(kib) / 1024

    async def other(self) -> str:
        """A short stream, whole."""
        chunks = await self.client.chat.completions.create(model=POLICY, messages=USER, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def others(self) -> None:
        """Short streams side by side: all come whole."""
        texts = await within(WAIT_S, asyncio.gather(*(self.other() for _ in range(OTHERS))))
        assert texts == ["Six plus six."] * OTHERS


@pytest.fixture
async def running(stage: Stage) -> AsyncIterator[Running]:
    if not Path("/proc/self/status").exists():
        pytest.skip("memory is read from /proc")
    large = FakeVllm(script, model="big", context=100_000)
    async with relaygen(*await serve(stage, large)) as gateway:
        url = (await within(START_S, gateway.said("listening")))["url"].removesuffix("/v1")
        async with openai_client(url) as client:
            yield Running(url, gateway.process.pid, client, large)


@dataclass(frozen=True)
class Slow:
    reader: asyncio.StreamReader
    narrow: socket.socket

    def hurry(self) -> None:
        self.narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)


@asynccontextmanager
async def slow(url: str, path: str, body: dict[str, Any]) -> AsyncIterator[Slow]:
    """Asks, and has next to no room for an answer that is not read."""
    host, content = urlsplit(url), json.dumps(body).encode()
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (host.hostname, host.port))
    reader, writer = await asyncio.open_connection(sock=narrow, limit=2**16)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        yield Slow(reader, narrow)
    finally:
        writer.close()


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """The rest of a chunked answer whose head was read."""
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts)


ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "relayed": (CHAT, {"model": POLICY, "messages": [{"role": "user", "content": "Flood"}]}, 1),
    "two choices": (
        CHAT,
        {"model": POLICY, "messages": [{"role": "user", "content": "Flood"}], "n": 2},
        2,
    ),
    "passed through": (
        COMPLETIONS,
        {"model": "big", "prompt": "Flood", "max_tokens": 9999, "logprobs": 2},
        1,
    ),
}


@pytest.mark.parametrize("name", ASKED)
async def test_a_client_that_stops_reading(running: Running, name: str) -> None:
    path, body, choices = ASKED[name]
    await running.others()  # all is warm
    before = running.memory_mib
    decodes = len(running.large.decodes)
    async with slow(running.url, path, {**body, "stream": True}) as client:
        await within(WAIT_S, client.reader.readuntil(b"\r\n\r\n"))
        flooding = [await running.large.decode(decodes + i) for i in range(choices)]
        connections = [running.large.connections[decode.connection] for decode in flooding]
        for connection in connections:
            await within(WAIT_S, connection.unread.wait())
        await within(READ_S, stuck(running, connections))
        assert all(connection.unread.is_set() for connection in connections)
        grown = running.memory_mib - before
        assert grown < BOUND_MIB * choices
        client.hurry()
        whole = await within(READ_S, body_of(client.reader))
    events = [json.loads(part[6:]) for part in whole.split(b"\n\n") if part.startswith(b"data: {")]
    assert texts_of(events, choices) == [TEXT] * choices
    assert whole.endswith(b"data: [DONE]\n\n")
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == [
        "stop"
    ] * choices


async def stuck(running: Running, connections: list[Connection]) -> None:
    """Returns when the gateway has taken nothing more of these while it served others."""
    left: list[int] = []
    while left != (left := [c.transport.get_write_buffer_size() for c in connections]):
        await running.others()


def texts_of(events: list[dict[str, Any]], choices: int) -> list[str]:
    """The text of each choice."""
    texts: list[list[str]] = [[] for _ in range(choices)]
    for choice in (choice for event in events for choice in event["choices"]):
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        texts[choice["index"]].append(text or "")
    return ["".join(parts) for parts in texts]
