"""The select stage: cues from scored traces, and what each beginning of their list would bring."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from relaygen.calibration.candidates import REFERENCE, Beginnings, layers
from relaygen.calibration.projection import Replayed, replayed_all
from relaygen.calibration.reference import ReferenceStatistics
from relaygen.calibration.segments import thought
from relaygen.calibration.selection import Choice, Selection, gather, select
from relaygen.calibration.traces import (
    OnBadLine,
    Scored,
    Trace,
    paired,
    read_scores,
    read_traces,
)
from relaygen.policy import Policy

PROJECTED = 500
"""Traces that are replayed, from the first on: each is played once for each beginning."""

OnProgress = Callable[[str, int, int], None]
"""Told what is done, how much and of how much: bytes of a file, or traces."""


@dataclass(frozen=True, slots=True)
class Files:
    """What the earlier stages left."""

    traces: Path
    scores: Path
    on_bad: OnBadLine = "stop"


@dataclass(frozen=True, slots=True)
class Found:
    """The selection and, for each beginning of the chosen list, the replayed traces.

    `skipped` are the bad lines, by file and number.
    """

    selection: Selection
    prefixes: tuple[tuple[tuple[str, ...], Replayed], ...]
    skipped: tuple[str, ...]


def select_cues(
    files: Files, choice: Choice, policy: Policy, on_progress: OnProgress | None = None
) -> Found:
    """Reads the traces twice, one at a time. Raises BadLineError at a bad line, unless skipped.

    `policy` is the one that the cues are for; its own count for nothing.
    """
    choice = replace(choice, longest=policy.max_small_tokens)
    thinking, boundaries, match = policy.thinking, policy.boundary_set, policy.cues.match
    beginnings = Beginnings(boundaries)
    with _traces(files, None, on_progress, "sentences") as traces:
        for trace in traces:
            beginnings.add(trace.texts, thought(trace.texts, thinking))
    own = beginnings.frequent(sentences=choice.occurrences, traces=choice.traces)
    told: list[str] = []
    with scored_traces(files, told, on_progress, "segments") as scored:
        statistics = gather(scored, layers([*REFERENCE, *own], match), boundaries, thinking, choice)
    selection = select(statistics)
    return Found(selection, prefixes(files, selection, policy, choice, on_progress), tuple(told))


def select_by_reference(
    files: Files, policy: Policy, on_progress: OnProgress | None = None
) -> ReferenceStatistics:
    """The reference implementation's statistics over the same traces."""
    statistics = ReferenceStatistics(REFERENCE, policy.thinking)
    with scored_traces(files, [], on_progress, "segments") as scored:
        for one in scored:
            statistics.add(one)
    return statistics


def prefixes(
    files: Files,
    selection: Selection,
    policy: Policy,
    choice: Choice,
    on_progress: OnProgress | None = None,
) -> tuple[tuple[tuple[str, ...], Replayed], ...]:
    """Each beginning of the chosen list, from none to all, and the traces replayed with it."""
    words = tuple(cue.cue for cue in selection.chosen)
    lists = [words[:count] for count in range(len(words) + 1)]
    with scored_traces(files) as scored:
        some = _counted(itertools.islice(scored, PROJECTED), selection.traces, on_progress)
        return tuple(zip(lists, replayed_all(policy, lists, some, choice.sure), strict=True))


@contextmanager
def _traces(
    files: Files, told: list[str] | None, on_progress: OnProgress | None, what: str
) -> Iterator[Iterator[Trace]]:
    with files.traces.open("rb") as lines:
        size = files.traces.stat().st_size
        followed = _followed(lines, what, size, on_progress)
        yield read_traces(followed, str(files.traces), files.on_bad, told, orjson.loads)


@contextmanager
def scored_traces(
    files: Files,
    told: list[str] | None = None,
    on_progress: OnProgress | None = None,
    what: str = "",
) -> Iterator[Iterator[Scored]]:
    """The traces beside their scores, one at a time. `told` gets the bad lines that are skipped."""
    with _traces(files, told, on_progress, what) as traces, files.scores.open("rb") as lines:
        scores = read_scores(lines, str(files.scores), files.on_bad, told, orjson.loads)
        yield paired(traces, scores)


def _followed(
    lines: Iterable[bytes], what: str, size: int, on_progress: OnProgress | None
) -> Iterator[bytes]:
    read = 0
    for line in lines:
        yield line
        read += len(line)
        if on_progress is not None:
            on_progress(what, read, size)


def _counted(
    scored: Iterable[Scored], traces: int, on_progress: OnProgress | None
) -> Iterator[Scored]:
    for count, one in enumerate(scored, 1):
        yield one
        if on_progress is not None:
            on_progress("projection", count, min(traces, PROJECTED))
