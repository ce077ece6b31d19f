"""Requests that one engine serves whole: bytes there, bytes back, nothing understood."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import orjson
import structlog
from aiohttp import ClientResponse, web
from multidict import CIMultiDict

from gateway import sse
from gateway.errors import UpstreamError
from gateway.upstream import REFUSED_KEY, Upstream, encoded, raise_for_error

log = structlog.get_logger()

# RFC 9110, 7.6.1, and what describes our own connection to the client.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)


async def pass_through(
    request: web.Request, upstream: Upstream, path: str, data: bytes
) -> web.StreamResponse:
    """Sends `data` to the engine and its answer to the client, as it comes, whatever its status."""
    async with upstream.request("POST", path, data) as answer:
        if answer.status in REFUSED_KEY:  # it is our key that is wrong, not the client's
            await raise_for_error(answer, upstream.url)
        response = web.StreamResponse(status=answer.status, headers=_kept_headers(answer))
        if answer.content_type != "text/event-stream" and answer.content_length is not None:
            response.content_length = answer.content_length
        await response.prepare(request)
        try:
            async with aclosing(upstream.stream(answer)) as chunks:
                async for chunk in chunks:
                    await response.write(chunk)
            await response.write_eof()
        except UpstreamError as error:
            await _break_off(request, response, answer, error)
        except ConnectionError:
            log.info("the client left", path=path)
        return response


async def _break_off(
    request: web.Request,
    response: web.StreamResponse,
    answer: ClientResponse,
    error: UpstreamError,
) -> None:
    """A cut upstream becomes a cut here, and never looks like an end."""
    log.warning("passthrough broke off", error=error.message)
    if answer.content_type == "text/event-stream":
        await response.write(sse.event(orjson.dumps(error.body())))
    if request.transport is not None:
        request.transport.close()


def for_model(body: Mapping[str, Any], model: str, sampling: Mapping[str, Any]) -> bytes:
    """A policy's request made one of the large model's own: its name, our fields taken out."""
    ours = {key: value for key, value in body.items() if key != "relaygen"}
    return encoded({**sampling, **ours, "model": model})


def _kept_headers(answer: ClientResponse) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value)
        for name, value in answer.headers.items()
        if name.lower() not in _HOP_BY_HOP and not name.lower().startswith("access-control-")
    )
