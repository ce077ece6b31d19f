"""SVG as text: escaped elements, scales and axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element around `content`, which is markup already; attribute values are escaped.

    `cls` stands for `class`, an underscore for a hyphen.
    """
    pairs = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{escape(_shown(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{pairs}>{content}</{name}>"


def _shown(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, cls: str = "", **attributes: object) -> str:
    return tag("text", escape(words), x=x, y=y, cls=cls, **attributes)


def hint(words: str) -> str:
    """Shown where the pointer rests."""
    return tag("title", escape(words))


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    return tag("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", cls=cls)


def polyline(points: Iterable[tuple[float, float]], cls: str) -> str:
    drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag("path", d=f"M{drawn}", cls=cls) if drawn else ""


def picture(width: float, height: float, title: str, content: str, cls: str = "") -> str:
    """The whole picture, scaled to its place; `title` is read aloud in its stead."""
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", content, viewBox=box, role="img", aria_label=title, cls=cls)


@dataclass(frozen=True, slots=True)
class Scale:
    """Values `low` to `high` along pixels `start` to `end`; `end` may be the smaller."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        return ticks(self.low, self.high, about)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def spread(
    values: Iterable[float], margin: float = 0.06, least: float = 0.02
) -> tuple[float, float]:
    """Bounds around the finite values with some room; never empty."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = max((high - low) * margin, least / 2)
    return low - room, high + room


Format = Callable[[float], str]


def axes(x: Scale, y: Scale, names: tuple[str, str], formats: tuple[Format, Format]) -> str:
    """Grid lines, the numbers beside them and what they are; the y axis is named above it."""
    parts = []
    for value in y.ticks():
        parts.append(line(x.start, y.at(value), x.end, y.at(value), "grid"))
        label = formats[1](value)
        parts.append(text(x.start - 6, y.at(value) + 4, label, "tick", text_anchor="end"))
    for value in x.ticks():
        parts.append(line(x.at(value), y.start, x.at(value), y.start + 4, "axis"))
        label = formats[0](value)
        parts.append(text(x.at(value), y.start + 17, label, "tick", text_anchor="middle"))
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    middle = (x.start + x.end) / 2
    parts.append(text(middle, y.start + 36, names[0], "name", text_anchor="middle"))
    parts.append(text(0.0, y.end - 10, names[1], "name"))
    return "".join(parts)
