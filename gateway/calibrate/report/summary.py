"""What the evidence means, in sentences."""

from __future__ import annotations

import math

from gateway.calibrate.report.evidence import Evidence
from gateway.calibrate.report.grids import summed_up
from gateway.calibrate.report.wording import (
    UNKNOWN,
    counted,
    decimal,
    listed,
    milliseconds,
    percent,
)
from relaygen.calibration.selection import Rule


def sentences(evidence: Evidence) -> list[str]:
    """The whole result, a thought each."""
    return [
        _chosen(evidence),
        _basis(evidence),
        _share(evidence),
        _quality(evidence),
        *_speed(evidence),
    ]


def figures(evidence: Evidence) -> list[tuple[str, str]]:
    """The few numbers to see first: name and value."""
    expected, speeds = evidence.expected, evidence.speeds
    return [
        ("chosen cues", str(len(evidence.cues))),
        ("large share of tokens", percent(expected.replayed.large_share)),
        ("expected quality", percent(expected.replayed.quality)),
        ("expected speed-up", f"{decimal(expected.replayed.speed_up(speeds), 2)} ×"),
        ("break-even handoff", milliseconds(expected.replayed.break_even_ms(speeds))),
    ]


def _chosen(evidence: Evidence) -> str:
    if not evidence.cues:
        return f"{summed_up(evidence.selection)}: with none, the large model writes all thinking."
    return f"{summed_up(evidence.selection)}: {listed(evidence.cues)}."


def _basis(evidence: Evidence) -> str:
    selection = evidence.selection
    choice = selection.choice
    read = f"{counted(selection.traces, 'trace')} with {counted(selection.tokens, 'token')}"
    if choice.rule is Rule.SUCCESS:
        what = (
            "the small model writes a sentence as the large one did, wherever that was sure "
            f"(margin {choice.sure:g} or more), with a probability of {percent(selection.overall)}"
        )
    else:
        what = f"the small model's mean margin is {decimal(selection.overall)}"
    unknown = f"; {counted(selection.unknown, 'token')} could not be scored"
    return f"In {read} of thinking, {what}{unknown if selection.unknown else ''}."


def _share(evidence: Evidence) -> str:
    expected = evidence.expected
    return (
        f"The small model is expected to write {percent(expected.small_share)} of the tokens, the "
        f"large one {percent(expected.replayed.large_share)}, with {decimal(expected.handoffs, 1)} "
        "handoffs a trace."
    )


def _quality(evidence: Evidence) -> str:
    return (
        f"In {percent(evidence.expected.replayed.quality)} of the traces no segment that is handed "
        "over goes wrong (expected quality)."
    )


def _speed(evidence: Evidence) -> list[str]:
    expected, speeds = evidence.expected.replayed, evidence.speeds
    free = expected.large * speeds.large_ms + expected.small * speeds.small_ms
    alone = (expected.large + expected.small) * speeds.large_ms
    ideal = decimal(alone / free, 2) if free else UNKNOWN
    rate = (
        f"Expected speed-up over the large model alone: {decimal(expected.speed_up(speeds), 2)} at "
        f"{milliseconds(speeds.handoff_ms)} a handoff, {ideal} were handoffs free."
    )
    return [rate, _break_even(expected.break_even_ms(speeds))]


def _break_even(cost: float | None) -> str:
    if cost is None:
        return "Nothing is handed over, so no handoff can cost anything."
    if not math.isfinite(cost):
        return "The cost of a handoff at which relaying gains nothing is unknown."
    if cost <= 0:
        return "The small model is not the faster one: relaying can save no time."
    return f"Relaying gains nothing once a handoff costs {milliseconds(cost)} (break-even)."
