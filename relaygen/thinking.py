"""Splits the text of one generation into reasoning, tags and answer, at any cut of the text."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from relaygen.automaton import automaton_of
from relaygen.events import DeltaKind


class Phase(StrEnum):
    UNDECIDED = "undecided"
    """Nothing but blanks so far: the model may open the thinking or just answer."""
    THINKING = "thinking"
    ANSWER = "answer"


class Part(NamedTuple):
    kind: DeltaKind
    text: str


class ThinkingSplitter:
    """The parts, joined, are the text pushed: nothing is lost, added or trimmed.

    A tag that arrives in bits is held back until it is complete or ruled out. Only the first
    thinking block is one; tags in the answer are the answer's text.
    """

    __slots__ = ("_close", "_held", "_open", "_state", "_watch", "phase", "thought")

    def __init__(self, open_tag: str, close_tag: str, phase: Phase = Phase.UNDECIDED) -> None:
        self._open, self._close = open_tag, close_tag
        self._watch = automaton_of(close_tag)
        self._state = 0
        self._held = ""
        self.phase = phase
        self.thought = phase is Phase.THINKING
        """Whether the generation thinks, or did."""

    def push(self, text: str) -> list[Part]:
        if self.phase is Phase.ANSWER:
            return [Part(DeltaKind.ANSWER, text)] if text else []
        if self.phase is Phase.UNDECIDED:
            return self._undecided(text)
        return self._thinking(text)

    def closes_at(self, text: str) -> int | None:
        """Where in `text`, were it pushed now, the thinking would be closed; None: nowhere."""
        if self.phase is Phase.ANSWER:
            return None
        start, state = 0, self._state
        if self.phase is Phase.UNDECIDED:
            whole = self._held + text
            begun = whole.lstrip()
            if not begun.startswith(self._open):
                return None
            start = len(text) - len(begun) + len(self._open)
        for i, char in enumerate(text[start:], start):
            state = self._watch.step(state, char)
            if self._watch.ends[state]:
                return i + 1
        return None

    @property
    def awaits(self) -> tuple[str, ...] | None:
        """What ends the part that is being written; None while something is held back for it."""
        if self._held or self.phase is Phase.UNDECIDED:
            return None
        return (self._close,) if self.phase is Phase.THINKING else ()

    def flush(self) -> list[Part]:
        """What was held back, when no more text will come."""
        held, self._held, self._state = self._held, "", 0
        kind = DeltaKind.REASONING if self.phase is Phase.THINKING else DeltaKind.ANSWER
        return [Part(kind, held)] if held else []

    def _undecided(self, text: str) -> list[Part]:
        whole = self._held + text
        start = whole.lstrip()
        if self._open.startswith(start) and start != self._open:
            self._held = whole
            return []
        self._held = ""
        if not start.startswith(self._open):
            self.phase = Phase.ANSWER
            return [Part(DeltaKind.ANSWER, whole)]
        self.phase, self.thought = Phase.THINKING, True
        tag = len(whole) - len(start) + len(self._open)
        return [Part(DeltaKind.TAG, whole[:tag]), *self._thinking(whole[tag:])]

    def _thinking(self, text: str) -> list[Part]:
        watch, state = self._watch, self._state
        whole = self._held + text
        for i, char in enumerate(text):
            state = watch.step(state, char)
            if watch.ends[state]:
                return self._closed(whole, len(self._held) + i + 1)
        self._state = state
        certain = len(whole) - watch.depth[state]
        self._held = whole[certain:]
        return [Part(DeltaKind.REASONING, whole[:certain])] if certain else []

    def _closed(self, whole: str, end: int) -> list[Part]:
        self.phase, self._held, self._state = Phase.ANSWER, "", 0
        start = end - len(self._close)
        parts = (
            Part(DeltaKind.REASONING, whole[:start]),
            Part(DeltaKind.TAG, whole[start:end]),
            Part(DeltaKind.ANSWER, whole[end:]),
        )
        return [part for part in parts if part.text]
