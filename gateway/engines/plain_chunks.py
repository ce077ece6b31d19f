"""Reads the chunks that nearly all are: one token each, with its id and logprob, and no news."""

from __future__ import annotations

from typing import Annotated

import msgspec

from relaygen.events import Piece, TopLogprob

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Logprobs(msgspec.Struct, gc=False):
    tokens: tuple[str]
    token_logprobs: tuple[float | None]


class _TopLogprobs(_Logprobs, gc=False):
    top_logprobs: tuple[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str
    token_ids: tuple[_Id]
    finish_reason: None = None
    logprobs: _Logprobs | None = None


class _TopChoice(_Choice, gc=False):
    logprobs: _TopLogprobs | None = None


class _Chunk(msgspec.Struct, gc=False):
    """Whatever has more in one of these places is not of this kind, and is refused."""

    choices: tuple[_Choice]
    usage: None = None
    error: None = None


class _TopChunk(_Chunk, gc=False):
    choices: tuple[_TopChoice]


_CHUNKS = msgspec.json.Decoder(list[_Chunk])
_TOP_CHUNKS = msgspec.json.Decoder(list[_TopChunk])


def plain_pieces(events: list[bytes], *, top: bool) -> list[Piece] | None:
    """The pieces of completions chunks, with alternatives if `top`; None: some are not plain."""
    array = b"[" + b",".join(events) + b"]"
    try:
        return _with_top(array, len(events)) if top else _without(array, len(events))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _without(array: bytes, count: int) -> list[Piece] | None:
    pieces = []
    for chunk in _CHUNKS.decode(array):
        (choice,) = chunk.choices
        text, logprob = choice.text, None
        if (told := choice.logprobs) is not None:
            if told.tokens[0] != text:
                return None
            logprob = told.token_logprobs[0]
        pieces.append(Piece(text, choice.token_ids, 1, logprob))
    return pieces if len(pieces) == count else None


def _with_top(array: bytes, count: int) -> list[Piece] | None:
    pieces = []
    for chunk in _TOP_CHUNKS.decode(array):
        (choice,) = chunk.choices
        told = choice.logprobs
        if told is None or told.tokens[0] != choice.text:
            return None
        top = told.top_logprobs[0] if told.top_logprobs else None
        alternatives = tuple([TopLogprob(*entry) for entry in top.items()]) if top else ()
        pieces.append(Piece(choice.text, choice.token_ids, 1, told.token_logprobs[0], alternatives))
    return pieces if len(pieces) == count else None
