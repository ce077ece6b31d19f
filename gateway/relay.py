"""The driver: opens the decodes that a session asks for and feeds it their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Protocol

from gateway.ahead import Ahead
from gateway.begun import Events
from gateway.errors import GatewayError
from gateway.observed import Observed
from relaygen.events import DecodeFailed, Output
from relaygen.session import RelaySession


class Resume(Protocol):
    """Has the session go on after an error, or raises what is to be told instead."""

    def __call__(self, error: GatewayError, *, started: bool) -> Awaitable[list[Output]]: ...


async def relay(
    session: RelaySession, ahead: Ahead, resume: Resume, observed: Observed
) -> AsyncGenerator[list[Output]]:
    """The session's outputs, as each read of a stream brings them.

    Raises GatewayError for what breaks before anything came out; after that the session fails and
    says so itself. Closing it closes the open decode, which aborts it upstream.
    """
    held: list[Output] = []
    async with ahead, _Leaving() as leaving:
        while (request := session.next_decode()) is not None:
            try:
                events = await ahead.open(request)
                leaving.soon(events)
                await anext(events)
                if held:  # the client's turn, now that the next engine is asked
                    outputs, held = held, []
                    yield outputs
                async for event in events:
                    observed.event(request.role, ahead.first_came)
                    outputs = session.receive(event)
                    ahead.received(outputs)
                    first = observed.first_at is None  # the first text of all never waits
                    if not session.decoding:
                        observed.ended(outputs, session.usage)
                    if not session.decoding and not first:
                        held = outputs
                    elif outputs:
                        observed.came()
                        yield outputs
                    if not session.decoding:
                        break
            except GatewayError as error:
                started = observed.first_at is not None
                outputs = await _after(error, session, resume, started=started)
                observed.ended(outputs, session.usage)
                held += outputs
        if held:
            yield held


class _Leaving:
    """Closes each decode when the next one has begun: its request is not to wait for that."""

    def __init__(self) -> None:
        self._decode: Events | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _Leaving:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._decode is not None:
            await self._decode.aclose()
        if self._closing:
            await asyncio.wait(self._closing)

    def soon(self, decode: Events) -> None:
        """The decode to be read now; the one before is closed once this waits for its engine."""
        if self._decode is not None:
            task = asyncio.ensure_future(self._decode.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._decode = decode


async def _after(
    error: GatewayError, session: RelaySession, resume: Resume, *, started: bool
) -> list[Output]:
    try:
        return await resume(error, started=started)
    except GatewayError as last:
        failed = session.receive(DecodeFailed(last.message))
        if not started:
            raise
        return failed
