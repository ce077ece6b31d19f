"""Which cues hand over easy text: statistics by cue over scored traces, and the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from relaygen.boundaries import BoundarySet
from relaygen.calibration.candidates import hidden_by
from relaygen.calibration.segments import Segmenter, Span, thought
from relaygen.calibration.statistics import BUCKETS, Comparison, Tally, compare, holm
from relaygen.calibration.traces import Scored
from relaygen.cues import CueMatch, CueSet
from relaygen.policy import Thinking


class Rule(StrEnum):
    """What is measured of a segment."""

    SUCCESS = "success"
    """How likely the scorer is to write the segment as the trace has it, wherever the large model
    was sure of its own: what that leaves open is style, and another choice there costs nothing."""
    MARGIN = "margin"
    """The paper's: the mean margin of the segment's tokens under the scorer."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a cue must show to be chosen.

    `sure` is the large model's margin from which a token counts as its own surely; `least` the mean
    that a chosen cue has at least; `alpha` the chance of any false choice, after Holm.
    """

    rule: Rule = Rule.SUCCESS
    sure: float = 0.9
    least: float = 0.95
    alpha: float = 0.05
    occurrences: int = 12
    traces: int = 8
    longest: int = 256
    draws: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CueStatistic:
    """One candidate. `tokens` is the mean length of its segments; `why` explains the choice."""

    cue: str
    count: int
    traces: int
    tokens: float
    spread: float
    compared: Comparison
    corrected: float
    chosen: bool
    why: str
    hides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """All candidates, the best first. `overall` is the mean over all of the thinking."""

    choice: Choice
    overall: float
    traces: int
    tokens: int
    unknown: int
    cues: tuple[CueStatistic, ...]

    @property
    def chosen(self) -> tuple[CueStatistic, ...]:
        return tuple(cue for cue in self.cues if cue.chosen)


class Statistics:
    """Feed scored traces one at a time; memory grows with the cues and clusters alone."""

    def __init__(
        self,
        cues: Sequence[CueSet],
        boundaries: BoundarySet,
        thinking: Thinking,
        choice: Choice,
    ) -> None:
        self._segmenter = Segmenter(cues, boundaries, choice.longest)
        self._thinking, self.choice = thinking, choice
        self.match = cues[0].match if cues else CueMatch.WORD
        self.overall = Tally()
        self.tallies: dict[str, Tally] = {}
        self.lengths: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.traces = self.tokens = self.unknown = 0

    def add(self, scored: Scored) -> None:
        segmenter, cluster = self._segmenter, self.traces % BUCKETS
        segmenter.read(scored.trace.texts)
        span = thought(scored.trace.texts, self._thinking)
        self.traces += 1
        self.tokens += span.end - span.start
        self.unknown += scored.score.margins[span.start : span.end].count(None)
        values = self._values(scored)
        for sentence in segmenter.sentences(span):
            if measured := self._measure(values, sentence):
                self.overall.add(cluster, *measured)
        found: set[str] = set()
        for segment in segmenter.after_cues(span):
            if measured := self._measure(values, segment):
                self._add(segment, cluster, *measured)
                found.add(segment.cue)
        for cue in found:
            self.seen[cue] = self.seen.get(cue, 0) + 1

    def _add(self, segment: Span, cluster: int, value: float, weight: float) -> None:
        cue = segment.cue
        if cue not in self.tallies:
            self.tallies[cue], self.lengths[cue] = Tally(), 0
        self.tallies[cue].add(cluster, value, weight)
        self.lengths[cue] += segment.end - segment.start

    def _values(self, scored: Scored) -> Sequence[float | None]:
        """What the rule measures, by token."""
        if self.choice.rule is Rule.MARGIN:
            return scored.score.margins
        return chances(scored, self.choice.sure)

    def _measure(self, values: Sequence[float | None], span: Span) -> tuple[float, float] | None:
        """The rule's value, summed over so many units; None where nothing is known."""
        known = [value for value in values[span.start : span.end] if value is not None]
        if not known:
            return None
        if self.choice.rule is Rule.MARGIN:
            return sum(known), len(known)
        return math.prod(known), 1.0


def chances(scored: Scored, sure: float) -> list[float | None]:
    """By token: the probability, 0..1, that the scorer writes it too.

    It is taken from the scorer's margin as if the two likeliest were all there are: (1 + m) / 2
    for the likeliest, (1 - m) / 2 for another one. None where it is not known, and where the large
    model was not sure itself. Their product is a segment's success: it tells segments that are
    always right but not surely from those that are surely right.
    """
    tokens = zip(scored.trace.margins, scored.score.margins, scored.score.hits, strict=True)
    return [
        None
        if margin is None or hit is None or (own is not None and own < sure)
        else ((1 + margin) / 2 if hit else (1 - margin) / 2)
        for own, margin, hit in tokens
    ]


def succeeds(scored: Scored, span: Span, sure: float) -> bool | None:
    """Whether the scorer would have written every token that the large model was sure of.

    None where nothing is known of them. Tokens of unknown margin count as sure.
    """
    margins = scored.trace.margins[span.start : span.end]
    hits = scored.score.hits[span.start : span.end]
    known = [
        hit
        for margin, hit in zip(margins, hits, strict=True)
        if hit is not None and (margin is None or margin >= sure)
    ]
    return all(known) if known else None


def select(statistics: Statistics) -> Selection:
    """Ranks the candidates and chooses. A chosen cue that another chosen one hides is merged."""
    choice = statistics.choice
    enough = {
        cue: tally
        for cue, tally in statistics.tallies.items()
        if tally.count >= choice.occurrences and statistics.seen[cue] >= choice.traces
    }
    compared = compare(enough, statistics.overall, draws=choice.draws, seed=choice.seed)
    corrected = holm({cue: found.p for cue, found in compared.items()})
    cues = [_statistic(statistics, cue, found, corrected[cue]) for cue, found in compared.items()]
    cues.sort(key=lambda cue: (-cue.compared.mean, -cue.count, cue.cue))
    return Selection(
        choice=choice,
        overall=statistics.overall.mean,
        traces=statistics.traces,
        tokens=statistics.tokens,
        unknown=statistics.unknown,
        cues=tuple(_merged(cues, statistics.match)),
    )


def _statistic(
    statistics: Statistics, cue: str, found: Comparison, corrected: float
) -> CueStatistic:
    tally = statistics.tallies[cue]
    why = _against(statistics.choice, found, corrected)
    return CueStatistic(
        cue=cue,
        count=tally.count,
        traces=statistics.seen[cue],
        tokens=statistics.lengths[cue] / tally.count,
        spread=tally.spread,
        compared=found,
        corrected=corrected,
        chosen=not why,
        why=why or "its text is easier than the whole",
    )


def _against(choice: Choice, found: Comparison, corrected: float) -> str:
    """What speaks against a cue, "" if nothing does."""
    if not found.low > 0:
        return "no easier than the whole (the interval reaches 0)"
    if corrected > choice.alpha:
        return f"may be chance (p = {corrected:.3f} after Holm)"
    if choice.rule is Rule.SUCCESS and found.mean < choice.least:
        return f"too often wrong (below {choice.least:g})"
    return ""


def _merged(cues: Sequence[CueStatistic], match: CueMatch) -> Iterator[CueStatistic]:
    """Online a cue that another one hides never fires: its occurrences are the other's."""
    chosen = [found.cue for found in cues if found.chosen]
    online = CueSet(chosen, match)
    firing = [cue for cue in chosen if not hidden_by(cue, chosen, online)]
    by = {cue: hidden_by(cue, firing, online) for cue in chosen}
    for found in cues:
        if other := by.get(found.cue):
            yield replace(found, chosen=False, why=f"merged into {other!r}")
        else:
            hides = tuple(cue for cue, hider in by.items() if hider == found.cue)
            yield replace(found, hides=hides)


def gather(
    scored: Iterable[Scored],
    cues: Sequence[CueSet],
    boundaries: BoundarySet,
    thinking: Thinking,
    choice: Choice,
) -> Statistics:
    """The statistics of all traces, read one at a time."""
    statistics = Statistics(cues, boundaries, thinking, choice)
    for one in scored:
        statistics.add(one)
    return statistics
