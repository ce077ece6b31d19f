"""Runs of tokens in which nothing happens, as nearly all are: taken at once and not one by one."""

from __future__ import annotations

from relaygen.automaton import Automaton
from relaygen.cutter import Cutter
from relaygen.events import Delta, DeltaKind, Piece, Role
from relaygen.manuscript import Manuscript
from relaygen.rules import Rules
from relaygen.state import State


class QuietRun:
    """A run that may go on for many reads; what it took is kept when it is settled.

    `guard` finds what may not simply be passed on, and starts at its root; `finder` finds what may
    end the segment, and is in the state `at`. `room` tokens at most are taken, each of which must
    have one id with `ids`, and else not end in a blank.
    """

    __slots__ = (
        "_at",
        "_ids",
        "_kind",
        "_passes",
        "_role",
        "_room",
        "_segment",
        "_steps",
        "_texts",
        "count",
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
        automaton, self._at = finder
        self._steps = automaton.quiet
        self._room = room
        self._role, self._segment = writer
        self._kind = kind
        self.count = 0
        """Tokens taken."""
        self._ids: list[int] | None = [] if ids else None
        self._texts: list[str] = []

    def settle(self, written: Manuscript, cutter: Cutter, state: State) -> None:
        """It ends here: what it took is kept, and the cutter stands after it."""
        cutter.passed(state, "".join(self._texts), self._at)
        written.keep_run(self._role, self.count, self._texts, self._ids)

    def take(self, pieces: tuple[Piece, ...]) -> Delta | None:
        """Takes the first pieces, as far as nothing happens in them: the delta has those taken."""
        taken = self._quiet(pieces)
        if not taken:
            return None
        text = taken[0].text if len(taken) == 1 else "".join([piece.text for piece in taken])
        self._texts.append(text)
        self.count += len(taken)
        if self._ids is not None:
            self._ids += [piece.ids[0] for piece in taken]
        return Delta(self._role, self._segment, self._kind, text, taken)

    def _quiet(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        passes, steps, at = self._passes, self._steps, self._at
        room, with_ids, count = self._room - self.count, self._ids is not None, 0
        for text, ids, tokens, _, _ in pieces:
            if count >= room or tokens != 1 or not text:
                break
            if len(ids) != 1 if with_ids else text[-1].isspace():
                break
            if passes[text] or (after := steps[at][text]) < 0:
                break
            at = after
            count += 1
        self._at = at
        return pieces if count == len(pieces) else pieces[:count]


def open_run(
    written: Manuscript,
    cutter: Cutter,
    rules: Rules,
    state: State,
    writer: tuple[Role, int],
    *,
    guessed: bool,
) -> QuietRun | None:
    """A run of tokens after the last one; None where it takes a closer look."""
    guard, finder = written.guard, cutter.finder(state)
    if guard is None or finder is None or not rules.goes_by_itself(state):
        return None
    room = rules.room(state, written.ledger.kept, written.segment_tokens, guessed=guessed)
    ids = written.kept.ids is not None
    return QuietRun(guard, finder, room, ids=ids, writer=writer, kind=written.kind)
