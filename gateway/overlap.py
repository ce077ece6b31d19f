"""Overlapped handoffs: the next segment begins while one more token decides whether it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from gateway.begun import Begun, Events
from gateway.extra import Extra
from relaygen.events import DecodeRequest, Event
from relaygen.session import RelaySession

Decode = Callable[[DecodeRequest], AsyncGenerator[Event]]


class Overlap:
    """One session's. Close it to end what still runs."""

    def __init__(self, session: RelaySession, decode: Decode, extra: Extra) -> None:
        self._session = session
        self._decode = decode
        self._extra = extra
        self._begun: Begun | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def received(self) -> None:
        """The session has taken an event."""
        if not self._session.decoding:
            return
        foreseen = self._session.foreseen()
        if foreseen is None:
            self._drop()
        elif self._begun is None:
            self._begun = Begun(foreseen, self._decode(foreseen))

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
