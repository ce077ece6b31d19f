"""Answers a request by a relayed generation: streamed chunks, or one response at its end."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing

import orjson
import structlog
from aiohttp import web

from gateway import sse
from gateway.backends import ReplicaSet
from gateway.context import ANSWERED, GATEWAY
from gateway.errors import UpstreamError
from gateway.generation import Generation, prepared
from gateway.openai_api import Ask
from gateway.replies import DONE_EVENT, Reply
from relaygen.events import Delta, Failed, Finished, Output
from relaygen.policy import Policy

log = structlog.get_logger()

# The last one keeps nginx from buffering the stream.
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def relayed(request: web.Request, policy: Policy, ask: Ask) -> web.StreamResponse:
    """Raises GatewayError for what fails before the first byte of the reply.

    An engine that fails before that is passed over for another replica, while there is one.
    """
    backends = request.app[GATEWAY].backends
    failed: set[str] = set()
    while True:
        try:
            async with prepared(policy, ask, backends, failed) as generation:
                return await _answer(request, generation, policy, ask)
        except UpstreamError as error:
            if error.engine is None or error.engine in failed or ANSWERED in request:
                raise
            failed.add(error.engine)
            if not _spare(policy, ask, backends, failed):
                raise
            log.warning("trying another replica", error=error.message)


def _spare(
    policy: Policy, ask: Ask, backends: Mapping[str, ReplicaSet], failed: Collection[str]
) -> bool:
    """Whether each role has a replica that has not failed yet."""
    sets = [backends[policy.spec(role).backend] for role in ask.roles]
    return all(any(r.url not in failed for r in replicas.replicas) for replicas in sets)


async def _answer(
    request: web.Request, generation: Generation, policy: Policy, ask: Ask
) -> web.StreamResponse:
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
    try:
        async with aclosing(generation.run()) as batches:
            if ask.stream:
                return await _stream(request, generation, reply, ask, batches)
            return await _collect(generation, reply, batches)
    finally:
        generation.session.cancel()  # nothing, if it has ended
        _log(generation, time.perf_counter() - started)


async def _stream(
    request: web.Request,
    generation: Generation,
    reply: Reply,
    ask: Ask,
    batches: AsyncIterator[list[Output]],
) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    async for outputs in batches:
        frame = reply.delta_events(o for o in outputs if isinstance(o, Delta))
        if not response.prepared:
            await response.prepare(request)
            if ask.chat:
                frame = reply.role_event(*generation.writer) + frame
        frame += _ending(outputs[-1], generation, reply, ask)
        if not frame:
            continue
        try:
            await response.write(frame)
        except ConnectionError:  # the client left
            return response
    return response


def _ending(output: Output, generation: Generation, reply: Reply, ask: Ask) -> bytes:
    """How the stream ends, if it does: an error is followed by nothing, least of all by [DONE]."""
    match output:
        case Failed(message):
            error = _failure(generation, message)
            return sse.event(orjson.dumps(error.body()))
        case Finished(reason, usage):
            ending = reply.finish_event(reason, *generation.writer)
            if ask.include_usage:
                ending += reply.usage_event(generation.usage(usage), *generation.writer)
            return ending + DONE_EVENT
    return b""


async def _collect(
    generation: Generation, reply: Reply, batches: AsyncIterator[list[Output]]
) -> web.Response:
    deltas: list[Delta] = []
    async for outputs in batches:
        deltas += (o for o in outputs if isinstance(o, Delta))
        match outputs[-1]:
            case Finished(reason, usage):
                content = reply.response(deltas, reason, generation.usage(usage))
                return web.Response(body=content, content_type="application/json")
            case Failed(message):
                raise _failure(generation, message)
    raise AssertionError("a session ends with Finished or Failed")


def _failure(generation: Generation, message: str) -> UpstreamError:
    log.warning("generation failed", engine=generation.engine, error=message)
    error = UpstreamError(message, code="generation_failed")
    error.engine = generation.engine
    return error


def _log(generation: Generation, seconds: float) -> None:
    session, usage = generation.session, generation.session.usage
    log.info(
        "generation",
        policy=generation.policy.name,
        outcome=session.state,
        handoff=session.handoff,
        why=generation.pair.why,
        large_tokens=usage.large_tokens,
        small_tokens=usage.small_tokens,
        discarded_tokens=usage.discarded_tokens,
        handoffs=usage.handoffs,
        handoff_ms_p50=generation.handoffs.median(),
        seconds=round(seconds, 4),
    )
