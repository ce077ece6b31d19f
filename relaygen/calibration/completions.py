"""Finds the tokens in which a string ends, in texts whose tokens come again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relaygen.automaton import Automaton

_MAX_KNOWN = 200_000  # steps remembered: memory is bounded whatever the texts


class _State(dict[str, "_Step"]):
    """A state of the automaton with the steps that tokens took from it."""

    def __init__(self, at: int, depth: int) -> None:
        super().__init__()
        self.at = at
        self.depth = depth


_Step = tuple[_State, tuple[int, ...]]


class Completions:
    """The automaton over groups of strings, with a memory of what each token does to its state."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self._groups: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            for text in group:
                self._groups.setdefault(text, []).append(number)
        self._automaton = Automaton(self._groups)
        self._forget()

    def _forget(self) -> None:
        self._states = {0: _State(0, 0)}
        self._known = 0

    def find(
        self, texts: Sequence[str], start: int, end: int
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Index of each token from `start` to before `end` in which a string ends; how many
        characters before the token it begins at most; and the groups of such strings."""
        state = self._states[0]
        for i in range(start, end):
            text = texts[i]
            step = state.get(text) or self._learn(state, text)
            if step[1]:
                yield i, state.depth, step[1]
            state = step[0]

    def _learn(self, state: _State, text: str) -> _Step:
        automaton, at = self._automaton, state.at
        groups: set[int] = set()
        for char in text:
            at = automaton.step(at, char)
            for found in automaton.ends[at]:
                groups.update(self._groups[found])
        self._known += 1
        if self._known > _MAX_KNOWN:
            self._forget()
        if at not in self._states:
            self._states[at] = _State(at, automaton.depth[at])
        state[text] = step = (self._states[at], tuple(sorted(groups)))
        return step
