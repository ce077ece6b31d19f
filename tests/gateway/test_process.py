"""`relaygen serve` as a process: its start, its end, and what it tells when it can't start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.gateway.fakes import FakeEngine, FakeVllm, Gate, writes
from tests.gateway.support import (
    GONE_S,
    POLICY,
    USER,
    WAIT_S,
    Stage,
    openai_client,
    policy_of,
    within,
)

START_S = 30.0  # a busy machine's; the start itself is about one second of work


@dataclass(frozen=True)
class Running:
    process: asyncio.subprocess.Process
    seen: list[str]

    async def said(self, event: str) -> dict[str, Any]:
        """The log line with this event, as soon as it is there."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.seen.append(line.decode())
            if line.startswith(b"{") and json.loads(line)["event"] == event:
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"ended without {event!r}: {self.seen}")

    async def ended(self) -> int:
        assert self.process.stderr is not None
        self.seen.append((await within(START_S, self.process.stderr.read())).decode())
        return await within(START_S, self.process.wait())


@asynccontextmanager
async def relaygen(
    *arguments: str, python: tuple[str, ...] = (), env: Mapping[str, str] = {}
) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *python,
        "-m",
        "gateway",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "RELAYGEN_LOG__FORMAT": "json", **env},
        limit=2**20,
        start_new_session=True,
    )
    try:
        yield Running(process, [])
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # its workers as well
            await process.wait()


async def serve(stage: Stage, large: FakeEngine) -> list[str]:
    """Arguments for a gateway before this engine and another."""
    small = FakeVllm(model="tiny")
    await stage.engine(large)
    await stage.engine(small)
    policy = stage.write("policy.yaml", policy_of(large, small))
    return [
        *("serve", "--port", "0", "--policy", str(policy)),
        *("--large", large.url, "--small", small.url),
    ]


async def test_starts_without_the_heavy_libraries(stage: Stage) -> None:
    arguments = await serve(stage, FakeVllm(model="big"))
    async with relaygen(*arguments, python=("-X", "importtime")) as running:
        url = (await within(START_S, running.said("listening")))["url"]
        async with openai_client(url.removesuffix("/v1")) as client:
            reply = await client.chat.completions.create(model=POLICY, messages=USER)
        assert reply.choices[0].message.content == "ok"
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    imported = {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in "".join(running.seen).splitlines()
        if line.startswith("import time:")
    }
    assert "aiohttp" in imported
    assert imported.isdisjoint({"transformers", "openai", "tiktoken", "torch", "jinja2"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_running_generation_finish(stage: Stage, number: int) -> None:
    gate = Gate()
    arguments = await serve(stage, FakeVllm(writes("one", gate, " two"), model="big"))
    async with relaygen(*arguments) as running:
        url = (await within(START_S, running.said("listening")))["url"].removesuffix("/v1")
        async with openai_client(url) as client, openai_client(url) as kept:
            await kept.models.list()
            chunks = await client.chat.completions.create(model=POLICY, messages=USER, stream=True)
            await within(WAIT_S, gate.reached.wait())
            running.process.send_signal(number)
            await within(WAIT_S, running.said("draining"))
            async with openai_client(url) as late:
                with pytest.raises(openai.APIConnectionError):
                    await late.models.list()
            # A connection that was open before is told instead.
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await kept.chat.completions.create(model=POLICY, messages=USER)
            gate.opened.set()
            texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(texts) == "one two"
        assert await running.ended() == 0


async def test_a_generation_that_takes_too_long_is_cut_off(stage: Stage) -> None:
    gate = Gate()
    large = FakeVllm(writes("one", gate), model="big")
    arguments = await serve(stage, large)
    async with relaygen(*arguments, env={"RELAYGEN_TIMEOUTS__DRAIN": "0.1"}) as running:
        url = (await within(START_S, running.said("listening")))["url"].removesuffix("/v1")
        async with openai_client(url) as client:
            chunks = await client.chat.completions.create(model=POLICY, messages=USER, stream=True)
            await within(WAIT_S, gate.reached.wait())
            running.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIConnectionError):
                async for _ in chunks:
                    pass
        assert await running.ended() == 0
    await within(GONE_S, large.decodes[0].left.wait())


async def test_a_port_in_use_is_told(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with relaygen("serve", "--port", str(port)) as running:
            assert await running.ended() == 1
    said = "".join(running.seen)
    assert f"can't listen on 127.0.0.1:{port}" in said
    assert "Traceback" not in said


async def test_a_host_that_is_not_ours_is_told() -> None:
    async with relaygen("serve", "--host", "192.0.2.1", "--port", "0") as running:
        assert await running.ended() == 1
    said = "".join(running.seen)
    assert "can't listen on 192.0.2.1" in said
    assert "Traceback" not in said


async def test_workers_share_a_port_and_end_together(stage: Stage) -> None:
    arguments = await serve(stage, FakeVllm(model="big"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments[arguments.index("--port") + 1] = str(port)
    async with relaygen(*arguments, "--workers", "2") as running:
        for _ in range(2):
            await within(START_S, running.said("listening"))
        async with openai_client(f"http://127.0.0.1:{port}") as client:
            assert (await client.models.list()).data[0].id == POLICY
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
