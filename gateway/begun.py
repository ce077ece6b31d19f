"""A decode that is asked for before anybody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, Protocol

from gateway.engines.base import ASKED
from relaygen.events import DecodeChunk, DecodeRequest, Event


class Events(Protocol):
    """A decode, open: its events, once, the first of them ASKED. Closing it aborts it upstream."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def __anext__(self) -> Awaitable[Event]: ...
    def aclose(self) -> Coroutine[Any, Any, None]: ...


class Begun:
    """A decode whose first event is being waited for."""

    def __init__(self, request: DecodeRequest, events: Events) -> None:
        self.request = request
        self._events = events
        self._told = False
        self._first: asyncio.Future[Event] | None = asyncio.ensure_future(_first(events))

    def __aiter__(self) -> Begun:
        return self

    async def __anext__(self) -> Event:
        if not self._told:
            self._told = True
            return ASKED
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


async def _first(events: Events) -> Event:
    event = await anext(events)
    return await anext(events) if event is ASKED else event
