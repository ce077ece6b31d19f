"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import structlog
from aiohttp import web

from gateway import openai_api, sse
from gateway.context import GATEWAY, MODE, Gateway
from gateway.errors import GatewayError, UpstreamError, model_not_found
from gateway.generation import Generation, prepare
from gateway.openai_api import Ask
from gateway.pairs import status
from gateway.passthrough import for_model, pass_through
from gateway.replies import DONE_EVENT, Reply
from relaygen.events import Delta, Failed, Finished, Handoff, Output
from relaygen.policy import Policy

log = structlog.get_logger()

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, chat=True)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, chat=False)


async def _complete(request: web.Request, *, chat: bool) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    content = await request.read()
    body = openai_api.parse_object(content)
    name = openai_api.model_of(body)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with gateway.slots.take():
        if policy := gateway.policies.by_name.get(name):
            ask = openai_api.parse_chat(body) if chat else openai_api.parse_completion(body)
            if ask.whole is None:
                request[MODE] = "relay"
                return await _relayed(request, policy, ask)
            request[MODE] = "passthrough"
            log.info("passed through", policy=name, reason=ask.whole)
            spec = policy.large
            engine, _ = await gateway.backend(spec.backend, policy.name).choose()
            data = for_model(body, spec.model, {**policy.sampling, **spec.sampling})
            return await pass_through(request, engine.upstream, path, data)
        for backend in gateway.backends.values():
            if replica := backend.models().get(name):
                request[MODE] = "passthrough"
                return await pass_through(request, replica.upstream, path, content)
    raise model_not_found(name, gateway.served_names())


# ---- relayed ------------------------------------------------------------------------------------


async def _relayed(request: web.Request, policy: Policy, ask: Ask) -> web.StreamResponse:
    generation = await prepare(policy, ask, request.app[GATEWAY].backends)
    reply = Reply(
        id=f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=policy.name,
        chat=ask.chat,
        field=policy.thinking.field,
        trace=ask.trace,
        logprobs=ask.logprobs,
    )
    started = time.perf_counter()
    outcome = "cancelled"
    try:
        async with aclosing(generation.run()) as batches:
            if ask.stream:
                outcome, response = await _stream(request, generation, reply, ask, batches)
            else:
                outcome, response = await _collect(generation, reply, batches)
        return response
    except GatewayError:
        outcome = "failed"
        raise
    except ConnectionError:
        raise asyncio.CancelledError from None  # the client left while we wrote to it
    finally:
        _log_generation(generation, outcome, time.perf_counter() - started)


async def _stream(
    request: web.Request,
    generation: Generation,
    reply: Reply,
    ask: Ask,
    batches: AsyncGenerator[list[Output]],
) -> tuple[str, web.StreamResponse]:
    outputs = await anext(batches)  # what fails before this is an HTTP error
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    head = reply.role_event() if ask.chat else b""
    while True:
        frame = head + reply.delta_events(o for o in outputs if isinstance(o, Delta))
        head = b""
        _log_handoffs(outputs)
        last = outputs[-1]
        if isinstance(last, Failed):
            error = UpstreamError(last.message, code="generation_failed")
            await response.write(frame + sse.event(orjson.dumps(error.body())))
            return "failed", response
        if isinstance(last, Finished):
            frame += reply.finish_event(last.reason)
            if ask.include_usage:
                frame += reply.usage_event(generation.usage(last.usage))
            await response.write(frame + DONE_EVENT)
            await response.write_eof()
            return last.reason, response
        if frame:
            await response.write(frame)
        outputs = await anext(batches)


async def _collect(
    generation: Generation, reply: Reply, batches: AsyncGenerator[list[Output]]
) -> tuple[str, web.Response]:
    deltas: list[Delta] = []
    async for outputs in batches:
        deltas += (o for o in outputs if isinstance(o, Delta))
        _log_handoffs(outputs)
        match outputs[-1]:
            case Finished(reason, usage):
                content = reply.response(deltas, reason, generation.usage(usage))
                return reason, web.Response(body=content, content_type="application/json")
            case Failed(message):
                raise UpstreamError(message, code="generation_failed")
    raise AssertionError("a session ends with Finished or Failed")


def _log_handoffs(outputs: list[Output]) -> None:
    for output in outputs:
        if isinstance(output, Handoff):
            log.debug(
                "handoff",
                source=output.source,
                target=output.target,
                trigger=output.trigger,
                text=output.text,
                segment=output.segment,
            )


def _log_generation(generation: Generation, outcome: str, seconds: float) -> None:
    usage = generation.session.usage
    log.info(
        "generation",
        policy=generation.policy.name,
        outcome=outcome,
        handoff=generation.session.handoff,
        why=generation.pair.why,
        large_tokens=usage.large_tokens,
        small_tokens=usage.small_tokens,
        discarded_tokens=usage.discarded_tokens,
        handoffs=usage.handoffs,
        handoff_ms_p50=generation.handoffs.median(),
        seconds=round(seconds, 4),
    )


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
    policies = gateway.policies.by_name
    states = await asyncio.gather(*(status(p, gateway.backends) for p in policies.values()))
    ready = bool(states) and all(state["ready"] for state in states)
    body = {
        "ready": ready,
        "policies": dict(zip(policies, states, strict=True)),
        "refused": gateway.policies.problems,
        "backends": {
            name: [replica.status() for replica in backend.replicas]
            for name, backend in gateway.backends.items()
        },
    }
    return web.json_response(body, status=200 if ready else 503)
