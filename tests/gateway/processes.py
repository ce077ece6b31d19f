"""`relaygen serve` as a process of its own, and what it says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gateway.fakes import FakeEngine, FakeVllm
from tests.gateway.support import Stage, policy_of, within

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

    async def url(self) -> str:
        """Where it listens, as soon as it does."""
        found: str = (await within(START_S, self.said("listening")))["url"]
        return found.removesuffix("/v1")

    async def ended(self) -> int:
        assert self.process.stderr is not None
        self.seen.append((await within(START_S, self.process.stderr.read())).decode())
        return await within(START_S, self.process.wait())


@asynccontextmanager
async def relaygen(
    *arguments: str,
    python: tuple[str, ...] = (),
    env: Mapping[str, str] = {},
    cwd: Path | None = None,
) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *python,
        "-m",
        "gateway",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "RELAYGEN_LOG__FORMAT": "json", **env},
        cwd=cwd,
        limit=2**20,
        start_new_session=True,
    )
    try:
        yield Running(process, [])
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):  # it may have ended just now, not yet told here
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
