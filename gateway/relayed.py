"""Answers a request by relayed generations: streamed events, or one response at their end."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection
from contextlib import aclosing

import orjson
import structlog
from aiohttp import web

from gateway.choices import chunks_of
from gateway.context import GATEWAY, QUEUED_S, REQUEST_ID
from gateway.errors import GatewayError, UpstreamError
from gateway.generation import Generation, ServedWholeError, prepared
from gateway.openai_api import Ask
from gateway.replies import AnyChunk, Folded, Reply
from gateway.streaming import EventStream
from gateway.telling import Telling
from gateway.timing import in_time
from gateway.wire import Wire
from relaygen.policy import Policy
from relaygen.state import State

log = structlog.get_logger()


async def relayed(request: web.Request, policy: Policy, ask: Ask, wire: Wire) -> web.StreamResponse:
    """Raises GatewayError for what fails before the first byte of the reply.

    An engine that fails is passed over for another one, before the first byte and after it.
    """
    if not ask.stream:
        return await _whole(request, policy, ask, wire)
    stream = EventStream(request, wire)
    async with stream.kept_alive(request.app[GATEWAY].settings.timeouts.keep_alive):
        try:
            await _reply(request, policy, ask, _Streamed(stream))
        except (GatewayError, ServedWholeError) as error:
            if not stream.begun:
                raise
            told = error if isinstance(error, GatewayError) else UpstreamError(str(error))
            log.warning("generation failed", policy=policy.name, error=told.message, code=told.code)
            await stream.send(wire.error(told))
    return stream.response


async def _whole(request: web.Request, policy: Policy, ask: Ask, wire: Wire) -> web.Response:
    folded = _Collected()
    await _reply(request, policy, ask, folded)
    body = orjson.dumps(wire.whole(folded.folded.whole()))
    return web.Response(body=body, content_type="application/json")


# ---- where the chunks go ------------------------------------------------------------------------


class _Streamed:
    """To the client, as they come."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._chunk = stream.wire.chunk

    def start(self, prompt_tokens: int) -> None:
        self._stream.decided.set()
        self._stream.wire.prompted(prompt_tokens)

    async def take(self, chunks: Collection[AnyChunk]) -> bool:
        """Returns whether more is wanted."""
        await self._stream.send(b"".join([self._chunk(chunk) for chunk in chunks]))
        return not self._stream.left

    async def end(self) -> None:
        await self._stream.send(self._stream.wire.end())


class _Collected:
    """Into one reply: the client has nothing of it before its end."""

    def __init__(self) -> None:
        self.folded = Folded()

    def start(self, prompt_tokens: int) -> None:
        pass

    async def take(self, chunks: Collection[AnyChunk]) -> bool:
        for chunk in chunks:
            self.folded.add(chunk)
        return True

    async def end(self) -> None:
        pass


# ---- the reply ----------------------------------------------------------------------------------


async def _reply(
    request: web.Request, policy: Policy, ask: Ask, sink: _Streamed | _Collected
) -> None:
    """Raises UpstreamError where it takes too long."""
    gateway, asked = request.app[GATEWAY], time.perf_counter()
    relaying, told = gateway.relaying, Telling(gateway.settings.log, request[REQUEST_ID])
    with relaying.tracing.reply(request.headers, policy, ask) as span:
        async with (
            in_time(request) as timer,
            prepared(policy, ask, relaying, span) as generations,
        ):
            for generation in generations:
                generation.spent.queue = request[QUEUED_S]
                generation.spent.prepare = time.perf_counter() - asked
            await _written(generations, policy, ask, sink, timer, told)
    gateway.shadow.consider(gateway.settings.shadow, relaying, ask, generations[0])


async def _written(
    generations: list[Generation],
    policy: Policy,
    ask: Ask,
    sink: _Streamed | _Collected,
    timer: asyncio.Timeout,
    told: Telling,
) -> None:
    reply = Reply(
        id=f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=ask.model,
        chat=ask.chat,
        field=policy.thinking.field,
        trace=ask.trace,
        logprobs=ask.logprobs,
    )
    started = time.perf_counter()
    outcome = State.CANCELLED  # the client left
    sink.start(generations[0].prompts.tokens)
    try:
        async with aclosing(chunks_of(generations, reply, ask)) as batches:
            async for chunks in batches:
                if not await sink.take(chunks):
                    return
        await sink.end()
        outcome = State.DONE
    except Exception:
        outcome = State.FAILED
        raise
    finally:
        if timer.expired():
            outcome = State.FAILED
        for generation in generations:
            generation.session.cancel()  # nothing, if it has ended
            told.ended(generation, ask, outcome, reply.id, time.perf_counter() - started)
