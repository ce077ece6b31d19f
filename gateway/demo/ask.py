"""Asks one question over the OpenAI SDK, streaming, and times the reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a reply's text. `role` is who wrote it, where the gateway was asked to tell."""

    text: str
    reasoning: bool
    role: str | None = None
    segment: int = 0


@dataclass(frozen=True, slots=True)
class RelayUsage:
    """What `usage.relaygen` says of a relayed reply: tokens, handoffs, milliseconds."""

    large_tokens: int
    small_tokens: int
    discarded_tokens: int
    handoffs: int
    handoff_ms_p50: float | None


@dataclass(slots=True)
class Reply:
    """A reply and when its parts came, in seconds after the request was sent.

    `tokens` is the server's count, the end of turn with it. `first_s` is the first text,
    `end_s` the last text or the finish reason, whichever came later.
    """

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    relay: RelayUsage | None = None
    first_s: float = 0.0
    end_s: float = 0.0
    wall_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the end: the time of `tokens` - 1 tokens."""
        return self.end_s - self.first_s


@dataclass(frozen=True, slots=True)
class Target:
    """A model behind an OpenAI-compatible URL that ends in /v1."""

    base_url: str
    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str = "unused"

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)


async def ask(
    client: AsyncOpenAI,
    target: Target,
    question: str,
    *,
    max_tokens: int | None = None,
    on_text: Callable[[Fragment], None] | None = None,
    **extra_body: Any,
) -> Reply:
    """The reply to `question` at temperature 0; `on_text` sees each fragment as it comes.

    Raises openai.OpenAIError as the SDK does.
    """
    reply, start = Reply(), time.perf_counter()
    stream = await client.chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={**target.extra_body, **extra_body},
    )
    async for chunk in stream:
        now = time.perf_counter() - start
        for fragment in _take(chunk, reply, now):
            if on_text:
                on_text(fragment)
    reply.wall_s = time.perf_counter() - start
    return reply


def _take(chunk: ChatCompletionChunk, reply: Reply, now: float) -> list[Fragment]:
    if chunk.usage:
        reply.tokens = chunk.usage.completion_tokens
        reply.relay = _relay_usage(chunk.usage)
    fragments = _fragments(chunk)
    for fragment in fragments:
        reply.first_s = reply.first_s or now
        reply.end_s = now
        if fragment.reasoning:
            reply.reasoning += fragment.text
        else:
            reply.content += fragment.text
    if chunk.choices and chunk.choices[0].finish_reason:
        reply.finish_reason = chunk.choices[0].finish_reason
        reply.end_s = now
    return fragments


def _fragments(chunk: ChatCompletionChunk) -> list[Fragment]:
    if not chunk.choices:
        return []
    delta = chunk.choices[0].delta
    extra = delta.model_extra or {}
    trace = (chunk.model_extra or {}).get("relaygen") or {}
    role, segment = trace.get("role"), trace.get("segment", 0)
    reasoning = extra.get("reasoning_content") or extra.get("reasoning")
    parts = [(reasoning, True), (delta.content, False)]
    return [Fragment(text, thought, role, segment) for text, thought in parts if text]


def _relay_usage(usage: CompletionUsage) -> RelayUsage | None:
    told = (usage.model_extra or {}).get("relaygen")
    if not told:
        return None
    return RelayUsage(
        large_tokens=told["large_tokens"],
        small_tokens=told["small_tokens"],
        discarded_tokens=told["discarded_tokens"],
        handoffs=told["handoffs"],
        handoff_ms_p50=told["handoff_ms_p50"],
    )
