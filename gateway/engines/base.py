"""What every engine can do, and the part of it that all OpenAI-style servers share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from gateway import sse
from gateway.errors import RequestError, UpstreamError
from gateway.upstream import Upstream, encoded, error_of, raise_for_error
from relaygen.events import DecodeChunk, DecodeFinished, DecodeRequest, Event, Piece

# Words, digits, blanks, code, accents, scripts, symbols: where two vocabularies or pre-tokenizers
# differ, some of it is cut differently or numbered differently.
VOCABULARY_PROBE = (
    "Therefore, the SUM of 12345 and 3.14159 isn't 42; we've\n\n\tdef f(x):\n    return x**2\r\n"
    "naïve façade Straße Ελληνικά Русский עברית العربية हिन्दी ไทย 中文 日本語 한국어 🎉 ∑∫√≠≤ "
    "{}[]<>|\\/ http://a.b/c?d=e&f=g#h  double  spaces   triple ---- ==== 0123456789 AaBbCc xyzzy "
    "antidisestablishmentarianism supercalifragilistic !!! ??? ... “quotes” ‘single’ 1e-9 0xFF\n"
)

_TAIL_IDS = 12
TAIL_CHARS = 64
_TAILS_KEPT = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: `ids` as the engine tokenized it, and their text where it is known."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the probe learned. `vocabulary` fingerprints the tokenizer; `context` is in tokens."""

    dialect: str
    version: str
    models: tuple[str, ...]
    context: int | None
    vocabulary: str | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The request fields that go to the engine as they are, and the logprobs wanted (0: none)."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None


def template_kwargs(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template is given beside the messages, as vLLM's chat endpoint gathers it."""
    beside = ("reasoning_effort", "documents")
    named = {key: request[key] for key in beside if request.get(key) is not None}
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        message = f"`chat_template_kwargs` must be an object, not {given!r}"
        raise RequestError(message, param="chat_template_kwargs")
    return {**named, **given}


def fingerprint(ids: tuple[int, ...]) -> str:
    return hashlib.sha256(orjson.dumps(ids)).hexdigest()[:16]


class Tokenization(ABC):
    """Renders and tokenizes: an engine, or a tokenizer of our own."""

    def __init__(self) -> None:
        self._tails: dict[tuple[int, ...], str] = {}
        self._fixed: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        """The prompt of a chat request's `messages` (and its template fields)."""

    @abstractmethod
    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text; with `special`, after the BOS that the model wants."""

    @abstractmethod
    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        """The text of some ids, special tokens with it."""

    async def vocabulary(self, model: str) -> str:
        """Fingerprint: equal where the vocabulary and the way to cut text into it are equal."""
        return fingerprint(await self.tokenize(model, VOCABULARY_PROBE))

    async def fixed_ids(self, model: str, text: str) -> tuple[int, ...]:
        """Token ids of a text that is needed again and again: asked for once."""
        if text not in self._fixed:
            self._fixed[text] = await self.tokenize(model, text)
        return self._fixed[text]

    async def tail(self, model: str, prompt: Prompt, length: int = TAIL_CHARS) -> str:
        """The last `length` characters of the prompt's text, or a few more.

        Templates end alike: a short tail is asked for once.
        """
        if prompt.text is not None:
            return prompt.text[-length:]
        if length > TAIL_CHARS:
            return await self.detokenize(model, prompt.ids[-length:])  # no token is empty
        ids = prompt.ids[-_TAIL_IDS:]
        if ids not in self._tails:
            if len(self._tails) >= _TAILS_KEPT:
                self._tails.clear()
            self._tails[ids] = await self.detokenize(model, ids)
        return self._tails[ids]


class Engine(Tokenization):
    """One server. Subclasses know their dialect's paths, request fields and chunk shapes."""

    dialect: ClassVar[str]

    def __init__(self, upstream: Upstream) -> None:
        super().__init__()
        self.upstream = upstream
        self.active = 0
        """Generations that run on it now, as far as this process knows."""

    @property
    def url(self) -> str:
        return self.upstream.url

    @abstractmethod
    async def probe(self) -> EngineInfo:
        """Asks the server what it is and serves."""

    async def _prompt(self, model: str, prompt: Prompt, prefix: tuple[int, ...] | str) -> Any:
        """The `prompt` field: the rendered prompt with the prefix after it."""
        if not isinstance(prefix, str):
            return [*prompt.ids, *prefix]
        text = prompt.text
        return (await self.detokenize(model, prompt.ids) if text is None else text) + prefix

    @abstractmethod
    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        """Request fields of this dialect."""

    @abstractmethod
    def _reader(self) -> ChunkReader:
        """A fresh reader for one decode's chunks."""

    async def decode(
        self, model: str, prompt: Prompt, request: DecodeRequest, sampling: Sampling
    ) -> AsyncGenerator[Event]:
        """One upstream generation: its events, ending in DecodeFinished.

        Closing the iterator early closes the connection, which aborts the generation upstream.
        Raises RequestError or UpstreamError where the engine refuses, breaks or can't be reached.
        """
        body = {
            "model": model,
            "prompt": await self._prompt(model, prompt, request.prefix),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields(request, sampling),
        }
        data = encoded({key: value for key, value in body.items() if value is not None})
        async with self.upstream.request("POST", "/v1/completions", data) as response:
            await raise_for_error(response, self.url)
            async with (
                aclosing(self.upstream.stream(response)) as chunks,
                aclosing(self._events(chunks)) as events,
            ):
                async for event in events:
                    yield event

    async def _events(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[Event]:
        decoder, reader = sse.EventDecoder(), self._reader()
        async for chunk in chunks:
            pieces, broken = self._read(chunk, decoder, reader)
            if pieces:
                yield DecodeChunk(tuple(pieces))
            if broken is not None:
                raise broken
            if reader.done and reader.finish is not None:
                break
        if reader.finish is None:
            raise UpstreamError(
                f"The stream from the engine at {self.url} ended without a finish_reason",
                code="engine_truncated",
            )
        if reader.finish in ("abort", "error"):
            raise UpstreamError(f"The engine at {self.url} aborted the generation")
        yield DecodeFinished(reader.finish, reader.tokens)

    def _read(
        self, chunk: bytes, decoder: sse.EventDecoder, reader: ChunkReader
    ) -> tuple[list[Piece], UpstreamError | None]:
        """The pieces of one read, and the error that broke it after them, if one did."""
        pieces: list[Piece] = []
        try:
            for data in decoder.feed(chunk):
                if data == sse.DONE:
                    reader.done = True
                else:
                    pieces += reader.read(_object(data, self.url))
        except sse.EventTooLargeError as error:
            return pieces, UpstreamError(f"The engine at {self.url} sent {error}")
        except UpstreamError as error:
            return pieces, error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            return pieces, UpstreamError(
                f"The engine at {self.url} sent a chunk unlike {self.dialect}'s: {error!r}"
            )
        return pieces, None


class ChunkReader(ABC):
    """Reads one decode's chunks: `finish` and `tokens` fill in at its end."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self.tokens: int | None = None
        self.done = False

    def read(self, chunk: dict[str, Any]) -> list[Piece]:
        if usage := chunk.get("usage"):
            self.tokens = usage.get("completion_tokens")
        choices = chunk.get("choices")
        if not choices:
            return []
        choice = choices[0]
        pieces = self._pieces(choice, chunk)
        self.finish = choice.get("finish_reason") or self.finish
        return pieces

    @abstractmethod
    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]: ...


def _object(data: bytes, url: str) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise UpstreamError(f"The engine at {url} sent an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise UpstreamError(f"The engine at {url} sent an event that is no object")
    if chunk.get("error"):
        error = error_of(data)
        message = error.pop("message", "unknown error")
        raise UpstreamError(f"The engine at {url} failed: {message}", **error)
    return chunk
