"""Finds where the segment that is being written ends: by a cue, or by a boundary."""

from __future__ import annotations

from collections.abc import Iterable

from relaygen.automaton import NOTHING, Automaton
from relaygen.boundaries import BoundaryMatcher
from relaygen.cues import CueMatcher, Cut
from relaygen.policy import Policy
from relaygen.state import State

CONTEXT = 16
"""Characters before a segment that its matchers see."""


class Cutter:
    """The matchers of the open segment, whichever of them its state calls for."""

    __slots__ = ("_before", "_boundaries", "_cues", "_finders")

    def __init__(self, policy: Policy) -> None:
        self._finders = (policy.cue_set.automaton, policy.boundary_set.automaton)
        self._cues = CueMatcher(policy.cue_set)
        self._boundaries = BoundaryMatcher(policy.boundary_set)
        self._before = ""

    def begin(self, before: str) -> None:
        """A segment begins after the text `before`."""
        self._before = before
        self._cues.reset(before)
        self._boundaries.reset(before)

    def again(self, texts: Iterable[str]) -> None:
        """The segment stands where it stood after these texts of it, none of which ended it."""
        self.begin(self._before)
        for text in texts:
            self._cues.push(text, armed=False)
            self._boundaries.push(text)

    def push(self, state: State, text: str, *, armed: bool) -> Cut | None:
        """Read one token's text: the cut, if it ends the segment and may."""
        if state is State.LARGE:
            return self._cues.push(text, armed=armed)
        if state is State.SMALL:
            cut = self._boundaries.push(text)
            return cut if armed else None
        return None

    def finder(self, state: State) -> tuple[Automaton, int] | None:
        """What tells whether a text may end the segment, and its state; None: any may."""
        if state is State.LARGE:
            return self._finders[0], self._cues.state
        if state is State.SMALL:
            at = self._boundaries.state
            return None if at is None else (self._finders[1], at)
        return NOTHING, 0

    @property
    def waits(self) -> bool:
        """Whether the next text of a small segment decides if it ended before."""
        return self._boundaries.state is None

    def passed(self, state: State, text: str, at: int) -> None:
        """`text`, of some tokens, is no end; it led the finder to `at`."""
        if state is State.LARGE:
            self._cues.passed(text, at)
        elif state is State.SMALL:
            self._boundaries.passed(text, at)
