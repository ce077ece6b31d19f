"""The kept text of one generation and its token ids: what the next engine goes on from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relaygen.events import Piece


class KeptText:
    """Ids and text that always agree: the ids, decoded, are the text.

    Ids are given up for good at the first piece that lacks one or is kept in part; from then on
    the prefix is text, and trailing blanks wait here until more text follows. A segment's last
    blank is dropped, for the next engine to write itself: no tokenizer continues well after one.
    """

    __slots__ = ("_blank", "_blank_pieces", "_move_blanks", "_texts", "ids")

    def __init__(self, *, with_ids: bool, move_blanks: bool = True) -> None:
        self._move_blanks = move_blanks
        self.ids: list[int] | None = [] if with_ids else None
        self._texts: list[str] = []
        self._blank = ""
        self._blank_pieces = 0  # that are nothing but what waits

    def add(self, pieces: Sequence[Piece], text: str) -> str:
        """Keep `text`, the text of `pieces` or a beginning of it; returns what is out now."""
        if self.ids is not None:
            self._add_ids(self.ids, pieces, text)
        if self.ids is not None or not self._move_blanks:
            out = text
        else:
            whole = self._blank + text
            out = whole.rstrip()
            self._blank = whole[len(out) :]
            self._blank_pieces = 0 if out else self._blank_pieces + len(pieces)
        if out:
            self._texts.append(out)
        return out

    def add_run(self, texts: Iterable[str], ids: Iterable[int] | None) -> None:
        """Keep texts that do not end in a blank, and all their ids; no blank waits."""
        if self.ids is not None and ids is not None:
            self.ids += ids
        self._texts += texts

    @property
    def waits(self) -> bool:
        """Whether a blank waits for more text."""
        return bool(self._blank)

    def _add_ids(self, ids: list[int], pieces: Iterable[Piece], text: str) -> None:
        length, count = 0, len(ids)
        for piece in pieces:
            if len(piece.ids) != piece.tokens:
                self.ids = None
                return
            ids.extend(piece.ids)
            length += len(piece.text)
        if length != len(text) or len(ids) == count:
            self.ids = None

    def drop_blank(self) -> int:
        """The next engine is to write the waiting blank itself; how many pieces were nothing else.

        -1 where no blank was waiting.
        """
        dropped = self._blank_pieces if self._blank else -1
        self._blank, self._blank_pieces = "", 0
        return dropped

    def forget_ids(self) -> None:
        """The next engine takes text."""
        self.ids = None

    @property
    def mark(self) -> int:
        """Stands for all the text of now."""
        return len(self._texts)

    def since(self, mark: int) -> list[str]:
        """The texts added since then."""
        return self._texts[mark:]

    def release_blank(self) -> str:
        """The waiting blank, when the generation is over and it is text like any other."""
        blank, self._blank = self._blank, ""
        if blank:
            self._texts.append(blank)
        return blank

    def prefix(self) -> tuple[int, ...] | str:
        return tuple(self.ids) if self.ids is not None else self.text()

    def text(self) -> str:
        return "".join(self._texts)

    def tail(self, length: int) -> str:
        """The last `length` characters."""
        tail = ""
        for text in reversed(self._texts):
            tail = text + tail
            if len(tail) >= length:
                break
        return tail[-length:]
