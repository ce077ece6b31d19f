"""Around every request: its id, the API key, and every error in OpenAI's shape."""

from __future__ import annotations

import uuid

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import metrics
from gateway.apis import messages as messages_api
from gateway.context import ANSWERED, GATEWAY, MODE, REQUEST_ID
from gateway.errors import GatewayError, RequestError
from gateway.keys import ANYBODY, KEY

log = structlog.get_logger()

_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})


@web.middleware
async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _harmless(given) else f"req_{uuid.uuid4().hex}"
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request[REQUEST_ID])
    try:
        if request.path not in _OPEN_PATHS:
            _identify(request)
        return await handler(request)
    except GatewayError as error:
        return _answer(request, error)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[GATEWAY].settings.limits.body_mib
        message = f"The body is larger than {limit:g} MiB; send less or raise limits.body_mib"
        return _answer(request, RequestError(message, status=413, code="body_too_large"))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}"
        refusal = RequestError(message, status=error.status, headers=_allow(error))
        return _answer(request, refusal)
    except Exception:  # a bug of ours: logged whole, and the client still gets JSON
        log.exception("internal error")
        metrics.internal_error()
        if ANSWERED in request:
            raise
        message = f"Internal error; the log has it under request id {request[REQUEST_ID]}"
        return _told(request, GatewayError(message, code="internal_error"))


async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Every response says which request it answers, and how a completion was served."""
    request[ANSWERED] = True
    if MODE in request:
        response.headers["x-relaygen-mode"] = request[MODE]
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]


def _identify(request: web.Request) -> None:
    """Finds whose key it is, and tells it in every line of the log. RequestError (401): none."""
    request[KEY] = key = request.app[GATEWAY].keys.find(_authorization(request))
    if key is not ANYBODY:
        structlog.contextvars.bind_contextvars(key=key.name)


def _authorization(request: web.Request) -> str:
    """The client's key, as OpenAI's clients send it or as Anthropic's do."""
    given = request.headers.get("Authorization")
    if given is None and (key := request.headers.get("x-api-key")):
        return f"Bearer {key}"
    return given or ""


def _answer(request: web.Request, error: GatewayError) -> web.Response:
    more = {"inside": error.inside} if error.inside else {}
    log.warning("request failed", status=error.status, error=error.message, code=error.code, **more)
    metrics.answered(error)
    return _told(request, error)


def _told(request: web.Request, error: GatewayError) -> web.Response:
    """The error in the shape of the API that the client speaks."""
    anthropic = request.path.startswith("/v1/messages")
    return error.response(messages_api.error_body(error) if anthropic else error.body())


def _allow(error: web.HTTPException) -> dict[str, str]:
    allow = error.headers.get("Allow")
    return {"Allow": allow} if allow else {}


def _harmless(request_id: str) -> bool:
    return 0 < len(request_id) <= 128 and request_id.isascii() and request_id.isprintable()
