"""The event stream to a client: begun late, kept alive, broken off where the client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from gateway.wire import Wire

UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Keep proxies, nginx above all, from holding a stream back."""
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", **UNBUFFERED}


class EventStream:
    """Begins with the first thing that is sent: until then every error is a proper HTTP one."""

    def __init__(self, request: web.Request, wire: Wire) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=STREAM_HEADERS)
        self.wire = wire
        self.told = False
        """Whether the client got more than signs of life."""
        self.left = False
        """Whether the client is gone."""
        self.decided = asyncio.Event()
        """Set once nothing but this stream can be the answer: then it is kept alive."""
        self._sends = 0

    @property
    def begun(self) -> bool:
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, data: bytes) -> None:
        if not data:
            return
        if not self.told:
            self.told = True
            await self._write(data)
            return
        self._sends += 1
        try:
            await self._response.write(data)
        except ConnectionError:
            self.left = True

    async def _write(self, data: bytes) -> None:
        self._sends += 1
        try:
            if not self.begun:
                await self._response.prepare(self._request)
            await self._response.write(data)
        except ConnectionError:
            self.left = True

    @asynccontextmanager
    async def kept_alive(self, seconds: float) -> AsyncIterator[None]:
        """Within the block, once decided, the ping is sent after every `seconds` of silence."""
        pinging = asyncio.create_task(self._ping(seconds))
        try:
            yield
        finally:
            pinging.cancel()
            with suppress(asyncio.CancelledError):
                await pinging

    async def _ping(self, seconds: float) -> None:
        await self.decided.wait()
        sends = self._sends
        while not self.left:
            await asyncio.sleep(seconds)
            if sends == self._sends:
                await self._write(self.wire.ping())
            sends = self._sends
