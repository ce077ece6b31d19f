"""What happens in one generation, as metrics, traces and the log tell it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.replies import HandoffTimes
from relaygen.events import DecodeChunk, DecodeFinished, Event, Handoff, Output, Role
from relaygen.usage import Usage

GAP_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0)
"""Seconds between two tokens: upper ends of what is counted together."""


class Gaps:
    """Seconds between the tokens of a role, counted by `GAP_EDGES`; one more for all above."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_EDGES) + 1)
        self.seconds = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """So many tokens came `seconds` after the one before them."""
        if tokens:
            self.counts[bisect_left(GAP_EDGES, seconds / tokens)] += tokens
            self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Segment:
    """What one role wrote in one go: kept tokens."""

    role: Role
    tokens: int


@dataclass(slots=True)
class Observed:
    """One generation. Times are time.perf_counter()'s."""

    times: HandoffTimes = field(default_factory=HandoffTimes)
    segments: list[Segment] = field(default_factory=list)
    handoffs: list[tuple[float, Handoff]] = field(default_factory=list)
    """When each was asked for."""
    gaps: dict[Role, Gaps] = field(default_factory=lambda: {role: Gaps() for role in Role})
    sent: Counter[Role] = field(default_factory=Counter)
    """Tokens of prompts and prefixes that engines were sent, as far as they were sent ids."""
    prefilled: Counter[Role] = field(default_factory=Counter)
    """Of what engines were sent: what those that tell had to read ..."""
    cached: Counter[Role] = field(default_factory=Counter)
    """... and what they had in their prefix caches."""
    first_at: float | None = None
    """When the first of its text was there."""
    finish: str | None = None
    """The `finish_reason` that the client was told."""
    _left: float | None = None
    _counted: Usage = field(default_factory=Usage)

    def came(self) -> None:
        """Outputs are there."""
        if self.first_at is None:
            self.first_at = time.perf_counter()

    def event(self, role: Role, first_came: Callable[[float], None]) -> None:
        """An event of a decode came; the first after another decode's end is told, with the time
        between."""
        if self._left is not None:
            seconds, self._left = time.perf_counter() - self._left, None
            self.times.values.append((role, seconds * 1e3))
            first_came(seconds)

    def ended(self, outputs: Sequence[Output], usage: Usage) -> None:
        """A decode is over, now; `usage` is the generation's."""
        self._left = now = time.perf_counter()
        if outputs and self.first_at is None:
            self.first_at = now
        for output in outputs:
            if type(output) is Handoff:
                self.handoffs.append((now, output))
                self._segment(output.source, usage)

    def closed(self, role: Role, usage: Usage) -> None:
        """The generation is over, in a segment of this role."""
        self._segment(role, usage)

    def read(self, role: Role, last: Event | None) -> None:
        """A decode came to its `last` event, which tells what the engine had to read for it."""
        if isinstance(last, DecodeChunk | DecodeFinished) and last.read is not None:
            sent, cached = last.read
            self.prefilled[role] += sent - cached
            self.cached[role] += cached

    def _segment(self, role: Role, usage: Usage) -> None:
        before, self._counted = self._counted, usage
        if tokens := usage.completion_tokens - before.completion_tokens:
            self.segments.append(Segment(role, tokens))
