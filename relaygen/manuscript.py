"""All that was written of one generation: text, ids and deltas, and the tokens that they took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relaygen.automaton import Automaton
from relaygen.events import Delta, DeltaKind, Piece, Role
from relaygen.kept import KeptText
from relaygen.transcript import Transcript
from relaygen.usage import Ledger


class Manuscript:
    """What is kept goes on to the next engine and to the client; every token is counted once."""

    def __init__(self, kept: KeptText, transcript: Transcript) -> None:
        self.kept = kept
        self.ledger = Ledger()
        self._transcript = transcript
        self._lagging: list[Piece] = []  # tokens whose text has not come yet
        self._mark = 0  # of the text kept when the segment began
        self.segment_tokens = 0
        """Kept in the open segment."""
        self.decode_tokens = 0
        """Kept since the last handover."""

    def keep(self, writer: tuple[Role, int], pieces: Sequence[Piece], text: str) -> None:
        """Keep `text`, the text of `pieces` or a beginning of it."""
        role, segment = writer
        self._count(role, _tokens(pieces))
        self._transcript.push(role, segment, self.kept.add(pieces, text), pieces)

    @property
    def guard(self) -> Automaton | None:
        """Finds what may not simply be kept and passed on. None while anything is held back."""
        return None if self._lagging or self.kept.waits else self._transcript.guard

    @property
    def kind(self) -> DeltaKind:
        """Of text that the guard lets through."""
        return self._transcript.kind

    def keep_run(self, role: Role, count: int, texts: list[str], ids: list[int] | None) -> None:
        """Keep what a run took, so many tokens; its text has been passed on."""
        self._count(role, count)
        self.kept.add_run(texts, ids)

    def pass_on(self, delta: Delta) -> None:
        """Text that the guard lets through."""
        self._transcript.pass_on(delta)

    def add(self, writer: tuple[Role, int], piece: Piece) -> None:
        """Text of our own, for which no model is charged."""
        self._transcript.push(*writer, self.kept.add([piece], piece.text))

    def discard(self, pieces: Iterable[Piece]) -> None:
        self.ledger.discarded += _tokens(pieces)

    def lag(self, piece: Piece) -> None:
        """A token whose text will come with a later one."""
        self._lagging.append(piece)

    @property
    def lagging(self) -> int:
        """Tokens whose text has not come yet."""
        return _tokens(self._lagging) if self._lagging else 0

    def take_lagging(self) -> list[Piece]:
        lagging, self._lagging = self._lagging, []
        return lagging

    def discard_lagging(self) -> None:
        self.discard(self.take_lagging())

    def ended(self, told: int | None, received: int, *, large: bool, guessed: bool) -> int:
        """A decode is over, of `told` tokens: how many have no text, as its end has none."""
        lagging = self.lagging
        self._lagging = []
        if told is None:
            return lagging
        if guessed:  # now it is told how many they were
            self.ledger.keep(told - received, large=large, reasoning=self._reasoning)
            return 0
        return max(0, told - received) + lagging

    def begin_segment(self) -> None:
        self.segment_tokens = 0

    def handed_over(self, length: int) -> str:
        """The next decode starts on its own; returns the last `length` characters before it."""
        self.decode_tokens = 0
        self._mark = self.kept.mark
        return self.kept.tail(length)

    def put_back_blank(self, role: Role) -> list[str] | None:
        """What waits to be sent is to be written again: it was never kept.

        Returns the texts since the last handover; None where nothing was waiting.
        """
        pieces = self.kept.drop_blank()
        if pieces < 0:
            return None
        count = _tokens(self._transcript.unpush(pieces))
        self._count(role, -count)
        self.ledger.discarded += count
        return self.kept.since(self._mark)

    def let_go(self, writer: tuple[Role, int]) -> None:
        """No more will come: all that was held back is out now."""
        self._transcript.push(*writer, self.kept.release_blank())
        self._transcript.flush()

    def withdraw(self) -> None:
        """Nothing of it was told, and nothing is kept."""
        self._transcript.withdraw()
        self.ledger.withdraw()

    def take(self) -> list[Delta]:
        return self._transcript.take()

    @property
    def stop(self) -> str | None:
        """The client's stop string that was found, if one was."""
        return self._transcript.stop

    @property
    def _reasoning(self) -> bool:
        return self._transcript.kind is DeltaKind.REASONING

    def _count(self, role: Role, count: int) -> None:
        self.ledger.keep(count, large=role is Role.LARGE, reasoning=self._reasoning)
        self.segment_tokens += count
        self.decode_tokens += count


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)
