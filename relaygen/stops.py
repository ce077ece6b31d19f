"""Client stop strings, matched over the whole generation and not per segment."""

from __future__ import annotations

from collections.abc import Iterable

from relaygen.automaton import automaton_of


class StopMatcher:
    """Passes text through, holding back what may yet become a stop string.

    After a match `matched` is the stop string; text after it is swallowed. With `include` the
    stop string itself is passed on.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched", "stops")

    def __init__(self, stops: Iterable[str] = (), *, include: bool = False) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self._automaton = automaton_of(*self.stops)
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now; at a match, the text up to it."""
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        for i, char in enumerate(text):
            state = automaton.step(state, char)
            if automaton.ends[state]:
                return self._match(automaton.ends[state][0], self._held + text[: i + 1])
        self._state = state
        whole = self._held + text
        certain = len(whole) - automaton.depth[state]
        self._held = whole[certain:]
        return whole[:certain]

    @property
    def awaits(self) -> tuple[str, ...] | None:
        """The stop strings; None while something is held back for one, and after a match."""
        return None if self._held or self.matched is not None else self.stops

    def _match(self, stop: str, text: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held, self._state = self._held, "", 0
        return held
