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

from gateway.engines.base import opened_by
from gateway.engines.chat import Chat, chat_body
from gateway.errors import UpstreamError
from gateway.generation import Generation
from gateway.openai_api import Ask
from gateway.pairs import Side
from gateway.replies import Chunk, Reply
from gateway.seats import Seat
from relaygen.events import DecodeRequest, Delegated, Role
from relaygen.usage import Usage


@dataclass(slots=True)
class Written:
    """Filled in as the stream is read."""

    usage: Usage


async def tool_chunks(
    generation: Generation, ask: Ask, thought: Delegated, reply: Reply, written: Written
) -> AsyncGenerator[Chunk]:
    """The engine's chunks, made part of the reply. Raises UpstreamError where they don't end."""
    role = generation.tools
    assert role is not None
    told = False
    while True:
        try:
            chunks = _chunks(generation, ask, thought, reply, written, role)
            async with aclosing(chunks) as own:
                async for chunk in own:
                    told = True
                    yield chunk
            return
        except UpstreamError as error:  # a call begun can't be gone on with
            if told or not await generation.resuming.elsewhere(role, error):
                raise


async def _chunks(
    generation: Generation,
    ask: Ask,
    thought: Delegated,
    reply: Reply,
    written: Written,
    role: Role,
) -> AsyncGenerator[Chunk]:
    seat = generation.seats.seat(role)
    last, segment = generation.writer
    writer = (role, segment if role is last else segment + 1)
    with seat.side.failing():
        body = await _body(generation, ask, thought, seat)
        async with aclosing(_stream(generation, seat.side, body)) as chunks:
            async for chunk in chunks:
                if usage := chunk.get("usage"):
                    written.usage = _with(thought.usage, last, role, usage)
                if chunk.get("choices") and _says(chunk["choices"][0]):
                    yield reply.taken_over(generation.index, chunk, writer)
    seat.side.replica.succeeded()


def _says(choice: dict[str, Any]) -> bool:
    """Whether a chunk has more to say than whose turn it is, which the client knows already."""
    delta = choice.get("delta") or {}
    return bool(choice.get("finish_reason")) or any(
        value for key, value in delta.items() if key != "role"
    )


async def _body(generation: Generation, ask: Ask, thought: Delegated, seat: Seat) -> dict[str, Any]:
    side, policy, left = seat.side, generation.policy, generation.session.left
    engine = side.engine
    opened = ""
    if side.tokens is not None:
        opened = opened_by(await side.tokens.tail(side.model, seat.prompt), policy.thinking)
    form = await engine.goes_on(side.model, policy.thinking, closed=True)
    chat = Chat(ask.template, policy.thinking, opened, form, form)
    return {
        **chat_body(chat, thought.text),
        **ask.forms,
        "model": engine.wire_model(side.model),
        "stop": list(left.stops) or None,
        "include_stop_str_in_output": left.include_stop or None,
    }


async def _stream(
    generation: Generation, side: Side, body: dict[str, Any]
) -> AsyncGenerator[Chunk]:
    left, segment = generation.session.left, generation.session.segment
    request = DecodeRequest(side.role, segment, "", left.max_tokens, left.min_tokens, left.seed)
    chat = side.engine.chat(body, request, generation.sampling[side.role])
    async with aclosing(chat) as chunks:
        async for chunk in chunks:
            yield chunk


def _with(before: Usage, last: Role, role: Role, told: dict[str, Any]) -> Usage:
    """The thinking's usage and what the engine says of the rest."""
    tokens = int(told.get("completion_tokens") or 0)
    handoffs = before.handoffs + (last is not role)
    if role is Role.LARGE:
        return replace(before, large_tokens=before.large_tokens + tokens, handoffs=handoffs)
    return replace(before, small_tokens=before.small_tokens + tokens, handoffs=handoffs)
