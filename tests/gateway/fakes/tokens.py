"""A tiny tokenizer: words with the blank before them, marks, specials; other bytes one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable

SPECIALS = ("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<bos>")
_TOKEN = re.compile(
    "|".join([*map(re.escape, SPECIALS), r" ?[A-Za-z]+", r"\d", r"\n+", r"."]), re.S
)
_FIRST_BYTE_ID = 1000
_FIRST_WORD_ID = 2000


_ids: dict[bytes, int] = {}
_pieces: dict[int, bytes] = {}


class Tokenizer:
    """All have the same vocabulary; another `offset` is another one.

    Pieces get their ids as they are first seen. Characters outside ASCII are one token a byte.
    """

    def __init__(self, *, offset: int = 0, bos: bool = False) -> None:
        self._offset = offset
        self.bos = self.id_of("<bos>") if bos else None
        self.eos = self.id_of("<|im_end|>")

    def id_of(self, piece: str | bytes) -> int:
        """The id of one token, whatever its text."""
        piece = piece.encode() if isinstance(piece, str) else piece
        if piece not in _ids:
            if len(piece) == 1 and piece[0] >= 0x80:
                number = _FIRST_BYTE_ID + piece[0]
            else:
                number = _FIRST_WORD_ID + len(_ids)
            _ids[piece] = number
            _pieces[number] = piece
        return self._offset + _ids[piece]

    def piece(self, token: int) -> bytes:
        return _pieces[token - self._offset]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        ids = [self.bos] if special and self.bos is not None else []
        for match in _TOKEN.finditer(text):
            token = match.group()
            if token.isascii():
                ids.append(self.id_of(token))
            else:
                ids += [self.id_of(bytes([byte])) for byte in token.encode()]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.piece(i) for i in ids).decode(errors="replace")
