"""Reads what a client sends: within the size limit, and not for ever."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.errors import RequestError
from gateway.listening import LEAST_BYTES


async def read_body(request: web.Request, limit: int, seconds: float) -> bytes:
    """The whole body; nothing else keeps it. At least 16 KiB must come in each `seconds`.

    `limit` is in bytes.
    Raises RequestError (400, 408), web.HTTPRequestEntityTooLarge.
    """
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit)
    try:
        return await _read(request, limit, seconds)
    except web.RequestPayloadError:
        raise RequestError(
            "The body can't be read: its encoding or length is wrong",
            headers={"Connection": "close"},
        ) from None
    except TimeoutError:
        raise RequestError(
            f"The body did not come: less than {LEAST_BYTES // 1024} KiB in {seconds:g} s "
            "(timeouts.client); send it faster",
            status=408,
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None


async def _read(request: web.Request, limit: int, seconds: float) -> bytes:
    body, counted, loop = bytearray(), 0, asyncio.get_running_loop()
    async with asyncio.timeout(seconds) as patience:
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > limit:
                raise web.HTTPRequestEntityTooLarge(limit)
            if len(body) - counted >= LEAST_BYTES:
                counted = len(body)
                patience.reschedule(loop.time() + seconds)
    return bytes(body)
