"""The seam check: one model in both roles must write what it writes alone.

At temperature 0 with token handoff, every handoff is invisible: the relayed text equals the
engine's own uninterrupted text. A batch of prefill and a step of decode round differently, so two
nearly equal candidates may swap; the check allows a difference only there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

MAX_TOKENS = 700
NEAR_TIE = 0.02  # margin below which rounding may decide


@dataclass(slots=True)
class Seam:
    """Counts over some prompts. `worst` is the largest margin at a first difference."""

    prompts: int = 0
    equal: int = 0
    handoffs: list[int] = field(default_factory=list)
    worst: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.prompts} prompts equal, {sum(self.handoffs)} handoffs "
            f"(at least {min(self.handoffs)} each), largest margin at a first difference "
            f"{self.worst:.4f}"
        )


async def seam(
    questions: list[str], engine: AsyncOpenAI, engine_model: str, relay: AsyncOpenAI, policy: str
) -> Seam:
    result = Seam()
    for question in questions:
        messages: Any = [{"role": "user", "content": question}]
        alone = await engine.chat.completions.create(
            model=engine_model,
            messages=messages,
            temperature=0,
            max_tokens=MAX_TOKENS,
            logprobs=True,
            top_logprobs=2,
        )
        relayed = await relay.chat.completions.create(
            model=policy, messages=messages, temperature=0, max_tokens=MAX_TOKENS
        )
        result.prompts += 1
        result.handoffs.append(relayed.usage.model_extra["relaygen"]["handoffs"])
        text, expected = _raw(relayed), alone.choices[0].message.content
        if text == expected:
            result.equal += 1
        else:
            result.worst = max(result.worst, _margin(alone, _common(text, expected)))
    return result


def _raw(reply: Any) -> str:
    message = reply.choices[0].message
    return f"<think>{message.model_extra['reasoning_content']}</think>{message.content}"


def _common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _margin(reply: Any, position: int) -> float:
    """p(top-1) - p(top-2) of the token that holds the character at `position`."""
    end = 0
    for entry in reply.choices[0].logprobs.content:
        end += len(entry.token)
        if end > position:
            break
    first, second = (math.exp(top.logprob) for top in entry.top_logprobs[:2])
    return first - second
