"""A generation whose engine broke goes on elsewhere: where, how often and for how long."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import structlog

from gateway import metrics
from gateway.errors import BusyError, GatewayError, UpstreamError
from gateway.metrics import To
from gateway.seats import Seats
from gateway.settings import ResumeSettings
from relaygen.events import Output, Role
from relaygen.session import RelaySession

log = structlog.get_logger()

EARLY_S = 2.0
"""For which engines are asked again before the first byte: a client can do that as well."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_STAND_INS = 3
"""For a role, after which a generation does without it: it is not to use up its resumes."""


class Rounds:
    """Engines that all failed are asked again, after a wait that grows, for so many seconds.

    One that has too much to do, was silent for long or refuses our key is asked again only by the
    `patient`.
    """

    def __init__(self, seconds: float, *, patient: bool = True) -> None:
        self._seconds = seconds
        self._patient = patient
        self._count = 0
        self._end: float | None = None

    async def another(self, error: UpstreamError) -> bool:
        """Waits for the next round; whether there is one."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        left = self._end - now
        if left <= 0 or not (self._patient or _passes(error)):
            return False
        await asyncio.sleep(min(left, _wait(self._count)))
        self._count += 1
        return True


def _wait(times: int) -> float:
    """Longer each time; apart, so that not all come back at once."""
    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**times) * random.uniform(0.5, 1.0))


def _passes(error: UpstreamError) -> bool:
    """Whether the same request may do in a moment."""
    busy = isinstance(error, BusyError) or error.code == "engine_refused_key"
    return not busy and error.cause not in ("timeout", "slow")


@dataclass(slots=True)
class Resuming:
    """One generation's. `allowed` is False where the client wants none of it."""

    policy: str
    session: RelaySession
    seats: Seats
    settings: ResumeSettings
    allowed: bool = True
    _failed: set[str] = field(default_factory=set)
    """Engines that failed since the last new token."""
    _rounds: Rounds = field(init=False)
    _early: Rounds = field(default_factory=lambda: Rounds(EARLY_S, patient=False))
    _kept: int = 0
    _count: int = 0
    _stand_ins: Counter[Role] = field(default_factory=Counter)

    @property
    def given_up(self) -> frozenset[Role]:
        """Roles that failed so often that the generation had better do without them."""
        return frozenset(role for role, times in self._stand_ins.items() if times >= _STAND_INS)

    def __post_init__(self) -> None:
        self._rounds = Rounds(self.settings.seconds)

    async def after(self, error: GatewayError, *, started: bool) -> list[Output]:
        """The open decode broke: has the session go on. Raises the error where nothing is left.

        When no engine is left they are asked again: until the time is over, or, before anything was
        told to the client, for the blink of an eye.
        """
        if not isinstance(error, UpstreamError) or error.engine is None or not self.allowed:
            raise error
        self._note(error)
        rounds = self._rounds if started else self._early
        while (found := await self._elsewhere()) is None:
            if not await rounds.another(error):
                raise error
            self._failed.clear()
        return self._go_on(error, *found)

    def can_leave(self, role: Role) -> bool:
        """Whether there is another engine to go to than the one that `role` sits on."""
        if not self.allowed or 2 * self._count >= self.settings.attempts:
            return False  # half of them are for engines that break
        here = self.seats.seat(role).side.engine.url
        return self.seats.others(role, {here, *self._just_failed}) or self._stand_in() is not None

    @property
    def _just_failed(self) -> set[str]:
        return set() if self.session.usage.completion_tokens > self._kept else self._failed

    async def elsewhere(self, role: Role, error: UpstreamError) -> bool:
        """Takes another engine for what `role` was about to write; whether there is one."""
        if not self.allowed or error.engine is None:
            return False
        self._failed.add(error.engine)
        try:
            await self.seats.move(role, self._failed)
        except UpstreamError:
            return False
        log.warning("trying another replica", policy=self.policy, error=error.message)
        return True

    def _note(self, error: UpstreamError) -> None:
        assert error.engine is not None
        kept = self.session.usage.completion_tokens
        if kept > self._kept or not self._count:
            self._failed.clear()
            self._kept = kept
            self._rounds = Rounds(self.settings.seconds)
        self._failed.add(error.engine)
        self._count += 1
        if self._count > self.settings.attempts:
            attempts = self.settings.attempts
            log.warning("resumes used up", policy=self.policy, attempts=attempts)
            raise error

    async def _elsewhere(self) -> tuple[Role, To, bool] | None:
        role, seats = self.session.role, self.seats
        before = self._failed or {""}
        if seats.others(role, before):
            try:
                here = seats.seat(role).side.engine.url if seats.stays(role, ()) else None
                ids = await seats.move(role, before)
                same = seats.seat(role).side.engine.url == here
                return role, "same" if same else "replica", ids
            except UpstreamError as error:
                if error.engine is not None:
                    self._failed.add(error.engine)
        other = self._stand_in()
        if other is None:
            return None
        if seats.stays(other, self._failed):
            return other, "role", True
        try:
            return other, "role", await seats.move(other, self._failed)
        except UpstreamError:
            return None

    def _stand_in(self) -> Role | None:
        other = self.session.stand_in
        if other is None:
            return None
        there = self.seats.stays(other, self._failed) or self.seats.others(other, self._failed)
        return other if there else None

    def _go_on(self, error: UpstreamError, role: Role, to: To, ids: bool) -> list[Output]:
        session = self.session
        writer = session.role
        if to == "role":
            self._stand_ins[writer] += 1
        metrics.resumed(self.policy, writer, to, error.cause)
        log.warning(
            "resumed",
            policy=self.policy,
            role=writer,
            to=to,
            cause=error.cause,
            error=error.message,
            engine=self.seats.seat(role).side.engine.url,
            kept_tokens=session.usage.completion_tokens,
            resumes=self._count,
        )
        return session.resume(role, ids=ids)
