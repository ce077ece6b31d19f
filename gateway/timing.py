"""How long a reply may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from gateway.context import GATEWAY
from gateway.errors import UpstreamError


@asynccontextmanager
async def in_time(request: web.Request) -> AsyncIterator[asyncio.Timeout]:
    """Raises UpstreamError where the block takes longer than `timeouts.total`."""
    limit = request.app[GATEWAY].settings.timeouts.total
    try:
        async with asyncio.timeout(limit) as timer:
            yield timer
    except TimeoutError:
        raise UpstreamError(
            f"The reply is not complete after {limit:g} s (timeouts.total); ask for less",
            status=504,
            code="reply_timeout",
        ).of("timeout") from None
