"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from gateway import metrics, openai_api, openapi
from gateway.apis import messages as messages_api
from gateway.apis import responses as responses_api
from gateway.backends import Replica
from gateway.bodies import read_body
from gateway.context import ANSWERED, GATEWAY, MODE, QUEUED_S, Gateway
from gateway.errors import RequestError, UpstreamError
from gateway.generation import ServedWholeError, prompt_tokens
from gateway.keys import KEY
from gateway.naming import model_named
from gateway.openai_api import Ask
from gateway.passthrough import for_model, pass_through, renamed, translated
from gateway.relayed import relayed
from gateway.upstream import encoded
from gateway.wire import MessagesWire, OpenAIWire, ResponsesWire, Wire
from relaygen.policy import Policy

log = structlog.get_logger()

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
_POSTED = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES})


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for a policy: in OpenAI's terms, and in the client's."""

    ask: Ask
    body: dict[str, Any]
    wire: Wire
    path: str | None
    """Where an engine is asked the same in the client's own terms; None: by a chat, translated."""


def _chat(body: dict[str, Any], name: str) -> _Asked:
    ask = openai_api.parse_chat(body)
    return _Asked(ask, body, OpenAIWire(usage=ask.include_usage), CHAT)


def _completion(body: dict[str, Any], name: str) -> _Asked:
    ask = openai_api.parse_completion(body)
    return _Asked(ask, body, OpenAIWire(usage=ask.include_usage), COMPLETIONS)


def _message(body: dict[str, Any], name: str) -> _Asked:
    chat = messages_api.to_chat(body)
    return _Asked(openai_api.parse_chat(chat), chat, MessagesWire(name), None)


def _response(body: dict[str, Any], name: str) -> _Asked:
    chat = responses_api.to_chat(body)
    return _Asked(openai_api.parse_chat(chat), chat, ResponsesWire(name, body), None)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, _chat, CHAT)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, _completion, COMPLETIONS)


async def messages(request: web.Request) -> web.StreamResponse:
    return await _complete(request, _message, MESSAGES)


async def responses(request: web.Request) -> web.StreamResponse:
    return await _complete(request, _response, RESPONSES)


async def _complete(
    request: web.Request, asked_by: Callable[[dict[str, Any], str], _Asked], path: str
) -> web.StreamResponse:
    body, name, content = await _named(request)
    gateway = request.app[GATEWAY]
    policy = gateway.policy(name)
    if policy is None:
        del body  # one that waits for its turn holds its body once
        return await _by_model(request, name, path, content)
    del content
    asked = asked_by(body, name)
    async with gateway.admission.take(asked.ask.choices, request[KEY]) as waited_s:
        request[QUEUED_S] = waited_s
        reason = asked.ask.whole
        if reason is None:
            request[MODE] = "relay"
            try:
                return await relayed(request, policy, asked.ask, asked.wire)
            except ServedWholeError as found:
                reason = str(found)
        log.info("passed through", policy=name, reason=reason)
        return await _served_whole(request, policy, asked)


async def _served_whole(request: web.Request, policy: Policy, asked: _Asked) -> web.StreamResponse:
    """By the large model alone, or the one that the request names."""
    spec = policy.large if asked.ask.solo is None else policy.spec(asked.ask.solo)
    replicas = request.app[GATEWAY].backend(spec.backend, policy.name).ranked()
    sampling = {**policy.sampling, **spec.sampling}

    async def send(replica: Replica, last: bool) -> web.StreamResponse:
        body = replica.whole(for_model(asked.body, spec.model, sampling))
        try:
            if asked.path is None:
                return await translated(request, replica, body, asked.wire)
            return await pass_through(request, replica, asked.path, encoded(body), last=last)
        except asyncio.CancelledError:  # the client left
            replica.abandon(body)
            raise

    return await _by_any(request, replicas, send)


_NOT_FOR_CLIENTS = frozenset(
    {
        # vLLM loads whatever a path or a hub's name leads to.
        "load_lora_adapter",
        "unload_lora_adapter",
        # llama.cpp's way to steer another client's running completion.
        "control",
        # Not below /v1 in any engine, but a server or a proxy before it may map them there.
        "abort_requests",
        "collective_rpc",
        "flush_cache",
        "lora-adapters",
        "props",
        "reset_prefix_cache",
        "server_info",
        "sleep",
        "slots",
        "start_profile",
        "stop_profile",
        "update_weights",
        "update_weights_from_disk",
        "wake_up",
    }
)
"""Parts of paths by which operators, not clients, rule an engine."""


# ---- what an engine serves itself ---------------------------------------------------------------


async def anything(request: web.Request) -> web.StreamResponse:
    """Whatever else engines serve, for the model that the body names."""
    if request.path in _POSTED:
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])
    parts = set(request.path.split("/"))
    if {".", ".."} & parts or _NOT_FOR_CLIENTS & parts:  # dots would lead out of /v1 when sent on
        raise web.HTTPNotFound
    content = await _body(request)
    name = model_named(request, content, strict=request[KEY].policies is not None)
    if name is None:
        raise RequestError(
            f"{request.method} {request.path}: the body names no `model`, so no engine can be "
            "chosen for it",
            status=404 if request.method == "GET" else 400,
            param="model",
        )
    name = _allowed(request, name)
    return await _by_model(request, name, request.rel_url.raw_path, content)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Anthropic's /v1/messages/count_tokens, for a policy: the prompt of its large model."""
    body, name, content = await _named(request)
    gateway = request.app[GATEWAY]
    policy = gateway.policy(name)
    if policy is None:
        return await _by_model(request, name, request.path, content)
    ask = openai_api.parse_chat(messages_api.count_tokens_to_chat(body))
    tokens, estimated = await prompt_tokens(policy, ask, gateway.backends)
    extra = {"relaygen": {"estimated": True}} if estimated else {}
    return web.json_response({"input_tokens": tokens, **extra})


async def _by_model(
    request: web.Request, name: str, path: str, content: bytes
) -> web.StreamResponse:
    """Passed through to an engine that serves the model, or to a policy's large model."""
    gateway = request.app[GATEWAY]
    policy = gateway.policy(name)
    asked = policy.large.model if policy else name
    if policy is None and not gateway.serving(name):
        raise gateway.not_found(name, request[KEY])

    async def send(replica: Replica, last: bool) -> web.StreamResponse:
        model = replica.wire_model(asked)
        same = model == name or not content
        data = content if same else renamed(content, request.content_type, model)
        return await pass_through(request, replica, path, data, last=last)

    async with gateway.admission.take(1, request[KEY]):
        if policy:
            replicas = gateway.backend(policy.large.backend, policy.name).ranked()
        elif not (replicas := gateway.serving(name)):  # gone while it waited
            raise gateway.not_found(name, request[KEY])
        return await _by_any(request, replicas, send)


async def _by_any(
    request: web.Request,
    replicas: list[Replica],
    send: Callable[[Replica, bool], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    """Served whole by the first replica that can be reached."""
    request[MODE] = "passthrough"
    for left, replica in zip(reversed(range(len(replicas))), replicas, strict=True):
        try:
            with replica.in_use():
                return await send(replica, not left)
        except UpstreamError as error:
            replica.failed(error)
            if not left or ANSWERED in request:
                raise
            log.warning("trying another replica", error=error.message)
    raise AssertionError("a backend has at least one URL")


async def _named(request: web.Request) -> tuple[dict[str, Any], str, bytes]:
    """The body as an object, the model that it names, and its bytes."""
    content = await _body(request)
    body = openai_api.parse_object(content)
    return body, _allowed(request, openai_api.model_of(body)), content


def _allowed(request: web.Request, name: str) -> str:
    """The name, if the client's key may use it. All names that clients give go through here."""
    if not request[KEY].may_use(name):
        raise request.app[GATEWAY].not_found(name, request[KEY])
    return name


async def _body(request: web.Request) -> bytes:
    settings = request.app[GATEWAY].settings
    limit = int(settings.limits.body_mib * 1024 * 1024)
    return await read_body(request, limit, settings.timeouts.client)


# ---- what is served, and how it is --------------------------------------------------------------


async def models(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    data = [_model(gateway, name) for name in gateway.served_names(request[KEY])]
    return web.json_response({"object": "list", "data": data})


async def model(request: web.Request) -> web.Response:
    gateway, name = request.app[GATEWAY], request.match_info["model"]
    if name not in gateway.served_names(request[KEY]):
        raise gateway.not_found(name, request[KEY])
    return web.json_response(_model(gateway, name))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    head = {"id": name, "object": "model", "created": gateway.started}
    if public := gateway.settings.models.get(name):
        return {**head, "owned_by": "relaygen", "relaygen": {"weights": public.weights}}
    if policy := gateway.policies.by_name.get(name):
        pair = {"large": policy.large.model, "small": policy.small.model}
        return {**head, "owned_by": "relaygen", "relaygen": pair}
    return {**head, "owned_by": "engine"}


async def described(request: web.Request) -> web.Response:
    return web.json_response(openapi.document())


async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "alive"})


async def readyz(request: web.Request) -> web.Response:
    """503 while a policy can't be served, or there is none."""
    gateway = request.app[GATEWAY]
    states = await gateway.states()
    for name, state in states.items():
        state |= gateway.speeds(name)
    public = gateway.public_models()
    served = [*states.values(), *public.values()]
    ready = bool(states) and all(state["ready"] for state in served)
    ready = ready and not gateway.admission.closed
    body = {
        "ready": ready,
        "policies": states,
        "models": public,
        "refused": {**gateway.refused, **gateway.policies.problems},
        "backends": {
            name: [replica.status() for replica in backend.replicas]
            for name, backend in gateway.backends.items()
        },
    }
    return web.json_response(body, status=200 if ready else 503)


async def scraped(request: web.Request) -> web.Response:
    """/metrics, of all workers."""
    request.app[GATEWAY].measured()
    accept = request.headers.get("Accept", "")
    body, content_type = await asyncio.to_thread(metrics.rendered, accept)
    return web.Response(body=body, headers={"Content-Type": content_type})
