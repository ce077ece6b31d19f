"""The API that a client speaks: how chunks, errors and whole replies look to it. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from gateway import sse
from gateway.apis import messages as messages_api
from gateway.apis import responses as responses_api
from gateway.errors import GatewayError
from gateway.replies import AnyChunk, Chunk, TextChunk, spelt

DONE_EVENT = sse.event(sse.DONE)


class Wire(ABC):
    """One reply in the client's own terms. Stream: `chunk`s, then `end` or `error`."""

    @abstractmethod
    def chunk(self, chunk: AnyChunk) -> bytes: ...

    @abstractmethod
    def end(self) -> bytes: ...

    @abstractmethod
    def error(self, error: GatewayError) -> bytes: ...

    @abstractmethod
    def whole(self, completion: dict[str, Any]) -> dict[str, Any]: ...

    def prompted(self, tokens: int) -> None:  # noqa: B027 - most APIs tell it at the end alone
        """The prompt's length is known, before the first chunk."""

    def ping(self) -> bytes:
        """Sent on long silences: a comment with no blank line after it, as openai-python before
        2.38 takes the end of a comment for the end of an empty event."""
        return b": ping\n"


class OpenAIWire(Wire):
    """/v1/chat/completions and /v1/completions: what the gateway speaks itself."""

    def __init__(self, *, usage: bool) -> None:
        self._usage = usage

    def chunk(self, chunk: AnyChunk) -> bytes:
        if isinstance(chunk, TextChunk):
            return chunk.event()
        if not chunk["choices"] and not self._usage:
            return b""
        return sse.event(orjson.dumps(chunk))

    def end(self) -> bytes:
        return DONE_EVENT

    def error(self, error: GatewayError) -> bytes:
        return sse.event(orjson.dumps(error.body()))

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        return completion


class _Translator(Protocol):
    """Chat chunks to the events of another API."""

    def chunk(self, chunk: Chunk) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: GatewayError) -> bytes: ...


class _TranslatedWire(Wire):
    """An API whose stream `translator` writes."""

    translator: _Translator

    def chunk(self, chunk: AnyChunk) -> bytes:
        return self.translator.chunk(spelt(chunk))

    def end(self) -> bytes:
        return self.translator.end()

    def error(self, error: GatewayError) -> bytes:
        return self.translator.error(error)


class MessagesWire(_TranslatedWire):
    """Anthropic's /v1/messages."""

    translator: messages_api.MessagesStream

    def __init__(self, model: str) -> None:
        self._model = model
        self.translator = messages_api.MessagesStream(model)

    def prompted(self, tokens: int) -> None:
        self.translator.prompted(tokens)

    def ping(self) -> bytes:
        return self.translator.ping()

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        return messages_api.whole(completion, self._model)


class ResponsesWire(_TranslatedWire):
    """OpenAI's /v1/responses. `request` is the client's own: much of it is told back."""

    def __init__(self, model: str, request: Mapping[str, Any]) -> None:
        self._model = model
        self._request = request
        self.translator = responses_api.ResponsesStream(model, request)

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        return responses_api.whole(completion, self._model, self._request)
