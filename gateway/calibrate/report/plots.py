"""The report's pictures as PNG files, for slides and issues. matplotlib is imported on use."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.calibrate.report.evidence import Evidence, Example
from gateway.calibrate.report.grids import measured
from gateway.calibrate.report.trace_strip import LANES
from gateway.calibrate.report.views import (
    HANDOFF_MS,
    Block,
    bars,
    blocks,
    break_even,
    dots,
    speed_ups,
)
from gateway.calibrate.report.wording import cut, milliseconds, visible
from relaygen.calibration.selection import CueStatistic
from relaygen.events import Role

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {Role.LARGE: "#0067a5", Role.SMALL: "#c96f00"}
_INK, _MUTED, _GRID, _WRONG = "#1c2127", "#5b6570", "#dfe3e8", "#b3123f"
_MAX_LABELS = 28  # cues named along a trace
_WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Microsoft YaHei")
_MORE_FONTS = ("PingFang SC", "Hiragino Sans", "SimHei", "Droid Sans Fallback")


class MissingExtraError(Exception):
    """matplotlib is not installed; the message names the remedy."""


def plots(evidence: Evidence, folder: Path) -> list[Path]:
    """Writes the pictures into an existing folder and returns where: cues.png, share.png,
    speed.png, and trace-1.png ... for the examples. MissingExtraError without matplotlib."""
    with _style():
        count = len(bars(evidence.selection))
        drawn = [
            _picture(folder / "cues.png", (7, 1.3 + 0.26 * max(3, count)), _cues, evidence),
            _picture(folder / "share.png", (6, 4.4), _share, evidence),
            _picture(folder / "speed.png", (6, 4.4), _speed, evidence),
        ]
        for number, example in enumerate(evidence.examples, 1):
            path = folder / f"trace-{number}.png"
            drawn.append(_picture(path, (12, 4.2), _trace_of(example), evidence))
    return drawn


_Draw = Callable[["Axes", Evidence], None]


def _picture(path: Path, size: tuple[float, float], draw: _Draw, evidence: Evidence) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the machine has
    draw(figure.add_subplot(), evidence)
    figure.savefig(path, dpi=150)
    return path


@contextmanager
def _style() -> Iterator[None]:
    """Our look and fonts, for these pictures alone."""
    try:
        import matplotlib
        from matplotlib.font_manager import get_font_names
    except ImportError as error:
        raise MissingExtraError(
            "the PNG pictures need matplotlib; run: pip install 'relaygen[calibrate]'"
        ) from error
    there = set(get_font_names())
    wide = [font for font in (*_WIDE_FONTS, *_MORE_FONTS) if font in there]
    look: dict[Any, Any] = {
        "font.family": ["DejaVu Sans", *wide],
        "font.size": 10,
        "text.parse_math": False,  # a cue may hold a dollar
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _MUTED,
        "axes.labelcolor": _MUTED,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "grid.color": _GRID,
        "axes.grid": True,
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(look), warnings.catch_warnings(), _quiet_fonts():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box does instead
        yield


@contextmanager
def _quiet_fonts() -> Iterator[None]:
    """Without matplotlib's remarks that a font has no such weight."""
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# ---- cues ---------------------------------------------------------------------------------------


def _cues(axes: Axes, evidence: Evidence) -> None:
    shown = bars(evidence.selection)
    for place, cue in enumerate(shown):
        _bar(axes, place, cue)
    axes.axvline(0, color=_MUTED, linewidth=1)
    axes.set_yticks(
        range(len(shown)),
        [cut(visible(c.cue), 24) + (" ✓" if c.chosen else "  ") for c in shown],
    )
    for label, cue in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_color(_INK if cue.chosen else _MUTED)
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    of = measured(evidence.selection.choice.rule)
    axes.set_xlabel(f"{of} less that of all sentences, with 95 % intervals")
    axes.set_title("Cues: ✓ and filled are chosen")


def _bar(axes: Axes, place: int, cue: CueStatistic) -> None:
    compared = cue.compared
    if math.isfinite(compared.difference):
        face, style = ("#aab4bf", "-") if cue.chosen else ("white", ":")
        axes.barh(place, compared.difference, 0.6, color=face, edgecolor=_MUTED, linestyle=style)
    if math.isfinite(compared.low) and math.isfinite(compared.high):
        ends = [compared.low, compared.high]
        axes.plot(ends, [place, place], color=_INK, linewidth=1.2, marker="|", markersize=6)


# ---- shares and speeds --------------------------------------------------------------------------


def _share(axes: Axes, evidence: Evidence) -> None:
    x = [100 * prefix.small_share for prefix in evidence.prefixes]
    y = [100 * prefix.replayed.quality for prefix in evidence.prefixes]
    axes.plot(x, y, color=_INK, marker="o", markerfacecolor="white", linewidth=1.8)
    for prefix, *place in zip(evidence.prefixes, x, y, strict=True):
        policy = prefix is evidence.expected
        if policy:
            axes.plot(*place, color=_INK, marker="o", markersize=10)
        words = f"policy: {len(prefix.cues)}" if policy else str(len(prefix.cues))
        axes.annotate(
            words, (place[0], place[1]), (0, -18 if policy else 8), textcoords="offset points",
            ha="center", fontsize=9 if policy else 8, weight="bold" if policy else "normal",
        )  # fmt: skip
    axes.margins(0.1, 0.2)
    axes.set_xlabel("tokens by the small model, %")
    axes.set_ylabel("expected quality, %")
    axes.set_title("Share and quality, by the number of cues")


def _speed(axes: Axes, evidence: Evidence) -> None:
    for prefix in evidence.prefixes:
        curve = speed_ups(prefix, evidence.speeds)
        policy = prefix is evidence.expected
        look = {"color": _INK, "linewidth": 2.2} if policy else {"color": _MUTED, "alpha": 0.5}
        axes.plot(*zip(*curve, strict=True), **look)  # type: ignore[arg-type]
        cost = break_even(prefix, evidence.speeds)
        if cost is not None:
            axes.plot(cost, 1.0, marker="o", color=_INK, markersize=8 if policy else 3)
        if cost is not None and policy:
            left = cost > 0.45 * HANDOFF_MS  # the lines fall from left to right
            axes.annotate(
                f"break-even {milliseconds(cost)}", (cost, 1.0), (-6, -16) if left else (6, 8),
                textcoords="offset points", weight="bold", ha="right" if left else "left",
            )  # fmt: skip
    axes.axhline(1, color=_MUTED, linestyle="--", linewidth=1)
    axes.set_xlim(0, HANDOFF_MS)
    axes.set_xlabel("cost of a handoff, ms")
    axes.set_ylabel("speed-up over the large model alone")
    axes.set_title(f"Speed-up; bold: the policy's {len(evidence.cues)} cues")


# ---- a trace ------------------------------------------------------------------------------------


def _trace_of(example: Example) -> _Draw:
    def draw(axes: Axes, evidence: Evidence) -> None:
        _trace(axes, evidence, example)

    return draw


def _trace(axes: Axes, evidence: Evidence, example: Example) -> None:
    found = blocks(example, evidence)
    places = dots(example)
    axes.plot(
        [i + 0.5 for i, _ in places], [m for _, m in places],
        linestyle="", marker=".", markersize=3, color=_MUTED, alpha=0.5,
    )  # fmt: skip
    for lane, role in enumerate(LANES):
        _role(axes, [b for b in found if b.role is role], role, -0.1 - 0.09 * lane)
    _mark_cues(axes, found)
    axes.set_xlim(0, max(1, len(example.scored.trace.texts)))
    axes.set_ylim(-0.26, 1.02)
    axes.set_yticks([-0.19, -0.1, 0, 0.5, 1], ["small", "large", "0", "0.5", "1"])
    axes.grid(visible=False, axis="x")
    trace = example.scored.trace
    axes.set_title(f"Trace {visible(trace.id)}: margins, segments by role, cues", pad=48)
    axes.set_xlabel("token")
    axes.set_ylabel("margin")


def _role(axes: Axes, found: Sequence[Block], role: Role, lane: float) -> None:
    colour = COLOURS[role]
    runs = [(block.start, block.end - block.start) for block in found]
    axes.broken_barh(runs, (lane - 0.03, 0.06), color=colour, linewidth=0)
    if role is Role.SMALL:
        axes.broken_barh(runs, (0, 1), color=colour, alpha=0.2, linewidth=0)
    known = [block for block in found if block.mean is not None]
    axes.hlines(
        [block.mean for block in known if block.mean is not None],
        [block.start for block in known], [block.end for block in known],
        color=colour, linewidth=2.5,
    )  # fmt: skip
    wrong = [(block.start + block.end) / 2 for block in found if block.wrong]
    axes.plot(wrong, [lane] * len(wrong), "x", color=_WRONG, markersize=6, markeredgewidth=2)


def _mark_cues(axes: Axes, found: Sequence[Block]) -> None:
    cues = [block for block in found if block.cue]
    axes.plot([b.end for b in cues], [1.03] * len(cues), "v", color=_INK, clip_on=False)
    for block in cues[:: max(1, math.ceil(len(cues) / _MAX_LABELS))]:
        axes.annotate(
            cut(visible(block.cue), 18), (block.end, 1.05), (0, 5), textcoords="offset points",
            rotation=60, fontsize=8, annotation_clip=False,
        )  # fmt: skip
