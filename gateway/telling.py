"""What is told of a generation that is over: to metrics, to its trace, and in a line of the log."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import structlog

from gateway import metrics
from gateway.generation import Generation
from gateway.openai_api import Ask
from gateway.settings import Log
from relaygen.state import State

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Telling:
    """Of one request."""

    settings: Log
    request_id: str

    def ended(
        self, generation: Generation, ask: Ask, outcome: State, reply_id: str, seconds: float
    ) -> None:
        """`outcome` is the whole reply's: what its other choices and a tool's call came to."""
        session, spent = generation.session, generation.spent
        usage, seen = session.usage, generation.observed
        if session.state is State.DONE and generation.tools is None:
            outcome = State.DONE
        spent.cut()
        seen.closed(session.role, usage)
        metrics.generation(generation.policy, outcome, usage, seen, spent, generation.extra)
        generation.span.ended(generation, outcome, reply_id)
        if outcome is not State.DONE or self._sampled:
            log.info("generation", id=reply_id, outcome=outcome, **_line(generation, seconds))
            if self.settings.texts:
                _texts(generation, ask)

    @property
    def _sampled(self) -> bool:
        """All choices of a request, or none."""
        share = self.settings.sample
        return share >= 1 or crc32(self.request_id.encode()) < share * 2**32


def _line(generation: Generation, seconds: float) -> dict[str, object]:
    session, seen, spent = generation.session, generation.observed, generation.spent
    policy, usage = generation.policy, session.usage
    efficiency = spent.efficiency(usage)
    first = None if seen.first_at is None else spent.since_asked(seen.first_at)
    return {
        "policy": policy.name,
        "large": policy.large.model,
        "small": policy.small.model,
        "engines": {side.role.value: side.engine.url for side in generation.seats.sides()},
        "choice": generation.index,
        "finish": seen.finish,
        "handoff": session.handoff,
        "why": generation.why,
        "prompt_tokens": generation.prompts.tokens,
        "large_tokens": usage.large_tokens,
        "small_tokens": usage.small_tokens,
        "discarded_tokens": usage.discarded_tokens,
        "handoffs": usage.handoffs,
        "resumes": usage.resumes,
        "handoff_ms_p50": seen.times.median(),
        "first_token_ms": None if first is None else round(first * 1e3, 3),
        "efficiency": None if efficiency is None else round(efficiency, 4),
        "ignored": _ignored(generation),
        "seconds": round(seconds, 4),
    }


def _texts(generation: Generation, ask: Ask) -> None:
    asked = ask.template.get("messages") if ask.chat else list(ask.prompts)
    text = generation.session.text
    log.info("texts", private=True, choice=generation.index, asked=asked, written=text)


def _ignored(generation: Generation) -> list[str]:
    """Request fields that had no effect on one of the engines."""
    return sorted(
        {
            field
            for side in generation.seats.sides()
            for field in side.engine.ignored(generation.sampling[side.role].fields)
        }
    )
