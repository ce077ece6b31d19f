"""The bar chart of the cues, as SVG."""

from __future__ import annotations

import math

from gateway.calibrate.report.evidence import Evidence
from gateway.calibrate.report.grids import measured
from gateway.calibrate.report.svg import Scale, hint, line, picture, spread, tag, text
from gateway.calibrate.report.views import bars
from gateway.calibrate.report.wording import counted, cut, decimal, interval, visible
from relaygen.calibration.selection import CueStatistic

_WIDTH, _ROW = 540.0, 21.0
_NAMES, _MARKS = 138.0, 70.0  # room left and right of the bars


def cue_chart(evidence: Evidence) -> str:
    """Differences of the cues' means to the overall mean, as bars with their intervals."""
    shown = bars(evidence.selection)
    values = [v for cue in shown for v in _values(cue)]
    low, high = spread([0.0, *values])
    top = 26.0
    bottom = top + max(1, len(shown)) * _ROW
    x = Scale(low, high, _NAMES, _WIDTH - _MARKS)
    parts = [_columns(x, top, bottom)]
    parts += [_bar(cue, x, top + _ROW * i) for i, cue in enumerate(shown)]
    parts.append(line(x.at(0.0), top, x.at(0.0), bottom, "axis"))
    of = f"{measured(evidence.selection.choice.rule)} less that of all sentences"
    parts.append(text((x.start + x.end) / 2, bottom + 36, of, "name", text_anchor="middle"))
    title = f"Bar chart of {counted(len(shown), 'cue')}: {of}, with 95 % intervals"
    return picture(_WIDTH, bottom + 44, title, "".join(parts), "cues")


def _values(cue: CueStatistic) -> tuple[float, ...]:
    return cue.compared.difference, cue.compared.low, cue.compared.high


def _columns(x: Scale, top: float, bottom: float) -> str:
    parts = [text(_NAMES - 10, top - 9, "cue", "tick", text_anchor="end")]
    for value in x.ticks(6):
        parts.append(line(x.at(value), top, x.at(value), bottom, "grid"))
        label = decimal(value, 2, sign=True) if value else "0"
        parts.append(text(x.at(value), bottom + 17, label, "tick", text_anchor="middle"))
    return "".join(parts)


def _bar(cue: CueStatistic, x: Scale, top: float) -> str:
    difference, low, high = _values(cue)
    middle = top + _ROW / 2
    cls = "chosen" if cue.chosen else "other"
    label = cut(visible(cue.cue), 17)
    parts = [
        hint(
            f"{visible(cue.cue)}: {decimal(difference, sign=True)} "
            f"({interval(low, high)}), {'chosen' if cue.chosen else visible(cue.why)}"
        ),
        text(_NAMES - 10, middle + 4, label, f"label {cls}", text_anchor="end"),
    ]
    if math.isfinite(difference):
        start, end = sorted((x.at(0.0), x.at(difference)))
        parts.append(
            tag("rect", x=start, y=middle - 6, width=max(1.0, end - start), height=12, cls=cls)
        )
    if math.isfinite(low) and math.isfinite(high):
        left, right = x.at(low), x.at(high)
        whisker = (
            f"M{left:.1f} {middle:.1f}H{right:.1f}M{left:.1f} {middle - 4:.1f}v8"
            f"M{right:.1f} {middle - 4:.1f}v8"
        )
        parts.append(tag("path", d=whisker, cls="whisker"))
    if cue.chosen:
        parts.append(text(_WIDTH - 4, middle + 4, "✓ chosen", "tick strong", text_anchor="end"))
    return tag("g", "".join(parts))
