"""A trace: one recorded generation of the large model, and how a scorer judged its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

VERSION = 1

OnBadLine = Literal["stop", "skip"]
Line = str | bytes
_Record = TypeVar("_Record", "Trace", "Score")


class BadLineError(Exception):
    """A line that is no trace; the message names file, line, problem and remedy."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One generation, token by token: `texts`, joined, are all that the model wrote, tags and all.

    `margins` are p(top-1) - p(top-2) of the large model itself, 0..1, None where unknown; times are
    seconds.
    """

    id: str
    question: str
    prompt: str
    prompt_ids: tuple[int, ...]
    texts: tuple[str, ...]
    ids: tuple[int, ...]
    margins: tuple[float | None, ...]
    finish: str
    first_s: float
    total_s: float
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's judgement of a trace, one value a token: its margin, and whether its likeliest
    token is the trace's; None where it is unknown."""

    id: str
    scorer: str
    margins: tuple[float | None, ...]
    hits: tuple[bool | None, ...]
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Scored:
    """A trace beside its score."""

    trace: Trace
    score: Score


def to_line(record: Trace | Score) -> str:
    data = {field.name: getattr(record, field.name) for field in fields(record)}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


Loads = Callable[[Line], Any]
"""Reads JSON; ValueError where it is none."""


def read_traces(
    lines: Iterable[Line],
    source: str,
    on_bad: OnBadLine = "stop",
    told: list[str] | None = None,
    loads: Loads = json.loads,
) -> Iterator[Trace]:
    """The traces of a file's lines, one at a time. BadLineError at the first bad line, unless they
    are to be skipped; then `told` gets what was wrong."""
    return _read(lines, source, on_bad, told, lambda line: _trace(loads(line)))


def read_scores(
    lines: Iterable[Line],
    source: str,
    on_bad: OnBadLine = "stop",
    told: list[str] | None = None,
    loads: Loads = json.loads,
) -> Iterator[Score]:
    return _read(lines, source, on_bad, told, lambda line: _score(loads(line)))


def _read(
    lines: Iterable[Line],
    source: str,
    on_bad: OnBadLine,
    told: list[str] | None,
    parse: Callable[[Line], _Record],
) -> Iterator[_Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse(line)
        except (KeyError, TypeError, ValueError) as error:
            message = f"{source}, line {number}: {_problem(error)}"
            if on_bad == "stop":
                remedy = "mend or delete the line, or skip such lines with --on-bad-line skip"
                raise BadLineError(f"{message}; {remedy}") from None
            if told is not None:
                told.append(message)
            continue
        yield record


def _problem(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return f"no record of ours: {error}"


def _trace(data: dict[str, Any]) -> Trace:
    _check_version(data)
    trace = Trace(
        id=str(data["id"]),
        question=str(data["question"]),
        prompt=str(data["prompt"]),
        prompt_ids=_values(data, "prompt_ids", _IDS),
        texts=_values(data, "texts", _TEXTS),
        ids=_values(data, "ids", _IDS),
        margins=_values(data, "margins", _MARGINS),
        finish=str(data["finish"]),
        first_s=float(data["first_s"]),
        total_s=float(data["total_s"]),
    )
    if len(trace.margins) != len(trace.texts) or len(trace.ids) not in (0, len(trace.texts)):
        raise ValueError("texts, ids and margins are of different lengths")
    return trace


def _score(data: dict[str, Any]) -> Score:
    _check_version(data)
    score = Score(
        id=str(data["id"]),
        scorer=str(data["scorer"]),
        margins=_values(data, "margins", _MARGINS),
        hits=_values(data, "hits", _HITS),
    )
    if len(score.margins) != len(score.hits):
        raise ValueError("margins and hits are of different lengths")
    return score


def _check_version(data: object) -> None:
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']!r}; this program reads version {VERSION}")


_TEXTS: frozenset[type] = frozenset({str})
_IDS: frozenset[type] = frozenset({int})
_MARGINS: frozenset[type] = frozenset({float, int, type(None)})
_HITS: frozenset[type] = frozenset({bool, type(None)})


def _values(data: dict[str, Any], name: str, kinds: frozenset[type]) -> tuple[Any, ...]:
    values = data[name]
    if not isinstance(values, list):
        raise ValueError(f"{name} is no list")
    if not kinds.issuperset(found := set(map(type, values))):
        wrong = next(kind for kind in found if kind not in kinds)
        raise ValueError(f"{name} has a {wrong.__name__} in it")
    return tuple(values)


def paired(traces: Iterable[Trace], scores: Iterable[Score]) -> Iterator[Scored]:
    """Traces beside their scores, which are in the same order; a trace without one is left out.

    Neither is held in memory but for the one at hand. BadLineError where a score is no trace's in
    this order.
    """
    waiting = iter(scores)
    score = next(waiting, None)
    for trace in traces:
        if score is not None and score.id == trace.id:
            if len(score.margins) != len(trace.texts):
                raise BadLineError(
                    f"trace {trace.id}: it has {len(trace.texts)} tokens, its score "
                    f"{len(score.margins)}; score it again"
                )
            yield Scored(trace, score)
            score = next(waiting, None)
    if score is not None:
        raise BadLineError(
            f"score {score.id}: no trace has this id, or it is not in the traces' order; delete "
            "the scores and score the traces again"
        )
