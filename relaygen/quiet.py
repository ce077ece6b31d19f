"""Runs of tokens in which nothing happens, as nearly all are: taken at once and not one by one."""

from __future__ import annotations

from relaygen.automaton import Automaton
from relaygen.events import Delta, DeltaKind, Piece, Role


class QuietRun:
    """A run that may go on for many reads; what it took is still to be kept.

    `guard` finds what may not simply be passed on, and starts at its root; `finder` finds what may
    end the segment, and is in the state `at`. `room` tokens at most are taken, each of which must
    have one id with `ids`, and else not end in a blank.
    """

    __slots__ = (
        "_kind",
        "_passes",
        "_role",
        "_room",
        "_segment",
        "_steps",
        "at",
        "count",
        "ids",
        "texts",
    )

    def __init__(
        self,
        guard: Automaton,
        finder: tuple[Automaton, int],
        room: int,
        *,
        ids: bool,
        writer: tuple[Role, int],
        kind: DeltaKind,
    ) -> None:
        self._passes = guard.quiet[0]
        automaton, self.at = finder
        self._steps = automaton.quiet
        self._room = room
        self._role, self._segment = writer
        self._kind = kind
        self.count = 0
        """Tokens taken."""
        self.ids: list[int] | None = [] if ids else None
        self.texts: list[str] = []

    def take(self, pieces: tuple[Piece, ...]) -> Delta | None:
        """Takes the first pieces, as far as nothing happens in them: the delta has those taken."""
        taken = self._quiet(pieces)
        if not taken:
            return None
        text = taken[0].text if len(taken) == 1 else "".join([piece.text for piece in taken])
        self.texts.append(text)
        self.count += len(taken)
        if self.ids is not None:
            self.ids += [piece.ids[0] for piece in taken]
        return Delta(self._role, self._segment, self._kind, text, taken)

    def _quiet(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        passes, steps, at = self._passes, self._steps, self.at
        room, with_ids, count = self._room - self.count, self.ids is not None, 0
        for text, ids, tokens, _, _ in pieces:
            if count >= room or tokens != 1 or not text:
                break
            if len(ids) != 1 if with_ids else text[-1].isspace():
                break
            if passes[text] or (after := steps[at][text]) < 0:
                break
            at = after
            count += 1
        self.at = at
        return pieces if count == len(pieces) else pieces[:count]
