"""What follows a relayed thinking where the request has tools or structured output.

One model's own chat endpoint writes it, so that its parser and grammar apply: it is sent the
client's request with the thought as an unfinished message, and its choices go to the client as they
are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from gateway import sse
from gateway.engines.base import opened_by
from gateway.engines.chat import Chat, chat_body
from gateway.engines.reading import chunk_object
from gateway.errors import UpstreamError
from gateway.generation import Generation
from gateway.openai_api import Ask
from gateway.pairs import Side
from gateway.replies import Chunk, Reply
from gateway.upstream import encoded, raise_for_error
from relaygen.events import Delegated, Role
from relaygen.usage import Usage


@dataclass(slots=True)
class Written:
    """Filled in as the stream is read."""

    usage: Usage


async def tool_chunks(
    generation: Generation, ask: Ask, thought: Delegated, reply: Reply, written: Written
) -> AsyncGenerator[Chunk]:
    """The engine's chunks, made part of the reply. Raises UpstreamError where they don't end."""
    side = generation.tools
    assert side is not None
    role, segment = generation.writer
    writer = (side.role, segment if side.role is role else segment + 1)
    body = await _body(generation, ask, thought, side)
    finished = False
    async with aclosing(_stream(side, body)) as chunks:
        async for chunk in chunks:
            if usage := chunk.get("usage"):
                written.usage = _with(thought.usage, role, side.role, usage)
            if not chunk.get("choices"):
                continue
            finished = finished or chunk["choices"][0].get("finish_reason") is not None
            if _says(chunk["choices"][0]):
                yield reply.taken_over(generation.index, chunk, writer)
    if not finished:
        raise UpstreamError(
            f"The stream from the engine at {side.engine.url} ended without a finish_reason",
            code="engine_truncated",
        )


def _says(choice: dict[str, Any]) -> bool:
    """Whether a chunk has more to say than whose turn it is, which the client knows already."""
    delta = choice.get("delta") or {}
    return bool(choice.get("finish_reason")) or any(
        value for key, value in delta.items() if key != "role"
    )


async def _body(generation: Generation, ask: Ask, thought: Delegated, side: Side) -> dict[str, Any]:
    policy, limits = generation.policy, ask.limits
    prompt = generation.prompts.by_role[side.role]
    opened = ""
    if side.tokens is not None:
        opened = opened_by(await side.tokens.tail(side.model, prompt), policy.thinking)
    form = await side.engine.goes_on(side.model, policy.thinking, closed=True)
    chat = Chat(ask.template, policy.thinking, opened, form)
    left = generation.session.left
    return {
        **chat_body(chat, thought.text),
        **generation.sampling[side.role].fields,
        **ask.forms,
        "model": side.engine.wire_model(side.model),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": left,
        "min_tokens": limits.min_tokens,
        "seed": limits.seed,
        "stop": list(limits.stops) or None,
        "logprobs": None if ask.logprobs is None else True,
        "top_logprobs": ask.logprobs,
    }


async def _stream(side: Side, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    engine, decoder = side.engine, sse.EventDecoder()
    data = encoded({key: value for key, value in body.items() if value is not None})
    request = engine.upstream.request("POST", "/v1/chat/completions", data)
    with side.failing():
        async with request as response:
            await raise_for_error(response, engine.url)
            if response.content_type == "application/json":  # it does not stream
                yield _as_chunk(chunk_object(await response.read(), engine.url))
                return
            async with aclosing(engine.upstream.stream(response)) as reads:
                async for read in reads:
                    for event in decoder.feed(read):
                        if event == sse.DONE:
                            return
                        yield chunk_object(event, engine.url)


def _as_chunk(completion: dict[str, Any]) -> dict[str, Any]:
    choices = [{**c, "delta": c.get("message") or {}} for c in completion.get("choices") or ()]
    for choice in choices:
        choice.pop("message", None)
    return {"choices": choices, "usage": completion.get("usage")}


def _with(before: Usage, last: Role, role: Role, told: dict[str, Any]) -> Usage:
    """The thinking's usage and what the engine says of the rest."""
    tokens = int(told.get("completion_tokens") or 0)
    handoffs = before.handoffs + (last is not role)
    if role is Role.LARGE:
        return replace(before, large_tokens=before.large_tokens + tokens, handoffs=handoffs)
    return replace(before, small_tokens=before.small_tokens + tokens, handoffs=handoffs)
