"""Around every request: its id, the API key, and every error in OpenAI's shape."""

from __future__ import annotations

import uuid

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.context import ANSWERED, GATEWAY, MODE, REQUEST_ID
from gateway.errors import GatewayError, RequestError

log = structlog.get_logger()

_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


@web.middleware
async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _harmless(given) else f"req_{uuid.uuid4().hex}"
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request[REQUEST_ID])
    try:
        if request.path not in _OPEN_PATHS:
            request.app[GATEWAY].keys.check(request.headers.get("Authorization", ""))
        return await handler(request)
    except GatewayError as error:
        return _answer(error)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[GATEWAY].settings.limits.body_mib
        message = f"The body is larger than {limit:g} MiB; send less or raise limits.body_mib"
        return _answer(RequestError(message, status=413, code="body_too_large"))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}"
        return _answer(RequestError(message, status=error.status, headers=_allow(error)))
    except Exception:  # a bug of ours: logged whole, and the client still gets JSON
        log.exception("internal error")
        if ANSWERED in request:
            raise
        message = f"Internal error; the log has it under request id {request[REQUEST_ID]}"
        return GatewayError(message, code="internal_error").response()


async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Every response says which request it answers, and how a completion was served."""
    request[ANSWERED] = True
    if MODE in request:
        response.headers["x-relaygen-mode"] = request[MODE]
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]


def _answer(error: GatewayError) -> web.Response:
    log.warning("request failed", status=error.status, error=error.message, code=error.code)
    return error.response()


def _allow(error: web.HTTPException) -> dict[str, str]:
    allow = error.headers.get("Allow")
    return {"Allow": allow} if allow else {}


def _harmless(request_id: str) -> bool:
    return 0 < len(request_id) <= 128 and request_id.isascii() and request_id.isprintable()
