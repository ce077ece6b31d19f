"""Reads the events of one decode's stream: chunks of whatever dialect to pieces of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import orjson

from gateway import sse
from gateway.engines.answers import MISREAD
from gateway.errors import GatewayError, RequestError, UpstreamError
from gateway.nesting import MAX_DEPTH, too_deep
from gateway.upstream import error_of
from relaygen.events import DecodeChunk, DecodeFinished, Event, Piece, TopLogprob


class ChunkReader(ABC):
    """Reads one decode's chunks: `finish` and `tokens` fill in at its end."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self.tokens: int | None = None
        self.done = False
        """Whether nothing more will come: [DONE], or what the dialect has in its place."""
        self.estimated = False
        """Whether the pieces' token counts are estimates."""
        self.prompt: tuple[int, int] | None = None
        """Tokens that the engine was sent, and those of them that its prefix cache had."""

    def read(self, chunk: dict[str, Any]) -> list[Piece]:
        if usage := chunk.get("usage"):
            told = usage.get("completion_tokens")
            self.tokens = told if type(told) is int else None
            self.prompt = _prompt(usage) or self.prompt
        choices = chunk.get("choices")
        if not choices:
            return []
        choice = choices[0]
        pieces = self._pieces(choice, chunk)
        self.finish = finish_reason(choice.get("finish_reason")) or self.finish
        return pieces

    def plain(self, events: list[bytes]) -> list[Piece] | None:
        """The pieces of events that are all of the usual kind, read at once; None: they are not."""
        return None

    @abstractmethod
    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]: ...


def _prompt(usage: dict[str, Any]) -> tuple[int, int] | None:
    """What a usage says of the prompt, where it says both."""
    sent, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return told_prompt(sent, cached)


def told_prompt(sent: object, cached: object) -> tuple[int, int] | None:
    """Counts that an engine told; None where they are none."""
    if type(sent) is int and type(cached) is int and 0 <= cached <= sent:
        return sent, cached
    return None


# What servers call it when the model ended its turn.
_STOPS = frozenset({"eos", "eos_token", "stop_sequence"})


def finish_reason(given: str | None) -> str | None:
    """OpenAI's word for an engine's; None while there is none."""
    return "stop" if given in _STOPS else given or None


async def events_of(
    read: Callable[[], Awaitable[bytes]], reader: ChunkReader, url: str
) -> AsyncGenerator[Event]:
    """The events of a stream, ending in DecodeFinished. Raises GatewayError where it breaks.

    `read` brings what has come of it, and b"" at its end.
    """
    decoder = sse.EventDecoder()
    try:
        while chunk := await read():
            pieces, broken = _read(chunk, decoder, reader, url)
            if pieces:
                yield DecodeChunk(tuple(pieces), reader.estimated, reader.prompt)
            if broken is not None:
                raise broken
            if reader.done and reader.finish is not None:
                break
    except UpstreamError:
        if reader.finish is None:  # else the engine has said that it is complete
            raise
    if reader.finish is None:
        raise UpstreamError(
            f"The stream from the engine at {url} ended without a finish_reason",
            code="engine_truncated",
        ).of("truncated")
    if reader.finish in ("abort", "error"):
        raise UpstreamError(f"The engine at {url} aborted the generation")
    yield DecodeFinished(reader.finish, reader.tokens, reader.prompt)


def _read(
    chunk: bytes, decoder: sse.EventDecoder, reader: ChunkReader, url: str
) -> tuple[list[Piece], GatewayError | None]:
    """The pieces of one read, and the error that broke it after them, if one did."""
    pieces: list[Piece] = []
    finish = reader.finish
    try:
        events = decoder.feed(chunk)
        if (plain := reader.plain(events)) is not None:
            return plain, None
        for data in events:
            if data == sse.DONE:
                reader.done = True
            else:
                read = reader.read(chunk_object(data, url))
                _check(read)
                pieces += read
                finish = reader.finish
    except sse.EventTooLargeError as error:
        return pieces, UpstreamError(f"The engine at {url} sent {error}")
    except GatewayError as error:
        return pieces, error
    except MISREAD as error:
        reader.finish = finish  # what came beside something odd counts for nothing
        kind = type(reader).__name__
        return pieces, UpstreamError(
            f"The engine at {url} sent a chunk that {kind} can't read: {error!r}"
        )
    return pieces, None


def _check(pieces: list[Piece]) -> None:
    """Raises TypeError for what the session can't take, with which it would break later."""
    for text, ids, tokens, _, _ in pieces:
        if type(text) is not str or type(tokens) is not int or tokens < 0:
            raise TypeError("a text or a count that is none")
        for token in ids:
            if type(token) is not int:
                raise TypeError("a token id that is none")


def chunk_object(data: bytes, url: str) -> dict[str, Any]:
    """The JSON object of an event. Raises UpstreamError for one that tells of an error."""
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise UpstreamError(f"The engine at {url} sent an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise UpstreamError(f"The engine at {url} sent an event that is no object")
    if len(data) > 2 * MAX_DEPTH and too_deep(data, chunk):
        raise UpstreamError(f"The engine at {url} sent an event nested over {MAX_DEPTH} levels")
    if chunk.get("error"):
        told = _told(chunk, error_of(data), url)
        told.engines = True
        raise told
    return chunk


# TGI's words for its kinds of error (router/src/infer/mod.rs).
_STATUS_BY_TYPE = {"validation": 422, "overloaded": 429, "template_error": 422}
_TGI_FAILED = ("Request failed during generation", "Incomplete generation")


def _told(chunk: dict[str, Any], error: dict[str, Any], url: str) -> GatewayError:
    """An error inside a stream that began with status 200: what it would have been as a status."""
    message = error.pop("message", "unknown error")
    told, status = chunk["error"], _STATUS_BY_TYPE.get(str(chunk.get("error_type")))
    if isinstance(told, dict):
        status = told.get("http_status_code", told.get("code"))
    if "overloaded" in message:  # TGI tells it as a 422, like everything else
        status = 429
    elif message.startswith(_TGI_FAILED):
        status = None
    if status in (400, 413, 422):
        return RequestError(message, status=status, **error)
    status = status if status in (429, 503) else None
    return UpstreamError(f"The engine at {url} failed: {message}", status=status, **error)


# ---- what several dialects share ----------------------------------------------------------------


def token_pieces(choice: dict[str, Any]) -> list[Piece]:
    """Pieces of a chunk with `token_ids` and the completions endpoint's lists of logprobs."""
    text: str = choice.get("text") or ""
    ids: list[int] = choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    tokens: list[str] = logprobs.get("tokens") or []
    if not text and not ids:
        return []
    if not tokens or (ids and len(ids) != len(tokens)):
        # The last of several may be half a character: only a lone id surely is its text's.
        lone = len(ids) == 1
        return [Piece(text, tuple(ids) if lone else (), len(ids) or len(tokens) or 1)]
    values = logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    pieces = []
    for start, end, share, sure in _shares(tokens, text):
        alone = end - start == 1
        pieces.append(
            Piece(
                share,
                tuple(ids[start:end]) if sure else (),
                end - start,
                values[start] if alone else None,
                _top(tops[start]) if alone else (),
            )
        )
    return pieces


def _shares(tokens: list[str], text: str) -> Iterator[tuple[int, int, str, bool]]:
    """Runs of tokens with their share of the text; and whether it surely is all of their text.

    Some engines show half a character as other ones, an end of turn is shown and no text: such
    tokens are between those that fit from the left and from the right.
    """
    first, last = 0, len(tokens)
    while first < last and text.startswith(tokens[first]):
        yield first, first + 1, tokens[first], True
        text = text[len(tokens[first]) :]
        first += 1
    right: list[tuple[int, int, str, bool]] = []
    while first < last - 1 and tokens[last - 1] and text.endswith(tokens[last - 1]):
        last -= 1
        right.insert(0, (last, last + 1, tokens[last], True))
        text = text[: len(text) - len(tokens[last])]
    if text:
        yield first, last, text, last - first == 1 or bool(right)
    else:
        yield from ((i, i + 1, "", True) for i in range(first, last))
    yield from right


def _top(top: dict[str, float] | None) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(text, logprob) for text, logprob in top.items()) if top else ()
