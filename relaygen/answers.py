"""The final answer of a reply, and whether two of them are the same. For comparing replies only.

What counts is what follows the thinking: its last `\\boxed{...}`, else its last number, else all of
its words.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BOXED = re.compile(r"\\f?boxed\s*\{")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}")
_WORD = re.compile(r"\w+")


def final_answer(text: str, close: str = "</think>") -> str | None:
    """Of a whole reply; None where it has none: nothing follows the thinking, or nothing said."""
    _, _, told = text.rpartition(close)
    told = told.strip()
    if not told:
        return None
    if (boxed := _last_boxed(told)) is not None:
        return boxed
    numbers = _NUMBER.findall(_LATEX_FRACTION.sub(r"\1/\2", told))
    if numbers:
        return str(numbers[-1])
    return " ".join(_WORD.findall(told.casefold())) or told


def agree(one: str | None, other: str | None) -> bool:
    """Whether both are answers, and the same: as numbers where they are, else as written."""
    if one is None or other is None:
        return False
    first, second = _number(one), _number(other)
    if first is not None and second is not None:
        return first == second
    return _plain(one) == _plain(other)


def _last_boxed(text: str) -> str | None:
    """What the last box that is closed holds."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for at in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[match.end() : at].strip()
    return None


def _number(answer: str) -> Fraction | None:
    written = _LATEX_FRACTION.sub(r"\1/\2", answer).strip().strip("$").strip()
    if not _NUMBER.fullmatch(written):
        return None
    try:
        return Fraction(re.sub(r"[,\s]", "", written))
    except (ValueError, ZeroDivisionError):
        return None


def _plain(answer: str) -> str:
    return re.sub(r"\s|\\[,;!]|\\(?:left|right)\b|[$.]$", "", answer).casefold()
