"""Numbers and foreign text as a reader sees them, in the page, the pictures and the terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

UNKNOWN = "n/a"
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str, *, keep: str = "") -> str:
    """Text from a trace without what would act on a screen: line ends, escapes, directions.

    Characters in `keep` stay as they are.
    """
    return "".join(char if char in keep else _visible(char) for char in text)


def _visible(char: str) -> str:
    if char in _BIDI or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp"):
        return char.encode("unicode_escape").decode()
    return char


def width(text: str) -> int:
    """In columns: full-width characters take two."""
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def cut(text: str, columns: int) -> str:
    """The text, shortened where it is wider than so many columns."""
    if width(text) <= columns:
        return text
    while width(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def decimal(value: float, digits: int = 3, *, sign: bool = False) -> str:
    """The number, or that it is unknown."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{value:{'+' if sign else ''}.{digits}f}"


def interval(low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return UNKNOWN
    return f"{decimal(low, sign=True)} to {decimal(high, sign=True)}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else UNKNOWN


def milliseconds(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.1f} ms"


def probability(value: float) -> str:
    if not math.isfinite(value):
        return UNKNOWN
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(cues: Sequence[str]) -> str:
    return ", ".join(f"“{visible(cue)}”" for cue in cues)
