"""The statistics of RelayGen's reference implementation, for comparison with ours.

Plain substrings, so that "now" counts in "know"; a segment ends at the first of `.`, `!`, `?` or a
line end, decimals not excepted; tokens are pooled over all traces, and the standard error takes
them for independent. A cue is chosen if its mean is above the mean of all tokens. (arXiv 2602.06454
and its code, from their description.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from relaygen.calibration.segments import thought
from relaygen.calibration.traces import Scored
from relaygen.policy import Thinking

ENDS = (".", "!", "?", "\n")


@dataclass(slots=True)
class Pool:
    """Sums over tokens."""

    segments: int = 0
    traces: int = 0
    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, margins: Iterable[float]) -> None:
        for margin in margins:
            self.tokens += 1
            self.total += margin
            self.squares += margin * margin

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else float("nan")

    @property
    def spread(self) -> float:
        """Standard deviation between tokens; NaN for fewer than two."""
        if self.tokens < 2:
            return float("nan")
        squares = self.squares - self.tokens * self.mean**2
        return math.sqrt(max(0.0, squares) / (self.tokens - 1))

    @property
    def error(self) -> float:
        """Standard error of the mean, tokens taken for independent."""
        return self.spread / math.sqrt(self.tokens) if self.tokens else float("nan")


@dataclass(slots=True)
class ReferenceStatistics:
    """Feed scored traces; `chosen` are the cues that the reference's rule takes."""

    cues: tuple[str, ...]
    thinking: Thinking
    overall: Pool = field(default_factory=Pool)
    pools: dict[str, Pool] = field(default_factory=dict)
    traces: int = 0

    def add(self, scored: Scored) -> None:
        self.traces += 1
        span = thought(scored.trace.texts, self.thinking)
        texts = scored.trace.texts[span.start : span.end]
        margins = scored.score.margins[span.start : span.end]
        self.overall.add(margin for margin in margins if margin is not None)
        text, starts = "".join(texts), list(_starts(texts))
        for cue in self.cues:
            found = list(_segments(text, cue))
            if not found:
                continue
            pool = self.pools.setdefault(cue, Pool())
            pool.traces += 1
            pool.segments += len(found)
            for begin, end in found:
                inside = margins[bisect_left(starts, begin) : bisect_left(starts, end)]
                pool.add(margin for margin in inside if margin is not None)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The best first."""
        above = [cue for cue, pool in self.pools.items() if pool.mean > self.overall.mean]
        return tuple(sorted(above, key=lambda cue: -self.pools[cue].mean))


def _starts(texts: Sequence[str]) -> Iterator[int]:
    """Where each token begins in the text."""
    position = 0
    for text in texts:
        yield position
        position += len(text)


def _segments(text: str, cue: str) -> Iterator[tuple[int, int]]:
    """From after each occurrence to after the next end."""
    found = text.find(cue)
    while found >= 0:
        begin = found + len(cue)
        ends = [at for mark in ENDS if (at := text.find(mark, begin)) >= 0]
        yield begin, min(ends) + 1 if ends else len(text)
        found = text.find(cue, begin)
