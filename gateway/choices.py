"""The choices of one request, written side by side: their chunks as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from gateway.errors import UpstreamError
from gateway.extra import Extra
from gateway.generation import Generation
from gateway.openai_api import Ask
from gateway.replies import AnyChunk, HandoffTimes, Reply, usage_object
from gateway.spent import spent_object
from gateway.tools import Written, tool_chunks
from relaygen.events import Delegated, Failed, Finished, Output, Role
from relaygen.usage import Usage


async def chunks_of(
    generations: Sequence[Generation], reply: Reply, ask: Ask
) -> AsyncGenerator[list[AnyChunk]]:
    """All chunks of a reply, some at a time, the usage last.

    Raises GatewayError where a choice can't be completed: what was yielded then has no end.
    """
    usages: list[Usage] = []
    written = [_choice(generation, reply, ask, usages) for generation in generations]
    async with aclosing(written[0] if len(written) == 1 else _merged(written)) as batches:
        async for chunks in batches:
            yield chunks
    last = generations[-1]
    usage = _usage(generations, usages)
    if reply.trace:
        ours = ((each.spent, each.session.usage) for each in generations)
        usage["relaygen"]["spent"] = spent_object(ours)
    yield [reply.usage_chunk(usage, last.writer)]


async def _choice(
    generation: Generation, reply: Reply, ask: Ask, usages: list[Usage]
) -> AsyncGenerator[list[AnyChunk]]:
    index, begun, opener = generation.index, False, generation.writer
    async with aclosing(generation.run()) as batches:
        async for outputs in batches:
            chunks = reply.delta_chunks(index, outputs)
            if not begun:
                chunks[:0] = _opening(generation, reply, opener)
                begun = True
            chunks += _finish(outputs[-1], generation, reply, usages)
            if chunks:
                yield chunks
            match outputs[-1]:
                case Failed(message):
                    raise UpstreamError(message, code="generation_failed")
                case Delegated() as delegated:
                    written = Written(delegated.usage)
                    toolwork = tool_chunks(generation, ask, delegated, reply, written)
                    async with aclosing(toolwork) as others:
                        async for chunk in others:
                            yield [chunk]
                    usages.append(written.usage)
    generation.spent.end()


def _opening(generation: Generation, reply: Reply, writer: tuple[Role, int]) -> list[AnyChunk]:
    if reply.chat:
        return [reply.role_chunk(generation.index, writer)]
    echo = generation.prompts.echo
    return [reply.text_chunk(generation.index, echo, writer)] if echo else []


def _finish(
    output: Output, generation: Generation, reply: Reply, usages: list[Usage]
) -> list[AnyChunk]:
    match output:
        case Finished(reason, usage, stop):
            usages.append(usage)
            generation.observed.finish = reason
            return [reply.finish_chunk(generation.index, reason, stop, generation.writer)]
    return []


def _usage(generations: Sequence[Generation], usages: Sequence[Usage]) -> dict[str, Any]:
    first = generations[0]
    usage = sum(usages, start=Usage())
    prompts = {id(g.prompts): g.prompts for g in generations}.values()
    if any(prompt.estimated for prompt in prompts):
        usage = usage + Usage(estimated=True)
    handoffs = HandoffTimes([value for g in generations for value in g.observed.times.values])
    return usage_object(
        first.policy.name,
        usage,
        sum(prompt.tokens for prompt in prompts),
        handoffs,
        sum((g.extra for g in generations), start=Extra()) if first.policy.works_ahead else None,
        segments=usage.handoffs + len(generations),
    )


async def _merged(
    written: Sequence[AsyncGenerator[list[AnyChunk]]],
) -> AsyncGenerator[list[AnyChunk]]:
    """The chunks of several choices as they come; the first that breaks ends them all.

    A slow reader slows every choice: each has to be taken before its next read.
    """
    queue: asyncio.Queue[list[AnyChunk] | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_put(choice, queue)) for choice in written]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _put(
    choice: AsyncIterator[list[AnyChunk]], queue: asyncio.Queue[list[AnyChunk] | Exception | None]
) -> None:
    assert isinstance(choice, AsyncGenerator)
    async with aclosing(choice) as batches:
        try:
            async for chunks in batches:
                await queue.put(chunks)
        except Exception as error:  # noqa: BLE001 - raised again by whoever takes it
            await queue.put(error)
            return
    await queue.put(None)
