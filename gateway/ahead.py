"""What engines are asked for before the session is sure to want it, so that handoffs wait less."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.begun import Events
from gateway.extra import Extra
from gateway.overlap import Decode, Overlap
from gateway.pace import Pace
from gateway.warming import Warming
from relaygen.events import DecodeRequest, Delta, Output
from relaygen.policy import Policy
from relaygen.session import RelaySession


class Ahead:
    """One session's, as its policy wants it. Leave it to end what still runs.

    `decode` opens a decode that the session may read, `aside` one that is thrown away.
    """

    def __init__(
        self,
        policy: Policy,
        session: RelaySession,
        decode: Decode,
        aside: Decode,
        pace: Pace,
        extra: Extra,
    ) -> None:
        self._decode = decode
        self._overlap = Overlap(session, decode, extra) if policy.overlap else None
        every = policy.warm_every_tokens
        self._warming = Warming(every, session, aside, pace, extra) if every else None

    async def __aenter__(self) -> Ahead:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._overlap is not None:
            await self._overlap.aclose()
        if self._warming is not None:
            await self._warming.aclose()

    async def open(self, request: DecodeRequest) -> Events:
        """The decode that the session asks for."""
        begun = self._overlap.taken(request) if self._overlap is not None else None
        if self._warming is not None:
            await self._warming.opening(request, begun=begun is not None)
        return self._decode(request) if begun is None else begun

    def first_came(self, seconds: float) -> None:
        """The first event of that decode, so long after the last of the one before."""
        if self._warming is not None:
            self._warming.first_came(seconds)

    def received(self, outputs: Iterable[Output]) -> None:
        """The session has taken an event, and that came of it."""
        if self._overlap is not None:
            self._overlap.received()
        if self._warming is not None:
            self._warming.received(sum(len(o.pieces) for o in outputs if type(o) is Delta))
