"""The chunks of a chat that one engine writes by itself, as its own chat endpoint tells them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from gateway import sse
from gateway.engines.answers import reading
from gateway.engines.reading import chunk_object
from gateway.errors import UpstreamError
from gateway.http1 import Response
from gateway.upstream import Upstream

Chunk = dict[str, Any]


async def chat_chunks(upstream: Upstream, response: Response) -> AsyncGenerator[Chunk]:
    """All of them; a server that answers with a whole completion has told one.

    Raises GatewayError where the reply breaks, and where it ends without a `finish_reason`.
    """
    finish: object = None
    async with aclosing(_objects(upstream, response)) as chunks:
        async for chunk in chunks:
            for choice in _choices(chunk, upstream.url):
                finish = choice.get("finish_reason") or finish
            if finish in ("abort", "error"):
                raise UpstreamError(f"The engine at {upstream.url} aborted the generation")
            yield chunk
    if finish is None:
        raise UpstreamError(
            f"The stream from the engine at {upstream.url} ended without a finish_reason",
            code="engine_truncated",
        ).of("truncated")


def _choices(chunk: Chunk, url: str) -> list[dict[str, Any]]:
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(map(_readable, choices)):
        raise UpstreamError(f"The engine at {url} sent a chunk whose choices can't be read")
    return choices


def _readable(choice: object) -> bool:
    return isinstance(choice, dict) and isinstance(choice.get("finish_reason"), str | None)


async def _objects(upstream: Upstream, response: Response) -> AsyncGenerator[Chunk]:
    url, decoder = upstream.url, sse.EventDecoder()
    if response.content_type == "application/json":  # it does not stream
        completion = chunk_object(await upstream.whole(response), url)
        with reading(url, "a completion"):
            chunk = _as_chunk(completion)
        yield chunk
        return
    async with aclosing(upstream.stream(response)) as reads:
        async for read in reads:
            try:
                events = decoder.feed(read)
            except sse.EventTooLargeError as error:
                raise UpstreamError(f"The engine at {url} sent {error}") from None
            for event in events:
                if event == sse.DONE:
                    return
                yield chunk_object(event, url)


def _as_chunk(completion: Chunk) -> Chunk:
    """Calls get the index that a delta needs."""
    choices = []
    for choice in completion.get("choices") or ():
        message = dict(choice.get("message") or {})
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        rest = {key: value for key, value in choice.items() if key != "message"}
        choices.append({**rest, "delta": message})
    return {**completion, "choices": choices}
