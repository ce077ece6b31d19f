"""Incremental sentence-end matcher: finds where a small segment ends."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from relaygen.automaton import Automaton
from relaygen.cues import Cut

_MARKS = frozenset(".!?")
_CLOSING = "\"'”’»)]}*_`.!?…"  # may follow a sentence's mark and still belong to it
_LIST_MARKER = re.compile(r"\n[ \t]*\d{1,3}\Z")  # "1" of "1. First, ..." at a line's start
_CONTEXT = 16  # characters; a list marker and its indent


class BoundaryMatch(StrEnum):
    SENTENCE = "sentence"
    SUBSTRING = "substring"


class BoundarySet:
    """The boundaries of a policy, compiled once."""

    __slots__ = ("automaton", "match")

    def __init__(self, ends: Iterable[str], match: BoundaryMatch = BoundaryMatch.SENTENCE) -> None:
        self.match = match
        self.automaton = Automaton(ends)


class BoundaryMatcher:
    """One segment's matcher.

    `sentence`: the cut is after the token that ends the sentence. A dot after a digit waits for
    the next text: a blank makes it a sentence end, and then nothing of that text is kept; closing
    quotes and brackets do too, and are kept; anything else ("3.14", "1.2.3", "1., 2.") does not. A
    line's "1." is a list marker, no end.
    `substring`: any of the ends anywhere, cut after its last character (the reference's way).
    """

    __slots__ = ("_recent", "_set", "_state", "_waiting")

    def __init__(self, boundaries: BoundarySet, before: str = "") -> None:
        self._set = boundaries
        self.reset(before)

    def reset(self, before: str = "") -> None:
        """Begin a segment after the text `before`."""
        self._state = 0
        self._waiting = ""
        self._recent = before[-_CONTEXT:]

    def push(self, text: str) -> Cut | None:
        """Read one token's text. A cut that keeps nothing ends the segment before this text."""
        if self._waiting and text:
            mark, self._waiting = self._waiting, ""
            if text[0].isspace():
                return Cut(mark, 0)
            rest = text.lstrip(_CLOSING)
            if rest != text and not rest[:1].strip():
                return Cut(mark, len(text))
        cut = self._scan(text)
        self._recent = (self._recent + text)[-_CONTEXT:]
        return cut

    @property
    def state(self) -> int | None:
        """Of the set's automaton; None while the next text decides about the last."""
        return None if self._waiting else self._state

    def passed(self, text: str, state: int) -> None:
        """Tokens' text was read elsewhere, in which no mark was; it led to `state`."""
        self._state = state
        self._recent = (self._recent + text)[-_CONTEXT:]

    def _scan(self, text: str) -> Cut | None:
        automaton = self._set.automaton
        state, cut = self._state, None
        for i, char in enumerate(text):
            state = automaton.step(state, char)
            if cut is None and automaton.ends[state]:
                cut = self._accept(automaton.ends[state][0], text, i + 1)
        self._state = state
        return cut

    def _accept(self, mark: str, text: str, end: int) -> Cut | None:
        if self._set.match is BoundaryMatch.SUBSTRING:
            return Cut(mark, end)
        if mark in _MARKS and not self._ends_sentence(mark, text, end):
            return None
        return Cut(mark, len(text))

    def _ends_sentence(self, mark: str, text: str, end: int) -> bool:
        rest = len(text) - len(text[end:].lstrip(_CLOSING))
        if rest < len(text) and not text[rest].isspace():
            return False
        before = self._recent + text[: end - 1]
        if mark != "." or not before[-1:].isdigit():
            return True
        if _LIST_MARKER.search(before):
            return False
        if rest == len(text) == end:
            self._waiting = mark
            return False
        return True
