"""The driver: opens the decodes that a session asks for and feeds it their events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from gateway.errors import GatewayError
from gateway.replies import HandoffTimes
from relaygen.events import DecodeFailed, DecodeRequest, Event, Output
from relaygen.session import RelaySession

Decode = Callable[[DecodeRequest], AsyncGenerator[Event]]


class Resume(Protocol):
    """Has the session go on after an error, or raises what is to be told instead."""

    def __call__(self, error: GatewayError, *, started: bool) -> Awaitable[list[Output]]: ...


async def relay(
    session: RelaySession, decode: Decode, resume: Resume, handoffs: HandoffTimes
) -> AsyncGenerator[list[Output]]:
    """The session's outputs, as each read of a stream brings them.

    Raises GatewayError for what breaks before anything came out; after that the session fails and
    says so itself. Closing it closes the open decode, which aborts it upstream.
    """
    started = False
    left: float | None = None
    while (request := session.next_decode()) is not None:
        try:
            async with aclosing(decode(request)) as events:
                async for event in events:
                    if left is not None:
                        handoffs.values.append((time.perf_counter() - left) * 1e3)
                        left = None
                    outputs = session.receive(event)
                    if not session.decoding:
                        left = time.perf_counter()
                    if outputs:
                        started = True
                        yield outputs
                    if not session.decoding:
                        break
        except GatewayError as error:
            outputs = await _after(error, session, resume, started=started)
            if outputs:
                started = True
                yield outputs


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
