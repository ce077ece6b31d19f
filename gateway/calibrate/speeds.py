"""How fast both models write, and what a handoff costs: a few generations, one at a time.

By the gateway's own client, which will pay these times online.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median
from typing import Any

from gateway.calibrate.recording import decode_request
from gateway.calibrate.sides import Connected
from gateway.engines.base import Sampling
from gateway.engines.tokenization import Prompt
from relaygen.events import DecodeChunk, Piece

_GENERATIONS = 3
_TOKENS = 128
_FRESH = 48
"""Tokens of the other model that a handoff brings: about two sentences."""
_SHORT = 8  # fewer tokens tell no speed


@dataclass(frozen=True, slots=True)
class Timed:
    """One decode: when tokens came, in seconds after the request, and what they were."""

    first_s: float
    last_s: float
    tokens: int
    text: str
    ids: tuple[int, ...] | None

    @property
    def ms(self) -> float | None:
        """Milliseconds a token."""
        if self.tokens < _SHORT or self.last_s <= self.first_s:
            return None
        return 1000 * (self.last_s - self.first_s) / (self.tokens - 1)


async def measured(
    large: Connected, small: Connected, questions: Sequence[str], sampling: Sampling
) -> dict[str, Any]:
    """Milliseconds: a token by role, a handoff's; None where a model wrote too little to tell."""
    asked = questions[:_GENERATIONS]
    speeds: dict[str, Any] = {}
    handoffs: list[float] = []
    for role, side in (("large", large), ("small", small)):
        written = [await _decode(side, q, (), _TOKENS, sampling) for q in asked]
        known = [timed.ms for timed in written if timed.ms is not None]
        ms = median(known) if known else None
        speeds[f"{role}_ms"] = None if ms is None else round(ms, 4)
        if ms is not None and side.info.continuation == "completions":
            first = [await _handoff_s(side, q, written, i, sampling) for i, q in enumerate(asked)]
            handoffs.append(max(0.0, 1000 * median(first) - ms))
    speeds["handoff_ms"] = round(sum(handoffs) / len(handoffs), 4) if handoffs else None
    return {**speeds, "generations": len(asked)}


async def _handoff_s(
    side: Connected, question: str, written: list[Timed], index: int, sampling: Sampling
) -> float:
    """Seconds to the first token after a prefix whose end the engine has not seen."""
    own, other = written[index], written[index - 1]
    prefix: tuple[int, ...] | str = own.text + other.text[-3 * _FRESH :]
    if side.engine.ids and own.ids and other.ids:
        prefix = own.ids + other.ids[-_FRESH:]
    return (await _decode(side, question, prefix, 1, sampling)).first_s


async def _decode(
    side: Connected,
    question: str,
    prefix: tuple[int, ...] | str,
    max_tokens: int,
    sampling: Sampling,
) -> Timed:
    prompt: Prompt = await side.prompt(question)
    request = decode_request(prefix, max_tokens, 0)
    start = time.perf_counter()
    first = last = 0.0
    pieces: list[Piece] = []
    async with aclosing(side.engine.decode(side.model, prompt, request, sampling)) as events:
        async for event in events:
            if isinstance(event, DecodeChunk):
                last = time.perf_counter() - start
                first = first or last
                pieces += event.pieces
    known = all(len(piece.ids) == piece.tokens for piece in pieces)
    return Timed(
        first_s=first or time.perf_counter() - start,
        last_s=last,
        tokens=sum(piece.tokens for piece in pieces),
        text="".join(piece.text for piece in pieces),
        ids=tuple(i for piece in pieces for i in piece.ids) if known else None,
    )
