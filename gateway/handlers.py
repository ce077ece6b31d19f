"""The HTTP endpoints."""

from __future__ import annotations

from typing import Any

import structlog
from aiohttp import web

from gateway import openai_api
from gateway.backends import Replica
from gateway.context import ANSWERED, GATEWAY, MODE, Gateway
from gateway.errors import RequestError, UnreachableError, UpstreamError, model_not_found
from gateway.passthrough import for_model, pass_through
from gateway.relayed import relayed

log = structlog.get_logger()


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, chat=True)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, chat=False)


async def _complete(request: web.Request, *, chat: bool) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    content = await _body(request)
    body = openai_api.parse_object(content)
    name = openai_api.model_of(body)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with gateway.slots.take():
        if policy := gateway.policies.by_name.get(name):
            ask = openai_api.parse_chat(body) if chat else openai_api.parse_completion(body)
            if ask.whole is None:
                request[MODE] = "relay"
                return await relayed(request, policy, ask)
            log.info("passed through", policy=name, reason=ask.whole)
            spec = policy.large
            replicas = gateway.backend(spec.backend, policy.name).ranked()
            data = for_model(body, spec.model, {**policy.sampling, **spec.sampling})
            return await _passed(request, replicas, path, data)
        for backend in gateway.backends.values():
            if replicas := backend.serving(name):
                return await _passed(request, replicas, path, content)
    raise model_not_found(name, gateway.served_names())


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise RequestError(f"The body can't be read: {error}") from None


async def _passed(
    request: web.Request, replicas: list[Replica], path: str, data: bytes
) -> web.StreamResponse:
    """Served whole by the first replica that can be reached."""
    request[MODE] = "passthrough"
    for left, replica in zip(reversed(range(len(replicas))), replicas, strict=True):
        try:
            return await pass_through(request, replica.upstream, path, data)
        except UpstreamError as error:
            if isinstance(error, UnreachableError):
                replica.mark_down(error)
            if not left or ANSWERED in request:
                raise
            log.warning("trying another replica", error=error.message)
    raise AssertionError("a backend has at least one URL")


# ---- what is served, and how it is --------------------------------------------------------------


async def models(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    data = [_model(gateway, name) for name in gateway.served_names()]
    return web.json_response({"object": "list", "data": data})


async def model(request: web.Request) -> web.Response:
    gateway, name = request.app[GATEWAY], request.match_info["model"]
    if name not in gateway.served_names():
        raise model_not_found(name, gateway.served_names())
    return web.json_response(_model(gateway, name))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    head = {"id": name, "object": "model", "created": gateway.started}
    if policy := gateway.policies.by_name.get(name):
        pair = {"large": policy.large.model, "small": policy.small.model}
        return {**head, "owned_by": "relaygen", "relaygen": pair}
    return {**head, "owned_by": "engine"}


async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "alive"})


async def readyz(request: web.Request) -> web.Response:
    """503 while a policy can't be served, or there is none."""
    gateway = request.app[GATEWAY]
    states = await gateway.states()
    ready = bool(states) and all(state["ready"] for state in states.values())
    ready = ready and not gateway.slots.closed
    body = {
        "ready": ready,
        "policies": states,
        "refused": gateway.policies.problems,
        "backends": {
            name: [replica.status() for replica in backend.replicas]
            for name, backend in gateway.backends.items()
        },
    }
    return web.json_response(body, status=200 if ready else 503)
