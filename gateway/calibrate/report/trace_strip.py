"""The margins along one trace, as SVG: tokens, segments by role, the cues that hand over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.calibrate.report.evidence import Evidence, Example
from gateway.calibrate.report.svg import Scale, hint, line, picture, tag, text
from gateway.calibrate.report.views import Block, blocks, dots
from gateway.calibrate.report.wording import counted, cut, decimal, visible, width
from relaygen.events import Role

_WIDTH, _LEFT, _RIGHT = 960.0, 52.0, 950.0
_LABEL_ROWS, _LABEL_HEIGHT = 3, 15.0
_TOP = 14.0 + _LABEL_ROWS * _LABEL_HEIGHT
_PLOT, _LANE = 170.0, 15.0
_CHARACTER = 6.6  # pixels, at the labels' size
LANES = (Role.LARGE, Role.SMALL)


def trace_strip(evidence: Evidence, example: Example) -> str:
    """One picture, whatever the trace's length: where it is long, tokens share pixels."""
    count = len(example.scored.trace.texts)
    found = blocks(example, evidence)
    x = Scale(0, max(1, count), _LEFT, _RIGHT)
    y = Scale(0.0, 1.0, _TOP + _PLOT, _TOP)
    lanes = y.start + 12
    parts = [
        *_shades(found, x, y),
        *_grid(y),
        _dots(example, x, y),
        *_means(found, x, y),
        *_lanes(found, x, lanes),
        *_axis(x, lanes + 2 * _LANE + 6),
        *_cues(found, x, y),
    ]
    title = f"Margins along a trace of {counted(count, 'token')}, its segments by role"
    return picture(_WIDTH, lanes + 2 * _LANE + 48, title, "".join(parts), "strip")


def _grid(y: Scale) -> Iterator[str]:
    for value in (0.0, 0.5, 1.0):
        yield line(_LEFT, y.at(value), _RIGHT, y.at(value), "grid")
        label = decimal(value, 1)
        yield text(_LEFT - 6, y.at(value) + 4, label, "tick", text_anchor="end")
    yield text(0.0, y.end - 16, "margin", "name")


def _axis(x: Scale, top: float) -> Iterator[str]:
    for value in x.ticks(8):
        yield line(x.at(value), top, x.at(value), top + 4, "axis")
        yield text(x.at(value), top + 17, f"{value:,.0f}", "tick", text_anchor="middle")
    yield line(_LEFT, top, _RIGHT, top, "axis")
    yield text((_LEFT + _RIGHT) / 2, top + 34, "token", "name", text_anchor="middle")


def _shades(found: Sequence[Block], x: Scale, y: Scale) -> Iterator[str]:
    for role in LANES:
        yield _boxes([b for b in found if b.role is role], x, y.end, _PLOT, f"shade {role}")


def _lanes(found: Sequence[Block], x: Scale, top: float) -> Iterator[str]:
    """A lane a role: who writes is told by place as well as by colour."""
    for lane, role in enumerate(LANES):
        at = top + lane * _LANE
        mine = [b for b in found if b.role is role]
        yield text(_LEFT - 6, at + 10, role, f"tick {role}", text_anchor="end")
        yield _boxes(mine, x, at, _LANE - 4, f"lane {role}")
        yield from (_cross(block, x, at + _LANE / 2 - 2) for block in mine if block.wrong)


def _boxes(found: Sequence[Block], x: Scale, top: float, height: float, cls: str) -> str:
    """Many boxes as one path, which keeps the page small."""
    drawn = "".join(
        f"M{x.at(b.start):.1f} {top:.1f}H{x.at(b.end):.1f}v{height:.0f}H{x.at(b.start):.1f}z"
        for b in found
    )
    return tag("path", d=drawn, cls=cls) if drawn else ""


def _cross(block: Block, x: Scale, y: float) -> str:
    middle = x.at((block.start + block.end) / 2)
    drawn = f"M{middle - 4:.1f} {y - 4:.1f}l8 8m-8 0l8 -8"
    return tag("path", hint(f"wrong: tokens {block.start} to {block.end}"), d=drawn, cls="wrong")


def _dots(example: Example, x: Scale, y: Scale) -> str:
    """Every token's margin, once a half pixel."""
    places = {
        (round(2 * x.at(i + 0.5)), round(2 * y.at(min(1.0, max(0.0, margin)))))
        for i, margin in dots(example)
    }
    drawn = "".join(f"M{a / 2:g} {b / 2:g}h0" for a, b in sorted(places))
    return tag("path", d=drawn, cls="dots") if drawn else ""


def _means(found: Sequence[Block], x: Scale, y: Scale) -> Iterator[str]:
    for role in LANES:
        drawn = "".join(
            f"M{x.at(b.start):.1f} {y.at(b.mean):.1f}H{x.at(b.end):.1f}"
            for b in found
            if b.role is role and b.mean is not None
        )
        if drawn:
            yield tag("path", d=drawn, cls=f"mean {role}")


def _cues(found: Sequence[Block], x: Scale, y: Scale) -> Iterator[str]:
    """A mark at every cue; its text where there is room in one of the rows above."""
    free = [0.0] * _LABEL_ROWS
    for block in found:
        if not block.cue:
            continue
        at = x.at(block.end)
        words = cut(visible(block.cue), 18)
        half = width(words) * _CHARACTER / 2
        row = next((r for r, end in enumerate(free) if at - half > end), None)
        mark = tag("path", d=f"M{at:.1f} {y.end:.1f}l-4 -7h8z", cls="cue")
        told = hint(f"{visible(block.cue)}, at token {block.end}")
        if row is None or at - half < _LEFT or at + half > _WIDTH:
            yield tag("g", told + mark)
            continue
        free[row] = at + half + 9
        up = y.end - 10 - row * _LABEL_HEIGHT
        stem = line(at, y.end - 7, at, up, "stem") if row else ""
        yield tag("g", told + stem + mark + text(at, up - 1, words, "label", text_anchor="middle"))
