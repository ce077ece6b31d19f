"""HTTP/1.1 to engines: one connection, whose bytes reach their reader by way of llhttp alone.

An HTTP client for all purposes spends several times as long on a token as all else that the gateway
does with it (docs/performance.md). Here a read costs one call of the parser, and no task or timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from email.message import Message
from functools import partial
from typing import cast

import httptools
from multidict import CIMultiDict

from gateway.errors import UpstreamError

_HIGH_WATER = 256 * 1024
"""Bytes that wait for their reader before the connection is no longer read from."""
_MAX_HEAD = 64 * 1024


class DisconnectedError(Exception):
    """The connection was closed before anything of an answer came."""


class Response:
    """An answer, from its head on."""

    def __init__(self, connection: Connection, status: int, headers: CIMultiDict[str]) -> None:
        self.status = status
        self.headers = headers
        self.read: Callable[[], Awaitable[bytes]] = connection.read
        """What has come of the body; b"" at its end. Raises UpstreamError where it breaks."""

    @property
    def content_type(self) -> str:
        """In lower case, with no parameters."""
        message = Message()
        message["Content-Type"] = self.headers.get("Content-Type", "application/octet-stream")
        return message.get_content_type()

    @property
    def content_length(self) -> int | None:
        told = self.headers.get("Content-Length")
        return int(told) if told is not None else None


class _Answer:
    """One answer being read: what the parser calls. Interim ones (1xx) before it pass by."""

    def __init__(self, *, bodiless: bool) -> None:
        self._bodiless = bodiless
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.chunks: list[bytes] = []
        self.on_body = self.chunks.append
        self.headed = False
        self.complete = False
        self.keeps_alive = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        if self._parser is not None:
            self._parser.feed_data(data)

    def let_go(self) -> None:
        """No more will come. Else it and its parser would hold each other, and wait for the garbage
        collector, with all that they read."""
        self._parser = None

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.add(name.decode("latin-1"), value.decode(errors="surrogateescape"))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        self.headed = self.status >= 200
        if not self.headed:
            self.headers.clear()
        elif self._bodiless:
            self.complete = True

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.complete = self.headed
        self.keeps_alive = self._parser.should_keep_alive()  # it knows for no longer than this

    @property
    def until_closed(self) -> bool:
        """Whether its end is that of the connection."""
        return "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers


class Connection(asyncio.Protocol):
    """One at a time: `send` a request, `read` its body, and then, if `reusable`, the next."""

    def __init__(self, url: str, idle_s: float) -> None:
        self._url = url
        """Of the engine, for messages."""
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._broken: Callable[[], Exception] | None = None
        """Makes the error to be raised: one that is kept would hold all frames that it came by."""
        self._waiting_bytes = 0
        self._paused = False
        self._heard = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self.closed = False

    # ---- a request and its answer ---------------------------------------------------------------

    async def send(self, request: bytes, *, bodiless: bool = False) -> Response:
        """Writes a request and waits for its answer's head."""
        self.write(request, bodiless=bodiless)
        return await self.answer()

    def write(self, request: bytes, *, bodiless: bool = False) -> None:
        """Its `answer` is to be asked for next."""
        assert self._transport is not None
        self._answer = _Answer(bodiless=bodiless)
        self._heard = self._loop.time()
        if self._silence is None:
            self._silence = self._loop.call_later(self._idle_s, self._look)
        self._transport.write(request)

    async def answer(self) -> Response:
        """Raises DisconnectedError where nothing came back, UpstreamError where it broke."""
        answer = self._answer
        assert answer is not None
        while not answer.headed:
            if self._broken is not None:
                raise self._broken()
            await self._wait()
        return Response(self, answer.status, answer.headers)

    async def read(self) -> bytes:
        """What has come of the body since; b"" at its end."""
        answer = self._answer
        assert answer is not None
        chunks = answer.chunks
        while not chunks:
            if answer.complete:
                return b""
            if self._broken is not None:
                raise self._broken()
            await self._wait()
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._waiting_bytes = 0
        if self._paused:
            self._resume()
        return data

    @property
    def under_way(self) -> bool:
        """Whether an answer has begun, and neither ended nor broken."""
        answer = self._answer
        if answer is None or self.closed or self._broken is not None:
            return False
        return answer.headed and not answer.complete

    @property
    def reusable(self) -> bool:
        """Whether the answer is over and the next request may be sent."""
        answer = self._answer
        if self.closed or answer is None or self._broken is not None:
            return False
        return answer.complete and answer.keeps_alive

    def rest(self) -> None:
        """No request is under way: nothing is waited for."""
        if self._answer is not None:
            self._answer.let_go()
        self._answer = None
        self._waiting_bytes = 0
        self._resume()
        self._listen_no_more()

    def close(self) -> None:
        """Ends the connection now: an engine takes that for the end of the request."""
        self.closed = True
        self._listen_no_more()
        if self._answer is not None:  # what came may still be read
            self._answer.let_go()
        if self._transport is not None:
            self._transport.abort()

    def _listen_no_more(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ---- what the transport tells ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its shape alone

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or answer.complete or self._broken is not None:
            self.close()  # nobody asked for it: the next answer would not be ours
            return
        self._heard = self._loop.time()
        try:
            answer.feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(partial(_broke, self._url, f"no HTTP: {error}"))
            return
        self._waiting_bytes += len(data)
        if not answer.headed and self._waiting_bytes > _MAX_HEAD:
            self._fail(partial(_broke, self._url, f"a head of over {_MAX_HEAD} bytes"))
            return
        if self._waiting_bytes > _HIGH_WATER and not self._paused and not answer.complete:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        pass  # the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        answer = self._answer
        if answer is not None and not answer.complete:
            if answer.headed and answer.until_closed and error is None:
                answer.complete = True
            elif self._broken is None:
                self._broken = self._lost(answer, error)
        self._wake()
        self._listen_no_more()

    def _lost(self, answer: _Answer, error: Exception | None) -> Callable[[], Exception]:
        if answer.headed:
            return partial(_cut, self._url)
        if self._waiting_bytes:
            return partial(_broke, self._url, str(error or "closed in the middle of a head"))
        return partial(DisconnectedError, str(error or "closed by the engine"))

    def _fail(self, broken: Callable[[], Exception]) -> None:
        self._broken = self._broken or broken
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused and not self.closed:
            assert self._transport is not None
            self._transport.resume_reading()
            self._heard = self._loop.time()
        self._paused = False

    def _look(self) -> None:
        """Whether the engine has been silent for too long; one that we don't listen to is not."""
        if self._paused:
            self._heard = self._loop.time()
        left = self._heard + self._idle_s - self._loop.time()
        if left > 0:
            self._silence = self._loop.call_later(left, self._look)
            return
        self._silence = None
        self._fail(partial(_silent, self._url))


def _cut(url: str) -> UpstreamError:
    message = f"The engine at {url} cut the connection in the middle of its answer"
    return UpstreamError(message, code="engine_disconnected").of("truncated")


def _broke(url: str, why: str) -> UpstreamError:
    message = f"The connection to the engine at {url} broke: {why}"
    return UpstreamError(message, code="engine_disconnected").of("reset")


def _silent(url: str) -> UpstreamError:
    message = f"The engine at {url} sent nothing for too long (timeouts.idle)"
    return UpstreamError(message, status=504, code="engine_timeout").of("timeout")
