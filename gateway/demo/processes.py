"""Starts engines and the gateway as child processes, and ends them surely.

    async with tiny_pair() as (large, small), gateway(policy, large, small) as url: ...

A child is ended when its block is left, however that happens. Should this process itself be killed,
the pipe that it holds on the child's stdin closes, and the child ends on that.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from gateway.demo.paths import PairRole, bundled_model

HOST = "127.0.0.1"
_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_START_S = 60.0
_POLL_S = 0.05
_LOG_LINES = 20
_PORT_ATTEMPTS = 3


class StartError(Exception):
    """A child did not come up; the message holds the last lines that it wrote."""


class Child:
    """A running child process: reads what it writes, keeps the last lines."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.status = ""
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The address that the child announced on a line `ready URL`."""

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    async def read_output(self) -> None:
        """Reads until the child closes its output, so that it never blocks on a full pipe."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line.startswith("ready ") and not self.url.done():
                self.url.set_result(line.removeprefix("ready "))
            elif line:
                self.log.append(line)

    def failure(self, what: str) -> StartError:
        told = [*self.log, self.status] if self.status else self.log
        lines = "\n".join(f"  {line}" for line in told) or "  (it wrote nothing)"
        return StartError(f"{self.name} {what}; its last lines:\n{lines}")


@asynccontextmanager
async def child(name: str, module: str, *arguments: str) -> AsyncIterator[Child]:
    """Runs `python -m module arguments` in its own session (a terminal's Ctrl-C misses it)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments,
        stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True, env=_environment(),
    )  # fmt: skip
    running = Child(name, process)
    reader = asyncio.create_task(running.read_output())
    try:
        yield running
    finally:
        await _end(process)
        reader.cancel()


def _environment() -> dict[str, str]:
    """Ours, without the settings of a gateway that is no child of the demo."""
    return {key: value for key, value in os.environ.items() if not key.startswith("RELAYGEN_")}


async def _end(process: Process) -> None:
    try:
        with suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


# ---- engines ------------------------------------------------------------------------------------


@asynccontextmanager
async def llamacpp_engine(
    role: PairRole,
    *,
    port: int = 0,
    threads: int = 1,
    prefill_threads: int = 1,
    parallel: int = 4,
    context: int = 2048,
) -> AsyncIterator[str]:
    """One engine of the bundled pair, serving `tiny-large` or `tiny-small`; yields its URL.

    The URL has no path: add `/v1` for an OpenAI client. `context` is tokens for each of the
    `parallel` streams. Raises StartError when the engine does not come up.
    """
    arguments = _flags(
        model=bundled_model(role), alias=f"tiny-{role}", port=port, threads=threads,
        prefill_threads=prefill_threads, parallel=parallel, context=context,
    )  # fmt: skip
    async with child(f"the {role} engine", "gateway.demo.llamacpp", *arguments) as engine:
        yield await started(engine, engine.url)


@asynccontextmanager
async def tiny_pair(*, parallel: int = 4) -> AsyncIterator[tuple[str, str]]:
    """Both engines of the bundled pair; yields (large URL, small URL)."""
    async with (
        llamacpp_engine("large", parallel=parallel) as large,
        llamacpp_engine("small", parallel=parallel) as small,
    ):
        yield large, small


def _flags(**values: object) -> list[str]:
    return [
        part
        for name, value in values.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


# ---- the gateway --------------------------------------------------------------------------------


@asynccontextmanager
async def gateway(
    policy: Path, large: str, small: str, *, port: int = 0, flags: Sequence[str] = ()
) -> AsyncIterator[str]:
    """The gateway in front of two engines (URLs with no path); yields its URL, with no path.

    `port` 0 takes a free one. It is ready when `/readyz` answers 200. Raises StartError when it
    does not get there.
    """
    async with AsyncExitStack() as stack:
        attempts = 1 if port else _PORT_ATTEMPTS
        for left in reversed(range(attempts)):
            chosen = port or free_port()
            arguments = [
                "gateway", "serve", "--host", HOST, "--port", str(chosen), "--policy", str(policy),
                "--large", f"{large}/v1", "--small", f"{small}/v1", *flags,
            ]  # fmt: skip
            server = await stack.enter_async_context(
                child("the gateway", "gateway.demo.tether", *arguments)
            )
            try:
                url = await started(server, ready(server, f"http://{HOST}:{chosen}"))
            except StartError:
                if left and server.ended and port_is_taken(chosen):
                    continue
                raise
            yield url
            return


async def ready(server: Child, url: str) -> str:
    """`url`, once its `/readyz` answers 200; the last other answer is the child's `status`."""
    async with aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return url
                    server.status = f"/readyz: {response.status} {await response.text()}"
            await asyncio.sleep(_POLL_S)


async def started(running: Child, listening: Awaitable[str]) -> str:
    """The child's URL once it listens. Raises StartError when it ends first, or takes too long."""
    waiting = asyncio.ensure_future(listening)
    ended = asyncio.create_task(running.process.wait())
    try:
        await asyncio.wait({waiting, ended}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if ended.done():
            await asyncio.sleep(_POLL_S)  # its last lines are still in the pipe
            raise running.failure(f"ended with status {ended.result()}")
        raise running.failure(f"was not ready within {_START_S:.0f} s")
    finally:
        waiting.cancel()
        ended.cancel()


# ---- ports --------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_taken(port: int) -> bool:
    """Whether 127.0.0.1:port can't be listened on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError:
            return True
    return False
