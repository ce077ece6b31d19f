"""Overlapped handoffs: the next segment begins while one more token decides whether it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol

from gateway.extra import Extra
from relaygen.events import DecodeChunk, DecodeRequest, Event
from relaygen.session import RelaySession

Decode = Callable[[DecodeRequest], AsyncGenerator[Event]]


class Events(Protocol):
    """A decode, open: its events, once. Closing it aborts it upstream."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def __anext__(self) -> Awaitable[Event]: ...
    def aclose(self) -> Coroutine[Any, Any, None]: ...


class Overlap:
    """One session's. Close it to end what still runs."""

    def __init__(self, session: RelaySession, decode: Decode, extra: Extra) -> None:
        self._session = session
        self._decode = decode
        self._extra = extra
        self._begun: _Begun | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def received(self) -> None:
        """The session has taken an event."""
        if not self._session.decoding:
            return
        foreseen = self._session.foreseen()
        if foreseen is None:
            self._drop()
        elif self._begun is None:
            self._begun = _Begun(foreseen, self._decode(foreseen))

    def taken(self, request: DecodeRequest) -> Events | None:
        """The decode asked for, if it has begun."""
        begun = self._begun
        if begun is None or begun.request != request:
            self._drop()
            return None
        self._begun = None
        self._extra.overlaps += 1
        return begun

    async def aclose(self) -> None:
        self._drop()
        if self._closing:
            await asyncio.wait(self._closing)

    def _drop(self) -> None:
        if (begun := self._begun) is not None:
            self._begun = None
            self._extra.overlaps_dropped += 1
            self._extra.tokens += begun.tokens
            task = asyncio.ensure_future(begun.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Begun:
    """A decode whose first event is being waited for."""

    def __init__(self, request: DecodeRequest, events: AsyncGenerator[Event]) -> None:
        self.request = request
        self._events = events
        self._first: asyncio.Future[Event] | None = asyncio.ensure_future(anext(events))

    def __aiter__(self) -> _Begun:
        return self

    async def __anext__(self) -> Event:
        if (first := self._first) is not None:
            self._first = None
            return await first
        return await anext(self._events)

    @property
    def tokens(self) -> int:
        """Of the first event, where it came."""
        first = self._first
        if first is None or not first.done() or first.cancelled() or first.exception():
            return 0
        event = first.result()
        return sum(p.tokens for p in event.pieces) if type(event) is DecodeChunk else 0

    async def aclose(self) -> None:
        if (first := self._first) is not None:
            first.cancel()
            await asyncio.wait([first])
            if not first.cancelled():
                first.exception()  # nobody asks for it any more
        await self._events.aclose()
