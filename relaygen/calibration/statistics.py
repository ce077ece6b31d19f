"""Means over cues with their uncertainty: ratios of sums, by clusters of traces.

Tokens and sentences of one trace are not independent, so a trace (or, of very many, a bucket of
traces) is drawn as a whole: the bootstrap over clusters, Efron and Tibshirani 1993, chapter 8.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

BUCKETS = 256
"""Clusters kept apart: one a trace up to here; beyond, traces share them, and memory is bounded.
So many tell a standard error to 4 %, as 1,000 draws do to 2 %."""


def _zeros() -> array[float]:
    return array("d", bytes(8 * BUCKETS))


@dataclass(slots=True)
class Tally:
    """Sums of values and weights by cluster, and plain counts."""

    count: int = 0
    square: float = 0.0
    sums: array[float] = field(default_factory=_zeros)
    weights: array[float] = field(default_factory=_zeros)

    def add(self, cluster: int, value: float, weight: float) -> None:
        """A segment whose values sum to `value` over `weight` units (tokens, or one sentence)."""
        self.count += 1
        self.square += value * value / weight
        self.sums[cluster] += value
        self.weights[cluster] += weight

    @property
    def weight(self) -> float:
        return sum(self.weights)

    @property
    def mean(self) -> float:
        """Weighted mean, NaN where there is nothing."""
        weight = self.weight
        return sum(self.sums) / weight if weight else float("nan")

    @property
    def spread(self) -> float:
        """Standard deviation between segments, about the mean."""
        weight = self.weight
        if not weight:
            return float("nan")
        return math.sqrt(max(0.0, self.square / weight - self.mean**2))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cue's mean against the overall mean. `low` and `high` bound the difference (95 %);
    `p` is the one-sided probability of so much were there no difference."""

    mean: float
    error: float
    difference: float
    low: float
    high: float
    p: float


def compare(
    tallies: Mapping[str, Tally], overall: Tally, *, draws: int = 1000, seed: int = 0
) -> dict[str, Comparison]:
    """Each tally against the overall one, by one bootstrap over clusters for all of them.

    Of a single cluster, and of what is in no draw, no uncertainty is known: NaN, and a `p` of 1.
    """
    clusters = [cluster for cluster, weight in enumerate(overall.weights) if weight]
    sums = {name: _Sums.of(tally, clusters) for name, tally in tallies.items()}
    whole = _Sums.of(overall, clusters)
    means: dict[str, list[float]] = {name: [] for name in tallies}
    differences: dict[str, list[float]] = {name: [] for name in tallies}
    for drawn in _draws(len(clusters), draws, seed):
        base = whole.ratio(drawn)
        for name, own in sums.items():
            mean = own.ratio(drawn)
            if not math.isnan(mean):
                means[name].append(mean)
                differences[name].append(mean - base)
    return {
        name: _compared(tally, overall, means[name], differences[name])
        for name, tally in tallies.items()
    }


_Draw = Callable[[Sequence[float]], Sequence[float]]


def _draws(clusters: int, draws: int, seed: int) -> Iterator[_Draw]:
    """Picks as many clusters as there are, again and again; nothing of fewer than two."""
    rng = random.Random(seed)
    for _ in range(draws if clusters > 1 else 0):
        yield itemgetter(*rng.choices(range(clusters), k=clusters))


@dataclass(frozen=True, slots=True)
class _Sums:
    """A tally's sums and weights, a cluster beside the other."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, tally: Tally, clusters: Sequence[int]) -> _Sums:
        return cls(
            tuple(tally.sums[c] for c in clusters), tuple(tally.weights[c] for c in clusters)
        )

    def ratio(self, drawn: _Draw) -> float:
        """The mean of a draw, NaN where it has nothing of this tally."""
        weight = sum(drawn(self.weights))
        return sum(drawn(self.values)) / weight if weight else float("nan")


def _compared(
    tally: Tally, overall: Tally, means: Sequence[float], differences: Sequence[float]
) -> Comparison:
    difference = tally.mean - overall.mean
    if not differences:
        nan = float("nan")
        return Comparison(tally.mean, nan, difference, nan, nan, 1.0)
    ordered, last = sorted(differences), len(differences) - 1
    return Comparison(
        mean=tally.mean,
        error=_deviation(means),
        difference=difference,
        low=ordered[int(0.025 * last)],
        high=ordered[int(0.975 * last + 0.5)],
        p=_above(difference, _deviation(differences)),
    )


def _deviation(values: Sequence[float]) -> float:
    centre = sum(values) / len(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / len(values))


def _above(difference: float, error: float) -> float:
    """The normal distribution's tail: however many tests, a p-value can be small enough."""
    if not error:
        return float(difference <= 0)
    return 0.5 * math.erfc(difference / error / math.sqrt(2))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction (1979): p-values that bound the chance of any false choice."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    corrected: dict[str, float] = {}
    highest = 0.0
    for rank, name in enumerate(ordered):
        highest = max(highest, min(1.0, (len(ordered) - rank) * p_values[name]))
        corrected[name] = highest
    return corrected
