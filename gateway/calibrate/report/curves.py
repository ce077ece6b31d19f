"""The two curves over the prefixes, as SVG: share against quality, speed-up against handoffs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gateway.calibrate.report.evidence import Evidence, Prefix
from gateway.calibrate.report.svg import (
    Format,
    Scale,
    axes,
    hint,
    line,
    picture,
    polyline,
    spread,
    tag,
    text,
)
from gateway.calibrate.report.views import HANDOFF_MS, break_even, name, speed_ups
from gateway.calibrate.report.wording import decimal, milliseconds, percent

_WIDTH, _HEIGHT = 460.0, 330.0
_LEFT, _TOP, _BOTTOM = 52.0, 34.0, _HEIGHT - 48
_APART = 15.0  # pixels between two labels

_Place = tuple[float, float]

# ---- share against quality ----------------------------------------------------------------------


def share_curve(evidence: Evidence) -> str:
    """The small model's share against expected quality, a point a prefix."""
    prefixes = evidence.prefixes
    shares = [prefix.small_share for prefix in prefixes]
    qualities = [prefix.replayed.quality for prefix in prefixes]
    left, right = spread(shares, 0.1, 0.06)
    low, high = spread(qualities, 0.2, 0.06)
    x = Scale(max(0.0, left), min(1.0, right), _LEFT, _WIDTH - 16)
    y = Scale(max(0.0, low), min(1.02, high), _BOTTOM, _TOP)
    places = [
        (x.at(share), y.at(quality)) for share, quality in zip(shares, qualities, strict=True)
    ]
    parts = [
        axes(x, y, ("tokens by the small model", "expected quality"), (percents(x), percents(y))),
        polyline(places, "curve"),
        *(_point(evidence, prefix, place) for prefix, place in zip(prefixes, places, strict=True)),
        *_numbers(evidence, places),
    ]
    title = "Curve of the small model's share of the tokens against expected quality, by cues"
    return picture(_WIDTH, _HEIGHT, title, "".join(parts))


def percents(scale: Scale) -> Format:
    """As many digits as the scale's ticks need."""
    marks = scale.ticks()
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    digits = 0 if step >= 0.0099 else 1
    return lambda value: f"{100 * value:.{digits}f} %"


def _point(evidence: Evidence, prefix: Prefix, place: _Place) -> str:
    policy = prefix is evidence.expected
    words = (
        f"{name(prefix)}: small share {percent(prefix.small_share)}, "
        f"expected quality {percent(prefix.replayed.quality)}"
    )
    return tag(
        "circle",
        hint(words),
        cx=place[0],
        cy=place[1],
        r=7 if policy else 4,
        cls="policy" if policy else "point",
    )


def _numbers(evidence: Evidence, places: Sequence[_Place]) -> Iterator[str]:
    """How many cues a point has, where the numbers do not collide; the policy's first."""
    taken: list[_Place] = []
    pairs = list(zip(evidence.prefixes, places, strict=True))
    for prefix, (x, y) in sorted(pairs, key=lambda pair: pair[0] is not evidence.expected):
        policy = prefix is evidence.expected
        if any(abs(x - a) < _APART and abs(y - b) < _APART for a, b in taken):
            continue
        taken.append((x, y))
        count = str(len(prefix.cues))
        words = f"policy: {count}" if policy else count
        if policy:
            yield text(x, y + 22, words, "tick strong", text_anchor=_side(x, _WIDTH / 4))
        else:
            yield text(x, y - 11, words, "tick", text_anchor="middle")


def _side(x: float, turn: float) -> str:
    """To which side of a place its words go."""
    return "end" if x > turn else "start"


# ---- speed-up against the cost of a handoff -----------------------------------------------------


def speed_curve(evidence: Evidence) -> str:
    """Speed-up against the cost of a handoff, a line a prefix, with the break-evens."""
    curves = [(prefix, speed_ups(prefix, evidence.speeds)) for prefix in evidence.prefixes]
    low, high = spread([1.0, *(gain for _, curve in curves for _, gain in curve)], 0.08)
    x = Scale(0.0, HANDOFF_MS, _LEFT, _WIDTH - 66)
    y = Scale(max(0.0, low), high, _BOTTOM, _TOP)
    names = ("cost of a handoff, ms", "speed-up over the large model alone")
    parts = [
        axes(x, y, names, (lambda value: f"{value:.0f}", lambda value: decimal(value, 2))),
        line(x.start, y.at(1.0), x.end, y.at(1.0), "even"),
        _measured(evidence, x),
        *(_curve(evidence, prefix, curve, x, y) for prefix, curve in curves),
        *_crossings(evidence, x, y),
        *_ends(evidence, curves, x, y),
    ]
    title = f"Curves of the speed-up against a handoff's cost of 0 to {HANDOFF_MS} ms, by cues"
    return picture(_WIDTH, _HEIGHT, title, "".join(parts))


def _curve(evidence: Evidence, prefix: Prefix, curve: Sequence[_Place], x: Scale, y: Scale) -> str:
    words = (
        f"{name(prefix)}: break-even {milliseconds(prefix.replayed.break_even_ms(evidence.speeds))}"
    )
    cls = "curve" if prefix is evidence.expected else "curve faint"
    drawn = polyline(((x.at(cost), y.at(gain)) for cost, gain in curve[::2]), cls)
    return tag("g", hint(words) + drawn)


def _measured(evidence: Evidence, x: Scale) -> str:
    cost = evidence.speeds.handoff_ms
    if not 0 < cost <= HANDOFF_MS:
        return ""
    at = x.at(cost)
    return line(at, _BOTTOM, at, _TOP, "even") + text(at + 4, _TOP + 8, "measured", "tick")


def _crossings(evidence: Evidence, x: Scale, y: Scale) -> Iterator[str]:
    """Where relaying gains nothing; the policy's is told in figures."""
    cost = evidence.expected.replayed.break_even_ms(evidence.speeds)
    if cost is not None and cost > HANDOFF_MS:
        words = f"break-even {milliseconds(cost)} →"
        yield text(x.end, y.at(1.0) + 15, words, "tick strong", text_anchor="end")
    for prefix in evidence.prefixes:
        cost = break_even(prefix, evidence.speeds)
        if cost is None:
            continue
        policy = prefix is evidence.expected
        yield tag(
            "circle",
            hint(f"{name(prefix)}: break-even {milliseconds(cost)}"),
            cx=x.at(cost),
            cy=y.at(1.0),
            r=6 if policy else 3,
            cls="policy" if policy else "point",
        )
        if policy:
            at, turn = x.at(cost), x.at(HANDOFF_MS * 0.45)
            below = at > turn  # the lines fall from left to right
            words = f"break-even {milliseconds(cost)}"
            place = at - 6 if below else at + 6, y.at(1.0) + (20 if below else -12)
            yield text(*place, words, "tick strong", text_anchor=_side(at, turn))


def _ends(
    evidence: Evidence,
    curves: Sequence[tuple[Prefix, Sequence[_Place]]],
    x: Scale,
    y: Scale,
) -> Iterator[str]:
    """How many cues a line has, at its right end, where the numbers do not collide."""
    taken: list[float] = []
    for prefix, curve in sorted(curves, key=lambda pair: pair[0] is not evidence.expected):
        gain = curve[-1][1]
        at = y.at(gain)
        if not math.isfinite(gain) or any(abs(at - other) < _APART for other in taken):
            continue
        taken.append(at)
        policy = prefix is evidence.expected
        count = f"{len(prefix.cues)} cue{'' if len(prefix.cues) == 1 else 's'}"
        cls = "tick strong" if policy else "tick"
        yield text(x.end + 7, at + 4, count, cls)
