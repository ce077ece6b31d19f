"""Turns kept text into deltas: splits off the thinking, watches the client's stop strings, and
remembers which role wrote what is still held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from relaygen.events import Delta, DeltaKind, Piece, Role
from relaygen.stops import StopMatcher
from relaygen.thinking import Part, ThinkingSplitter

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
        deltas = [
            Delta(role, segment, kind, "".join(texts))
            for (role, segment), kind, texts in self._runs
        ]
        self._runs = []
        for i, delta in reversed(list(enumerate(deltas))):
            if delta.kind is not DeltaKind.TAG:
                deltas[i] = replace(delta, pieces=tuple(self._pieces))
                self._pieces = []
                break
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
