"""Prefix warming: the engine that waits reads what the other one writes, a piece at a time.

A request for one token has it prefill all so far; at the handoff little is left to be read.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

import structlog

from gateway.errors import GatewayError
from gateway.extra import Extra
from gateway.overlap import Decode
from gateway.pace import Pace
from relaygen.events import DecodeChunk, DecodeRequest, Role
from relaygen.session import RelaySession

log = structlog.get_logger()

_PATIENCE_S = 0.25
"""For which a handoff waits for its engine's warm-up: what that has read is not read twice."""


class Warming:
    """One session's, after every so many tokens. Close it to end what still runs.

    `decode` opens a decode that leaves no other trace in the generation.
    """

    def __init__(
        self, every: int, session: RelaySession, decode: Decode, pace: Pace, extra: Extra
    ) -> None:
        self._every = every
        self._session = session
        self._decode = decode
        self._pace = pace
        self._extra = extra
        self._unread = 0  # tokens that the engine that waits does not know
        self._due = every  # so many of them have it looked at
        self._asked: tuple[Role, int] | None = None
        self._running: asyncio.Task[bool] | None = None

    def received(self, tokens: int) -> None:
        """The session has taken so many."""
        self._unread += tokens
        if self._session.decoding and self._unread >= self._due and self._running is None:
            self._warm_up()

    async def opening(self, request: DecodeRequest, *, begun: bool) -> None:
        """The next decode is to be opened, or has begun: waits for what has it read less."""
        if self._running is not None and not begun:
            await asyncio.wait([self._running], timeout=_PATIENCE_S)
        await self.aclose()
        self._asked = None if begun else (request.role, self._unread)
        self._unread, self._due = 0, self._every

    def first_came(self, seconds: float) -> None:
        """The first event of the decode just opened came, so long after the last of another."""
        if self._asked is not None:
            self._pace.prefilled(*self._asked, seconds)
            self._asked = None

    async def aclose(self) -> None:
        if (running := self._running) is not None:
            running.cancel()
            await asyncio.wait([running])

    def _warm_up(self) -> None:
        request = self._session.warm_up()
        if request is None or not self._pace.warming_pays(request.role, self._every):
            self._due = self._unread + self._every
            return
        self._extra.warm_ups += 1
        self._running = asyncio.ensure_future(self._read(request))
        self._running.add_done_callback(self._over)
        self._unread, self._due = 0, self._every

    async def _read(self, request: DecodeRequest) -> bool:
        """Returns whether it came through."""
        try:
            async with aclosing(self._decode(request)) as events:
                async for event in events:
                    if type(event) is DecodeChunk and event.pieces:
                        self._extra.tokens += sum(piece.tokens for piece in event.pieces)
        except GatewayError as error:
            log.warning("no more warm-ups", role=request.role, error=error.message)
            self._every = self._due = sys.maxsize
            return False
        return True

    def _over(self, running: asyncio.Task[bool]) -> None:
        self._running = None
        self._extra.warm_ups_cut += running.cancelled() or not running.result()
