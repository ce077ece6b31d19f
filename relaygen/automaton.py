"""Finds many strings in a text that arrives in pieces: Aho and Corasick's automaton (1975).

The depth of the state reached is the length of the longest end of the text that begins one of the
patterns. It is exactly what a reader must hold back until more text comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

_REMEMBERED = 1 << 16
"""Texts a state: as many as a vocabulary has. What no token is as long as is not worth a place."""
_LONGEST = 32


class Automaton:
    """Immutable; a matcher keeps the state, an int that starts at 0."""

    __slots__ = ("_fail", "_goto", "depth", "ends", "quiet")

    def __init__(self, patterns: Iterable[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        ends: list[list[str]] = [[]]
        for pattern in dict.fromkeys(patterns):
            state = 0
            for char in pattern:
                if char not in self._goto[state]:
                    self._goto[state][char] = len(self._goto)
                    self._goto.append({})
                    self.depth.append(self.depth[state] + 1)
                    ends.append([])
                state = self._goto[state][char]
            ends[state].append(pattern)
        self._fail = self._failures(ends)
        self.ends: list[tuple[str, ...]] = [tuple(found) for found in ends]
        """By state: the patterns that end there, the longest first."""
        self.quiet = [Steps(self, state) for state in range(len(ends))]
        """By state and text: the state after it, or -1 where a pattern ends in it."""

    def _failures(self, ends: list[list[str]]) -> list[int]:
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._goto[state].items():
                fallback = fail[state]
                while fallback and char not in self._goto[fallback]:
                    fallback = fail[fallback]
                fail[target] = self._goto[fallback].get(char, 0)
                ends[target] += ends[fail[target]]
                queue.append(target)
        return fail

    def step(self, state: int, char: str) -> int:
        """The state after `char`; O(1) amortised over a text."""
        goto = self._goto
        while state and char not in goto[state]:
            state = self._fail[state]
        return goto[state].get(char, 0)


class Steps(dict[str, int]):
    """What each text does to one state. Tokens come again and again, so it is remembered."""

    __slots__ = ("_automaton", "_state")

    def __init__(self, automaton: Automaton, state: int) -> None:
        self._automaton = automaton
        self._state = state

    def __missing__(self, text: str) -> int:
        state = self._after(text)
        if len(text) <= _LONGEST:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[text] = state
        return state

    def _after(self, text: str) -> int:
        automaton, state = self._automaton, self._state
        for char in text:
            state = automaton.step(state, char)
            if automaton.ends[state]:
                return -1
        return state


@lru_cache(maxsize=256)
def automaton_of(*patterns: str) -> Automaton:
    """The automaton of these patterns, with what it remembers of earlier texts."""
    return Automaton(patterns)


NOTHING = Automaton(())
"""Finds nothing."""
