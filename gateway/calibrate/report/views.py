"""The numbers behind the pictures, for SVG and PNG alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.calibrate.report.evidence import Evidence, Example, Prefix
from gateway.calibrate.report.wording import counted, visible
from relaygen.calibration.projection import Speeds
from relaygen.calibration.segments import Span, thought
from relaygen.calibration.selection import CueStatistic, Selection, succeeds
from relaygen.events import Role
from relaygen.policy import Thinking

HANDOFF_MS = 50
"""The speed-up is drawn for handoffs of up to so many milliseconds."""
MAX_BARS = 60
_CUE_TOKENS = 16  # a cue is looked for in a segment's last tokens


@dataclass(frozen=True, slots=True)
class Block:
    """A run of tokens of one role; `mean` is their mean margin under the scorer, None if unknown.

    `cue` is what ended a large segment; `wrong`: the scorer would have left the trace here.
    """

    role: Role
    start: int
    end: int
    mean: float | None
    cue: str = ""
    wrong: bool = False


def blocks(example: Example, evidence: Evidence) -> tuple[Block, ...]:
    """The segments of an example; runs of one role count as one."""
    runs = list(_runs(example))
    return tuple(
        _block(example, evidence, run, following)
        for run, following in zip(runs, [*runs[1:], None], strict=True)
    )


_Run = tuple[Role, int, int]


def _runs(example: Example) -> Iterator[_Run]:
    open_run: _Run | None = None
    for role, span in example.roles:
        if open_run and open_run[0] is role and open_run[2] == span.start:
            open_run = (role, open_run[1], span.end)
            continue
        if open_run:
            yield open_run
        open_run = (role, span.start, span.end)
    if open_run:
        yield open_run


def _block(example: Example, evidence: Evidence, run: _Run, following: _Run | None) -> Block:
    role, start, end = run
    known = [m for m in example.scored.score.margins[start:end] if m is not None]
    mean = sum(known) / len(known) if known else None
    if role is Role.LARGE:
        texts = example.scored.trace.texts[max(start, end - _CUE_TOKENS) : end]
        return Block(role, start, end, mean, _last_cue(texts, evidence.cues) if following else "")
    sure = evidence.selection.choice.sure
    answer = thought(example.scored.trace.texts, Thinking()).end  # it is not handed over by a cue
    wrong = any(
        succeeds(example.scored, Span(span.start, min(span.end, answer)), sure) is False
        for span_role, span in example.roles
        if span_role is role and start <= span.start and span.end <= end and span.start < answer
    )
    return Block(role, start, end, mean, wrong=wrong)


def _last_cue(texts: Sequence[str], cues: Sequence[str]) -> str:
    """The cue that ends inside the last token, the longest of several; "" if none does."""
    text = "".join(texts)
    last = len(text) - len(texts[-1]) if texts else 0
    return max((cue for cue in cues if text.find(cue, _reach(cue, last)) >= 0), key=len, default="")


def _reach(cue: str, last: int) -> int:
    """Where a cue begins at the earliest to end after the character `last`."""
    return max(0, last - len(cue) + 1)


def dots(example: Example) -> list[tuple[int, float]]:
    """Index and margin of every token whose margin is known."""
    return [(i, m) for i, m in enumerate(example.scored.score.margins) if m is not None]


def bars(selection: Selection) -> list[CueStatistic]:
    """The cues to draw: all that are chosen, and the best of the rest, as many as fit."""
    others = MAX_BARS - len(selection.chosen)
    kept: list[CueStatistic] = []
    for cue in selection.cues:
        others -= not cue.chosen
        if cue.chosen or others >= 0:
            kept.append(cue)
    return kept


def speed_ups(prefix: Prefix, speeds: Speeds) -> list[tuple[float, float]]:
    """Cost of a handoff in milliseconds, and the speed-up at that cost."""
    return [
        (cost, prefix.replayed.speed_up(Speeds(speeds.large_ms, speeds.small_ms, cost)))
        for cost in range(HANDOFF_MS + 1)
    ]


def break_even(prefix: Prefix, speeds: Speeds) -> float | None:
    """The cost at which relaying gains nothing, where it is inside the picture."""
    cost = prefix.replayed.break_even_ms(speeds)
    return cost if cost is not None and 0 < cost <= HANDOFF_MS else None


def name(prefix: Prefix) -> str:
    if not prefix.cues:
        return "no cue"
    return f"{counted(len(prefix.cues), 'cue')}, the last “{visible(prefix.added)}”"
