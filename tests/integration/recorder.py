"""A proxy in front of a real engine: it forwards everything and records the completions.

async with recorded_engine(file, "name") as (url, recorder): ...
async with recording("name", engine) as (url, recorder): ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway.demo.processes import HOST, Child, StartError, child

_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
_START_S = 60.0


@dataclass(slots=True)
class Exchange:
    """One request for /v1/completions: what the engine was given, and what it wrote.

    `answer` is as much as the engine had sent by the time its client left.
    """

    engine: str
    body: dict[str, Any]
    answer: bytearray = field(default_factory=bytearray)

    @property
    def ids(self) -> list[int]:
        """The token ids of the prompt."""
        return [part for part in self._parts if isinstance(part, int)]

    @property
    def prefix(self) -> str:
        """The text that follows the prompt's ids."""
        return "".join(part for part in self._parts if isinstance(part, str))

    @property
    def _parts(self) -> list[int | str]:
        prompt = self.body["prompt"]
        return [prompt] if isinstance(prompt, str) else prompt

    @property
    def written(self) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in self._chunks() if chunk["choices"])

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt by the engine's own count."""
        timings = next(chunk["timings"] for chunk in self._chunks() if "timings" in chunk)
        return int(timings["cache_n"] + timings["prompt_n"])

    def _chunks(self) -> Iterator[dict[str, Any]]:
        *events, _ = self.answer.split(b"\n\n")  # the last one may be cut
        for event in events:
            data = event.removeprefix(b"data: ")
            if data.startswith(b"{"):
                yield json.loads(data)


@dataclass(slots=True)
class Hold:
    """A request is kept from the engine; `left` tells that its client went meanwhile."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        self.reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


class Recorder:
    """`exchanges` are in the order in which the engine was asked; `holds` are by path."""

    def __init__(self, engine: str, upstream: str, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.exchanges: list[Exchange] = []
        self.holds: dict[str, Hold] = {}
        self._upstream = upstream
        self._session = session

    async def forward(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        if hold := self.holds.get(request.path):
            await hold.wait()
        answer = self._record(request.path, content)
        async with self._session.request(
            request.method,
            self._upstream + request.path_qs,
            data=content,
            headers=_end_to_end(request.headers),
        ) as upstream:
            response = web.StreamResponse(
                status=upstream.status, headers=_end_to_end(upstream.headers)
            )
            await response.prepare(request)
            with suppress(ConnectionError):  # the client has read enough
                async for chunk in upstream.content.iter_any():
                    answer += chunk
                    await response.write(chunk)
                await response.write_eof()
        return response

    def _record(self, path: str, content: bytes) -> bytearray:
        if path != "/v1/completions":
            return bytearray()
        exchange = Exchange(self.engine, json.loads(content))
        self.exchanges.append(exchange)
        return exchange.answer


@asynccontextmanager
async def recorded_engine(
    model: Path, name: str, *, parallel: int = 4, context: int = 2048, threads: int = 1
) -> AsyncIterator[tuple[str, Recorder]]:
    """A llama.cpp engine that serves the GGUF file `model` as `name`, behind its recorder.

    Yields the recorder's URL, with no path. `context` is tokens for each of the `parallel` streams.
    """
    flags = {"model": model, "alias": name, "threads": threads, "parallel": parallel}
    flags |= {"context": context}
    arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    async with (
        child(name, "gateway.demo.llamacpp", *arguments) as run,
        recording(name, await listening(run)) as recorded,
    ):
        yield recorded


@asynccontextmanager
async def recording(name: str, engine: str) -> AsyncIterator[tuple[str, Recorder]]:
    """A recorder before the engine with this URL; yields the recorder's, with no path."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        recorder = Recorder(name, engine, session)
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", recorder.forward)
        # Without cancellation a stream that its client left would go on to its next token.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            yield f"http://{HOST}:{runner.addresses[0][1]}", recorder
        finally:
            await runner.cleanup()


async def listening(engine: Child) -> str:
    """The URL of an engine that was just started. Raises StartError where it ends instead."""
    ended = asyncio.ensure_future(engine.process.wait())
    waiting: set[asyncio.Future[Any]] = {engine.url, ended}
    await asyncio.wait(waiting, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not engine.url.done():
        raise StartError(f"{engine.name} did not start: {list(engine.log)}")
    return engine.url.result()


def _end_to_end(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP]
