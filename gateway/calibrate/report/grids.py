"""The report's tables as plain text cells, whatever draws them."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.calibrate.report.evidence import Evidence, Prefix
from gateway.calibrate.report.wording import (
    decimal,
    interval,
    milliseconds,
    percent,
    probability,
    visible,
)
from relaygen.calibration.selection import CueStatistic, Rule, Selection


@dataclass(frozen=True, slots=True)
class Column:
    """`numeric` columns are set flush right."""

    name: str
    numeric: bool = True


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; the first cell names the row, and the rows in `marked` stand out."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    note: str = ""


def measured(rule: Rule) -> str:
    """What the means are means of."""
    return "success rate" if rule is Rule.SUCCESS else "mean margin"


def summed_up(selection: Selection) -> str:
    chosen, all_cues = len(selection.chosen), len(selection.cues)
    return f"{chosen} of {all_cues} candidate cues are chosen"


# ---- the candidates -----------------------------------------------------------------------------


def candidates(selection: Selection) -> Grid:
    """Every candidate that occurs often enough, the best first."""
    overall = decimal(selection.overall)
    columns = (
        Column("cue", numeric=False),
        Column("chosen", numeric=False),
        Column("segments"),
        Column("traces"),
        Column("tokens a segment"),
        Column(measured(selection.choice.rule)),
        Column("difference to the whole, 95 %"),
        Column("p after Holm"),
        Column("hides", numeric=False),
    )
    return Grid(
        title=f"{summed_up(selection)}; {measured(selection.choice.rule)} overall {overall}",
        columns=columns,
        rows=tuple(_candidate(cue) for cue in selection.cues),
        marked=frozenset(i for i, cue in enumerate(selection.cues) if cue.chosen),
        note="A cue hides those that can never fire because it is complete before them.",
    )


def _candidate(cue: CueStatistic) -> tuple[str, ...]:
    return (
        visible(cue.cue),
        "yes" if cue.chosen else f"no: {visible(cue.why)}",
        f"{cue.count:,}",
        f"{cue.traces:,}",
        decimal(cue.tokens, 1),
        decimal(cue.compared.mean),
        interval(cue.compared.low, cue.compared.high),
        probability(cue.corrected),
        ", ".join(visible(other) for other in cue.hides),
    )


# ---- the list cut after so many cues ------------------------------------------------------------

_PREFIX_COLUMNS = (
    Column("cues"),
    Column("added", numeric=False),
    Column("small share"),
    Column("quality"),
    Column("handoffs a trace"),
    Column("speed-up"),
    Column("break-even"),
)


def prefixes(evidence: Evidence) -> Grid:
    """What the best so many cues bring; the row of the policy is marked."""
    expected = evidence.expected
    handoff = milliseconds(evidence.speeds.handoff_ms)
    return Grid(
        title=f"What the best cues bring, one added at a time; speed-up at {handoff} a handoff",
        columns=_PREFIX_COLUMNS,
        rows=tuple(_prefix(prefix, evidence) for prefix in evidence.prefixes),
        marked=frozenset(i for i, p in enumerate(evidence.prefixes) if p is expected),
        note="Quality: traces in which no handed-over segment goes wrong. "
        "Break-even: the cost of a handoff at which relaying gains nothing.",
    )


def _prefix(prefix: Prefix, evidence: Evidence) -> tuple[str, ...]:
    replayed = prefix.replayed
    return (
        str(len(prefix.cues)),
        visible(prefix.added) or "(none)",
        percent(prefix.small_share),
        percent(replayed.quality),
        decimal(prefix.handoffs, 1),
        decimal(replayed.speed_up(evidence.speeds), 2),
        milliseconds(replayed.break_even_ms(evidence.speeds)),
    )


# ---- provenance ---------------------------------------------------------------------------------


def provenance(evidence: Evidence) -> Grid:
    speeds = evidence.speeds
    rows = [(visible(key), visible(value)) for key, value in evidence.provenance.items()]
    rows += [
        ("large model's speed", f"{milliseconds(speeds.large_ms)} a token"),
        ("small model's speed", f"{milliseconds(speeds.small_ms)} a token"),
        ("a handoff", milliseconds(speeds.handoff_ms)),
    ]
    columns = (Column("what", numeric=False), Column("value", numeric=False))
    return Grid("Where this comes from: models, prompts, measured speeds", columns, tuple(rows))
