"""How many generations run, which requests wait for room, and who is told to come back later."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from gateway.errors import GatewayError, RequestError, UpstreamError
from gateway.keys import ANYBODY, Key
from gateway.settings import Limits

_REMEMBERED = 64
"""Ends of generations from which it is told how fast room comes free."""
_LONGEST_S = 300


@dataclass(slots=True, eq=False)
class _Waiter:
    """One request that waits: `turn` becomes None when it is let in, or what it is refused with."""

    count: int
    turn: asyncio.Future[GatewayError | None]


class Admission:
    """Room for so many generations. Requests wait in one line: whoever is first goes first.

    One that needs more room than has come free holds up those behind it, so that its turn comes.
    A key's own limit counts what waits with what runs, and who is over it does not wait: one client
    can't fill the line.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._line: deque[_Waiter] = deque()
        self._by_key: dict[str, int] = {}
        self._freed: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self._idle = asyncio.Event()
        self._idle.set()
        self.taken = 0
        self.closed = False

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._line)

    @asynccontextmanager
    async def take(self, count: int = 1, key: Key = ANYBODY) -> AsyncIterator[float]:
        """Room for `count` generations while the block runs; yields the seconds that it waited.

        GatewayError (429, 503): no room.
        """
        if self.closed:
            raise _shutting_down()
        with self._counted(count, key):
            waited = 0.0
            if self._line or self.taken + count > self._limits.generations:
                came = time.perf_counter()
                await self._turn(count)
                waited = time.perf_counter() - came
            else:
                self._let_in(count)
            try:
                yield waited
            finally:
                self._free(count)

    def replace(self, limits: Limits) -> None:
        """Other limits, for those who wait and those who come from now on."""
        self._limits = limits
        self._next()

    async def drain(self, seconds: float) -> int:
        """Lets none in, waits until none runs, `seconds` at most; returns how many still do."""
        self.closed = True
        while self._line:
            _end(self._line.popleft(), _shutting_down())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self.taken

    # ---- the line -------------------------------------------------------------------------------

    async def _turn(self, count: int) -> None:
        """Waits until there is room, which then is taken."""
        self._check_place(count)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(count, loop.create_future())
        self._line.append(waiter)
        timer = loop.call_later(self._limits.queue_seconds, self._too_late, waiter)
        try:
            refusal = await waiter.turn
        except asyncio.CancelledError:
            self._left(waiter)
            raise
        finally:
            timer.cancel()
        if refusal is not None:
            raise refusal

    def _left(self, waiter: _Waiter) -> None:
        """The client is gone: if it had just been let in, the room goes to the next."""
        if waiter.turn.cancelled():
            self._forget(waiter)
        elif waiter.turn.result() is None:
            self._free(waiter.count)

    def _too_late(self, waiter: _Waiter) -> None:
        if not waiter.turn.done():
            self._forget(waiter)
            _end(waiter, self._queue_timeout(waiter.count))

    def _forget(self, waiter: _Waiter) -> None:
        """Out of the line; it may have been the one that held up the others."""
        with suppress(ValueError):
            self._line.remove(waiter)
        self._next()

    def _next(self) -> None:
        while self._line and self.taken + self._line[0].count <= self._limits.generations:
            waiter = self._line.popleft()
            if not waiter.turn.done():
                self._let_in(waiter.count)
                _end(waiter, None)

    def _let_in(self, count: int) -> None:
        self.taken += count
        self._idle.clear()

    def _free(self, count: int) -> None:
        self.taken -= count
        self._freed.append((time.monotonic(), count))
        self._next()
        if not self.taken:
            self._idle.set()

    # ---- who is refused -------------------------------------------------------------------------

    @contextmanager
    def _counted(self, count: int, key: Key) -> Iterator[None]:
        """Counts what a key runs and has waiting, against its own limit."""
        running = self._by_key.get(key.name, 0)
        if key.generations is not None and running + count > key.generations:
            raise self._too_many_for_key(count, running, key)
        self._by_key[key.name] = running + count
        try:
            yield
        finally:
            self._by_key[key.name] -= count
            if not self._by_key[key.name]:
                del self._by_key[key.name]

    def _check_place(self, count: int) -> None:
        limit, places = self._limits.generations, self._limits.queue
        if count > limit:
            raise _never(f"limits.generations is {limit}", count, "too_many_generations")
        if not places:
            raise self._refusal(
                f"{self.taken} generations are running, and limits.generations allows {limit}; "
                "try again later",
                "too_many_generations",
                count,
            )
        if len(self._line) >= places:
            raise self._refusal(
                f"{len(self._line)} requests are waiting for one of limits.generations "
                f"({limit}), and limits.queue allows {places}; try again later",
                "queue_full",
                count,
            )

    def _queue_timeout(self, count: int) -> RequestError:
        limits = self._limits
        return self._refusal(
            f"The request waited {limits.queue_seconds:g} s (limits.queue_seconds) for "
            f"{count} of {limits.generations} generations (limits.generations); try again later",
            "queue_timeout",
            count,
        )

    def _too_many_for_key(self, count: int, running: int, key: Key) -> RequestError:
        limit, code = key.generations or 0, "too_many_generations_for_key"
        if count > limit:
            return _never(f"`generations` of the API key {key.name!r} is {limit}", count, code)
        return self._refusal(
            f"{running} generations of the API key {key.name!r} are running or waiting, and its "
            f"`generations` (api_keys) allows {limit}; try again when one has ended",
            code,
            count,
        )

    def _refusal(self, message: str, code: str, count: int) -> RequestError:
        return _too_many(message, code, {"Retry-After": str(self._seconds_until(count))})

    def _seconds_until(self, count: int) -> int:
        """A guess from how fast room came free, when there may be room for `count` more."""
        if not self._freed:
            return 1
        passed = time.monotonic() - self._freed[0][0]
        freed = sum(number for _, number in self._freed)
        ahead = count + sum(waiter.count for waiter in self._line)
        return max(1, min(_LONGEST_S, math.ceil(ahead * passed / freed)))


def _end(waiter: _Waiter, how: GatewayError | None) -> None:
    if not waiter.turn.done():
        waiter.turn.set_result(how)


def _too_many(message: str, code: str, headers: dict[str, str]) -> RequestError:
    return RequestError(message, status=429, type="rate_limit_error", code=code, headers=headers)


def _never(limit: str, count: int, code: str) -> RequestError:
    """Nothing to wait for: OpenAI's clients try again unless told not to."""
    message = f"The request asks for {count} generations at once, and {limit}; ask for fewer"
    return _too_many(message, code, {"x-should-retry": "false"})


def _shutting_down() -> UpstreamError:
    return UpstreamError(
        "This gateway is shutting down; try again",
        status=503,
        type="server_error",
        code="shutting_down",
        headers={"Retry-After": "1", "Connection": "close"},
    )
