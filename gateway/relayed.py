"""Answers a request by relayed generations: streamed events, or one response at their end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import aclosing

import orjson
import structlog
from aiohttp import web

from gateway import metrics
from gateway.backends import ReplicaSet
from gateway.choices import chunks_of
from gateway.context import GATEWAY
from gateway.errors import GatewayError, UpstreamError
from gateway.generation import Generation, ServedWholeError, prepared
from gateway.openai_api import Ask
from gateway.replies import Folded, Reply
from gateway.streaming import EventStream
from gateway.wire import Wire
from relaygen.policy import Policy

log = structlog.get_logger()


async def relayed(request: web.Request, policy: Policy, ask: Ask, wire: Wire) -> web.StreamResponse:
    """Raises GatewayError for what fails before the first byte of the reply.

    An engine that fails before that is passed over for another replica, while there is one.
    """
    if not ask.stream:
        return await _whole(request, policy, ask, wire)
    stream = EventStream(request, wire)
    async with stream.kept_alive(request.app[GATEWAY].settings.timeouts.keep_alive):
        try:
            await _attempts(request, policy, ask, _Streamed(stream))
        except (GatewayError, ServedWholeError) as error:
            if not stream.begun:
                raise
            told = error if isinstance(error, GatewayError) else UpstreamError(str(error))
            await stream.send(wire.error(told))
    return stream.response


async def _whole(request: web.Request, policy: Policy, ask: Ask, wire: Wire) -> web.Response:
    folded = _Collected()
    await _attempts(request, policy, ask, folded)
    body = orjson.dumps(wire.whole(folded.folded.whole()))
    return web.Response(body=body, content_type="application/json")


# ---- where the chunks go ------------------------------------------------------------------------


class _Streamed:
    """To the client, as they come."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream

    @property
    def begun(self) -> bool:
        return self._stream.told

    def start(self, prompt_tokens: int) -> None:
        """A new attempt begins."""
        self._stream.decided.set()
        if not self.begun:
            self._stream.wire.prompted(prompt_tokens)

    async def take(self, chunks: Collection[dict[str, object]]) -> bool:
        """Returns whether more is wanted."""
        wire = self._stream.wire
        await self._stream.send(b"".join(wire.chunk(chunk) for chunk in chunks))
        return not self._stream.left

    async def end(self) -> None:
        await self._stream.send(self._stream.wire.end())


class _Collected:
    """Into one reply: the client has nothing of it before its end."""

    begun = False

    def __init__(self) -> None:
        self.folded = Folded()

    def start(self, prompt_tokens: int) -> None:
        self.folded = Folded()

    async def take(self, chunks: Collection[dict[str, object]]) -> bool:
        for chunk in chunks:
            self.folded.add(chunk)
        return True

    async def end(self) -> None:
        pass


# ---- attempts -----------------------------------------------------------------------------------


async def _attempts(
    request: web.Request, policy: Policy, ask: Ask, sink: _Streamed | _Collected
) -> None:
    backends = request.app[GATEWAY].backends
    failed: set[str] = set()
    while True:
        try:
            async with prepared(policy, ask, backends, failed) as generations:
                await _attempt(generations, policy, ask, sink)
            return
        except UpstreamError as error:
            if error.engine is None or error.engine in failed or sink.begun:
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


async def _attempt(
    generations: list[Generation], policy: Policy, ask: Ask, sink: _Streamed | _Collected
) -> None:
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
    sink.start(generations[0].prompts.tokens)
    try:
        async with aclosing(chunks_of(generations, reply, ask)) as batches:
            async for chunks in batches:
                if not await sink.take(chunks):
                    return
        await sink.end()
    finally:
        for generation in generations:
            generation.session.cancel()  # nothing, if it has ended
            _log(generation, time.perf_counter() - started)


def _log(generation: Generation, seconds: float) -> None:
    session, usage = generation.session, generation.session.usage
    name, times = generation.policy.name, generation.handoffs
    metrics.generation(name, session.state, usage, times.values)
    log.info(
        "generation",
        policy=name,
        choice=generation.index,
        outcome=session.state,
        handoff=session.handoff,
        why=generation.pair.why,
        large_tokens=usage.large_tokens,
        small_tokens=usage.small_tokens,
        discarded_tokens=usage.discarded_tokens,
        handoffs=usage.handoffs,
        handoff_ms_p50=times.median(),
        ignored=_ignored(generation),
        seconds=round(seconds, 4),
    )


def _ignored(generation: Generation) -> list[str]:
    """Request fields that had no effect on one of the engines."""
    return sorted(
        {
            field
            for role, side in generation.pair.sides.items()
            for field in side.engine.ignored(generation.sampling[role].fields)
        }
    )
