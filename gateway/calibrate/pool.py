"""Many requests at once, some of which fail for a while."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from gateway.errors import GatewayError, UpstreamError

T = TypeVar("T")
R = TypeVar("R")

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 20.0
_PASSING = (408, 409, 429, 503, 504)
"""Statuses of refusals that tell of the moment."""


async def spread(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], concurrency: int
) -> None:
    """Does the work on every item, on so many at once. An item is taken when its turn comes.

    The first error ends all of it, and is raised.
    """
    free = asyncio.Semaphore(concurrency)

    async def one(item: T) -> None:
        try:
            await work(item)
        finally:
            free.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                await free.acquire()
                tasks.create_task(one(item))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def patiently(
    ask: Callable[[], Awaitable[R]], patience_s: float, tell: Callable[[str], None]
) -> R:
    """The answer, asked for again while the engine is away or overloaded, for so many seconds.

    Raises the last GatewayError then, and at once one that asking again won't mend.
    """
    since: float | None = None
    wait = _FIRST_WAIT_S
    while True:
        try:
            return await ask()
        except GatewayError as error:
            now = time.monotonic()
            if since is None:
                since = now
            left = since + patience_s - now
            if left <= 0 or not passing(error):
                raise
            tell(f"{error.message}; asking again for up to {left:.0f} s")
            await asyncio.sleep(min(wait * random.uniform(0.5, 1.0), left))
            wait = min(2 * wait, _LONGEST_WAIT_S)


def passing(error: GatewayError) -> bool:
    """Whether the same request may do later."""
    return isinstance(error, UpstreamError) or error.status in _PASSING
