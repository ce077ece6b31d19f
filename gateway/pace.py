"""How fast the models of a policy read and decode: is the small one the faster, do both keep up?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import structlog

from gateway.errors import UpstreamError
from gateway.observed import Gaps
from gateway.prefill import Prefill
from relaygen.events import DecodeChunk, Event, Role
from relaygen.policy import Policy

log = structlog.get_logger()

_ENOUGH = 256
"""Tokens of each role, before anything follows from their speeds."""
_MEMORY = 2048
"""Tokens after which what was measured counts half."""
_SLOWER, _FASTER = 1.2, 1.0
"""Of the large model's time a token: the small one is held above, and used again below."""
_QUICK_S = 0.002
"""A token: so fast that no model's speed is measured, only the machine's noise."""
_TRIAL_S = 30.0
"""Between the generations that try a held model again."""
_TRIAL_TOKENS = 64
_JUDGED_S = 0.5
"""Of a segment, before its rate counts."""
_PAUSED_S = 0.02
"""Between reads, by a client that reads slowly: no fault of the engine's."""


@dataclass(slots=True)
class _Speed:
    tokens: float = 0.0
    seconds: float = 0.0
    known: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        keep = 0.5 ** (tokens / _MEMORY)
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.known += tokens


class Pace:
    """One policy's. `clock` gives seconds."""

    def __init__(self, policy: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._speeds = {role: _Speed() for role in Role}
        self._prefills = {role: Prefill() for role in Role}
        self._next_trial = 0.0
        self.slower = False
        """Whether the small model was found to be slower than the large one."""

    def add(self, role: Role, tokens: int, seconds: float) -> None:
        """`tokens` followed one another in `seconds`."""
        if tokens > 0:
            self._speeds[role].add(tokens, seconds)
            self._judge()

    def token_seconds(self, role: Role) -> float | None:
        """Between two tokens of it, None while nothing is known."""
        speed = self._speeds[role]
        return speed.seconds / speed.tokens if speed.tokens else None

    def prefilled(self, role: Role, unread: int, seconds: float) -> None:
        """Its first token came so long after it was to read so many."""
        self._prefills[role].add(unread, seconds)

    def warming_pays(self, role: Role, tokens: int) -> bool:
        """Whether to have the model read so many tokens before they are needed.

        Where that takes longer than the request does besides, and where the model reads faster
        than the other one writes, else handoffs wait for it. True while nothing is known.
        """
        line, write = self._prefills[role].line, self.token_seconds(role.other)
        if line is None or write is None:
            return True
        fixed, read = line
        return read < write and tokens * read > fixed

    def holds(self) -> bool:
        """Whether a generation that begins now is to do without the small model."""
        if not self.slower:
            return False
        if self._clock() < self._next_trial:
            return True
        self._next_trial = self._clock() + _TRIAL_S
        return False

    def _judge(self) -> None:
        large, small = self._speeds[Role.LARGE], self._speeds[Role.SMALL]
        enough = _TRIAL_TOKENS if self.slower else _ENOUGH
        if large.known < _ENOUGH or small.known < enough:
            return
        large_s, small_s = large.seconds / large.tokens, small.seconds / small.tokens
        if self.slower and small_s < max(large_s * _FASTER, _QUICK_S):
            self.slower = False
            log.info("small model used again", policy=self._policy)
        elif small_s > max(large_s * _SLOWER, _QUICK_S):
            if not self.slower:
                log.warning(
                    "small model held",
                    policy=self._policy,
                    large_token_ms=round(large_s * 1000, 2),
                    small_token_ms=round(small_s * 1000, 2),
                )
            self.slower = True
            self._next_trial = self._clock() + _TRIAL_S
            # What was measured says how slow it is; what a trial shows is not to be outweighed.
            small.known, small.tokens, small.seconds = 0, 1.0, small_s


class Paces(dict[str, Pace]):
    """By policy; one that is not there yet begins with nothing known."""

    def __missing__(self, policy: str) -> Pace:
        pace = self[policy] = Pace(policy)
        return pace


class Timed:
    """The events of one decode, timed. `can_leave` tells whether a slow engine can be left."""

    def __init__(
        self,
        role: Role,
        policy: Policy,
        first_token_s: float,
        can_leave: Callable[[Role], bool],
        gaps: Gaps | None = None,
    ) -> None:
        self._role = role
        self._gaps = gaps or Gaps()
        self._asked = policy.slow.of(role)
        self._first_token_s = first_token_s
        self._can_leave = can_leave
        self._url = ""
        self._seconds = 0.0
        self._tokens = 0
        self._last = self._asked_at = self._began_at = 0.0
        self._told = False
        self.first_s = 0.0
        """Until the first event."""
        self.began = False
        """Whether the engine has sent anything of it."""
        self.event: Event | None = None
        """The last that it sent."""
        self.received = 0
        """Runs of tokens that it sent."""

    @property
    def measured(self) -> tuple[int, float]:
        """Tokens after the first read, and the seconds that they took."""
        return self._tokens, self._seconds

    def came(self, event: Event) -> None:
        """The next event came."""
        now = time.perf_counter()
        self.event = event
        if type(event) is DecodeChunk:
            self.received += len(event.pieces)
        if type(event) is DecodeChunk and self._asked_at - self._last < _PAUSED_S:
            tokens, seconds = len(event.pieces), now - self._last
            self._tokens += tokens
            self._seconds += seconds
            self._gaps.add(seconds, tokens)
        self._last = now

    def taken(self) -> None:
        """Whoever reads wants more. Raises UpstreamError where the engine is too slow, and there
        is another."""
        self._asked_at = time.perf_counter()
        if self._asked.tokens_per_second is not None:
            self._keeps_up(self._asked.tokens_per_second)

    async def asked(self, decode: AsyncGenerator[Event]) -> Event:
        """The event that says so."""
        self._began_at = time.perf_counter()
        return await anext(decode)

    async def first(self, decode: AsyncGenerator[Event], url: str) -> Event:
        """The first event with news. Raises UpstreamError where it takes too long."""
        self._url = url
        asked = self._began_at or time.perf_counter()
        event = await self._begin(decode, url)
        self.began = True
        self._last = time.perf_counter()
        self.first_s = self._last - asked
        self.event = event
        self.received = len(event.pieces) if type(event) is DecodeChunk else 0
        return event

    async def _begin(self, decode: AsyncGenerator[Event], url: str) -> Event:
        asked, limit = self._asked.first_token, self._first_token_s
        slow = asked is not None and asked < limit and self._can_leave(self._role)
        if slow and asked is not None:
            limit = asked
        try:
            async with asyncio.timeout(limit):
                return await anext(decode)
        except TimeoutError:
            setting = f"the policy's slow.{self._role}" if slow else "timeouts"
            message = (
                f"The engine at {url} sent no token within {limit:g} s ({setting}.first_token)"
            )
            code = "engine_slow" if slow else "engine_timeout"
            failed = UpstreamError(message, status=504, code=code)
            raise failed.of("slow" if slow else "timeout") from None

    def _keeps_up(self, least: float) -> None:
        tokens, seconds = self.measured
        if seconds < _JUDGED_S or tokens >= least * seconds:
            return
        rate = f"{tokens / seconds:.3g} tokens/s, less than the policy's slow.{self._role}"
        message = f"The engine at {self._url} decodes {rate}.tokens_per_second ({least:g})"
        if self._can_leave(self._role):
            raise UpstreamError(message, status=504, code="engine_slow").of("slow")
        if not self._told:
            log.warning("slow engine, and no other", error=message)
            self._told = True
