"""Turns kept text into deltas: splits off the thinking, watches the client's stop strings, and
remembers which role wrote what is still held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from relaygen.automaton import Automaton, automaton_of
from relaygen.events import Delta, DeltaKind, Piece, Role
from relaygen.stops import StopMatcher
from relaygen.thinking import Part, Phase, ThinkingSplitter

_Owner = tuple[Role, int]


class Transcript:
    """Push kept text, take deltas; adjacent text of one role, segment and kind is one delta."""

    def __init__(
        self, splitter: ThinkingSplitter, stops: StopMatcher, scope: Literal["answer", "all"]
    ) -> None:
        self.splitter = splitter
        self._stops = stops
        self._everywhere = scope == "all"
        self._owed: deque[tuple[_Owner, int]] = (
            deque()
        )  # who pushed the next characters to come out
        self._runs: list[tuple[_Owner, DeltaKind, list[str]]] = []
        self._pieces: list[Piece] = []
        self._watched = DeltaKind.ANSWER  # the kind of what the stop matcher holds: only ever one

    @property
    def stop(self) -> str | None:
        """The client's stop string that was found, if one was."""
        return self._stops.matched

    def push(self, role: Role, segment: int, text: str, pieces: Iterable[Piece] = ()) -> None:
        self._pieces.extend(pieces)
        if text:
            self._owed.append(((role, segment), len(text)))
            self._pass_on(self.splitter.push(text))

    @property
    def guard(self) -> Automaton | None:
        """Finds what may not simply be passed on. None while something is held back."""
        tags, stops = self.splitter.awaits, self._stops.awaits
        if tags is None or stops is None:
            return None
        if tags and not self._everywhere:
            return automaton_of(*tags)
        return automaton_of(*tags, *stops)

    @property
    def kind(self) -> DeltaKind:
        """Of text that the guard lets through."""
        thinking = self.splitter.phase is Phase.THINKING
        return DeltaKind.REASONING if thinking else DeltaKind.ANSWER

    def pass_on(self, delta: Delta) -> None:
        """Text that the guard lets through."""
        self._pieces += delta.pieces
        self._add((delta.role, delta.segment), delta.kind, delta.text)

    def unpush(self, count: int) -> list[Piece]:
        """Forget the last `count` pieces, whose text is still to come out; returns them."""
        cut = len(self._pieces) - count
        gone, self._pieces = self._pieces[cut:], self._pieces[:cut]
        return gone

    def flush(self) -> None:
        """No more text will come: let go of what was held back."""
        self._pass_on(self.splitter.flush())
        self._release()

    def withdraw(self) -> None:
        """Forget what was not taken yet."""
        self._runs, self._pieces = [], []

    def take(self) -> list[Delta]:
        """The deltas since the last call. The pieces ride on the last that is no tag."""
        runs, self._runs = self._runs, []
        deltas: list[Delta] = []
        for (role, segment), kind, texts in reversed(runs):
            pieces: tuple[Piece, ...] = ()
            if kind is not DeltaKind.TAG:
                pieces, self._pieces = tuple(self._pieces), []
            deltas.append(Delta(role, segment, kind, "".join(texts), pieces))
        deltas.reverse()
        return deltas

    def _pass_on(self, parts: list[Part]) -> None:
        for kind, text in parts:
            if self._stops.matched is not None:
                return
            if kind is DeltaKind.ANSWER or (self._everywhere and kind is DeltaKind.REASONING):
                self._watched = kind
                self._emit(kind, self._stops.push(text))
            else:
                self._release()
                self._emit(kind, text)

    def _release(self) -> None:
        self._emit(self._watched, self._stops.flush())

    def _emit(self, kind: DeltaKind, text: str) -> None:
        while text:
            owner, owed = self._owed.popleft()
            run = text[:owed]
            if len(run) < owed:
                self._owed.appendleft((owner, owed - len(run)))
            self._add(owner, kind, run)
            text = text[owed:]

    def _add(self, owner: _Owner, kind: DeltaKind, text: str) -> None:
        if self._runs and self._runs[-1][:2] == (owner, kind):
            self._runs[-1][2].append(text)
        else:
            self._runs.append((owner, kind, [text]))
