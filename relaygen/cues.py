"""Incremental cue matcher: finds where a large segment ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from relaygen.automaton import Automaton
from relaygen.words import joined


class CueMatch(StrEnum):
    WORD = "word"
    SUBSTRING = "substring"


@dataclass(frozen=True, slots=True)
class Cut:
    """A segment's end inside the text just pushed: what ended it and how many characters stay."""

    text: str
    keep: int


class CueSet:
    """The cues of a policy, compiled once."""

    __slots__ = ("automaton", "longest", "match", "words")

    def __init__(self, words: Iterable[str], match: CueMatch = CueMatch.WORD) -> None:
        self.words = tuple(words)
        self.match = match
        self.automaton = Automaton(self.words)
        self.longest = max(map(len, self.words), default=0)

    def hides(self, first: str, second: str) -> bool:
        """Whether `second` never ends a segment, as `first`, inside it, is complete by then."""
        start = second.find(first)
        while start >= 0:
            end = start + len(first)
            if self.match is CueMatch.SUBSTRING or not (
                joined(second[start - 1 : start] if start else "", first[0])
                or joined(first[-1], second[end : end + 1])
            ):
                return True
            start = second.find(first, start + 1)
        return False


class CueMatcher:
    """One segment's matcher. Cost per character is O(1), whatever the number of cues.

    `word`: a cue counts where it starts at a word's start and, as far as the pushed text shows,
    ends at a word's end; the cut is after the whole pushed text. `substring`: a cue counts
    anywhere; the cut is after its last character, as in the reference implementation.
    """

    __slots__ = ("_recent", "_set", "_state")

    def __init__(self, cues: CueSet, before: str = "") -> None:
        self._set = cues
        self.reset(before)

    def reset(self, before: str = "") -> None:
        """Begin a segment after the text `before` (its last character is enough)."""
        self._state = 0
        self._recent = before

    def push(self, text: str, *, armed: bool = True) -> Cut | None:
        """Read one token's text. A cue that ends while not `armed` is over, not postponed."""
        automaton = self._set.automaton
        step, ends = automaton.step, automaton.ends
        state, cut = self._state, None
        for i, char in enumerate(text):
            state = step(state, char)
            if armed and cut is None and ends[state]:
                cut = self._accept(ends[state], text, i + 1)
        self._state = state
        self._remember(text)
        return cut

    @property
    def state(self) -> int:
        """Of the set's automaton."""
        return self._state

    def passed(self, text: str, state: int) -> None:
        """Tokens' text was read elsewhere, which no cue ended in; it led to `state`."""
        self._state = state
        self._remember(text)

    def _remember(self, text: str) -> None:
        self._recent = (self._recent + text)[-self._set.longest - 1 :]

    def _accept(self, cues: tuple[str, ...], text: str, end: int) -> Cut | None:
        if self._set.match is CueMatch.SUBSTRING:
            return Cut(cues[0], end)
        if joined(text[end - 1], text[end : end + 1]):
            return None
        seen = self._recent + text[:end]
        for cue in cues:
            start = len(seen) - len(cue)
            if not joined(seen[start - 1 : start] if start else "", cue[0]):
                return Cut(cue, len(text))
        return None
