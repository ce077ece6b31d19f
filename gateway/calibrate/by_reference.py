"""The select stage by the reference implementation's rule, in the form that reports show."""

from __future__ import annotations

from gateway.calibrate.selecting import Files, Found, prefixes, select_by_reference
from relaygen.calibration.reference import Pool, ReferenceStatistics
from relaygen.calibration.selection import Choice, CueStatistic, Selection
from relaygen.calibration.statistics import Comparison
from relaygen.policy import Policy

_Z = 1.96  # of a normal distribution's 95 %


def found_by_reference(files: Files, policy: Policy, choice: Choice) -> Found:
    """Raises BadLineError."""
    statistics = select_by_reference(files, policy)
    chosen = set(statistics.chosen)
    cues = [_statistic(cue, pool, statistics, chosen) for cue, pool in statistics.pools.items()]
    cues.sort(key=lambda cue: (-cue.compared.mean, cue.cue))
    selection = Selection(
        choice=choice,
        overall=statistics.overall.mean,
        traces=statistics.traces,
        tokens=statistics.overall.tokens,
        unknown=0,
        cues=tuple(cues),
    )
    return Found(selection, tuple(prefixes(files, selection, policy, choice)), ())


def _statistic(
    cue: str, pool: Pool, statistics: ReferenceStatistics, chosen: set[str]
) -> CueStatistic:
    difference = pool.mean - statistics.overall.mean
    low, high = difference - _Z * pool.error, difference + _Z * pool.error
    return CueStatistic(
        cue=cue,
        count=pool.segments,
        traces=pool.traces,
        tokens=pool.tokens / pool.segments,
        spread=pool.spread,
        compared=Comparison(pool.mean, pool.error, difference, low, high, float("nan")),
        corrected=float("nan"),
        chosen=cue in chosen,
        why="its mean margin is above the whole" if cue in chosen else "below the whole",
    )
