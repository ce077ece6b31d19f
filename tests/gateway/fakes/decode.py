"""One decode: the acts of a script as tokens, and what carries them over the wire."""

from __future__ import annotations

import asyncio
import codecs
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tests.gateway.fakes.http import Connection
from tests.gateway.fakes.merging import merged
from tests.gateway.fakes.script import Act, Error, Fin, Gate, Raw, Reset, ToolCall

if TYPE_CHECKING:
    from tests.gateway.fakes.engines import FakeEngine
    from tests.gateway.fakes.tokens import Tokenizer

Body = dict[str, Any]


@dataclass(frozen=True)
class Token:
    """One decoded token; `text` is "" while a character is incomplete, and for the end of turn."""

    id: int
    text: str
    shown: str


class Refused(Exception):
    """The engine answers with an HTTP error."""

    def __init__(self, body: Body, status: int = 400) -> None:
        super().__init__(str(body))
        self.body = body
        self.status = status

    @property
    def json(self) -> bytes:
        return json.dumps(self.body).encode()


class Reply:
    """The chunks of one decode, in the dialect of its endpoint."""

    done: bytes | None = b"[DONE]"
    done_after_error = True
    headers: dict[str, str]

    def __init__(self, engine: FakeEngine, body: Body, prompt: list[int]) -> None:
        self.engine = engine
        self.body = body
        self.prompt = prompt
        self.made = 0
        self.limit = min(self.asked_for(), engine.context - len(prompt))
        self.aborted = asyncio.Event()
        self.headers = {}

    def asked_for(self) -> int:
        return int(self.body.get("max_tokens") or 16)

    def reason(self, token: Token) -> str | None:
        """Why the reply ends with the token just made, if it does."""
        if token.id == self.engine.tokenizer.eos:
            return "stop"
        return "length" if self.made >= self.limit else None

    def first(self) -> Iterator[Body]:
        yield from ()

    @abstractmethod
    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        """The chunks of some tokens; with a reason they are the last."""

    def tool(self, call: ToolCall) -> Iterator[Body] | None:
        """The chunks of a tool call; None where no tools are parsed."""
        return None

    def last(self) -> Iterator[Body]:
        """What comes after the chunk with the reason."""
        yield from ()

    def usage(self) -> Body:
        asked, made = len(self.prompt), self.made
        usage: Body = {"prompt_tokens": asked, "completion_tokens": made}
        if self.engine.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.engine.cached}
        return {**usage, "total_tokens": asked + made}

    @property
    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    def error(self, error: Error) -> Body:
        """The event of an error within the stream."""
        return {"error": {"message": error.message, "code": error.code}}

    def whole(self, chunks: list[Body]) -> Body:
        """The answer in one piece."""
        return {**merged(chunks), "usage": self.usage()}


class Ended(Exception):
    """The script ended the reply its own way."""


class Sink(Protocol):
    def event(self, chunk: Body) -> None: ...

    async def act(self, act: Act) -> bool:
        """Misbehaves; whether the decode was aborted meanwhile."""

    def end(self) -> None: ...


class Decode:
    def __init__(self, reply: Reply, sink: Sink, tokenizer: Tokenizer, per_chunk: int) -> None:
        self._reply = reply
        self._sink = sink
        self._tokenizer = tokenizer
        self._per_chunk = per_chunk
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[Token] = []

    async def run(self, acts: Iterable[Act]) -> None:
        self._send(self._reply.first())
        try:
            for act in [*acts, self._tokenizer.piece(self._tokenizer.eos)]:
                if await self._step(act):
                    break
        except Ended:
            return
        self._send(self._reply.last())
        self._sink.end()

    async def _step(self, act: Act) -> str | None:
        match act:
            case str() | bytes():
                return self._token(act)
            case ToolCall():
                return self._tool(act)
            case _:
                self._flush(None)
                if await self._sink.act(act):
                    self._flush("abort")
                    return "abort"
                return None

    def _token(self, act: str | bytes) -> str | None:
        token = self._tokenizer.id_of(act)
        ends = token == self._tokenizer.eos
        text = "" if ends else self._decoder.decode(self._tokenizer.piece(token))
        read = Token(token, text, "<|im_end|>" if ends else text)
        self._waiting.append(read)
        self._reply.made += 1
        reason = self._reply.reason(read)
        if reason or len(self._waiting) >= self._per_chunk:
            self._flush(reason)
        return reason

    def _tool(self, call: ToolCall) -> str | None:
        self._flush(None)
        chunks = self._reply.tool(call)
        if chunks is not None:
            self._reply.made += len(call.pieces)
            self._send(chunks)
            return None
        return next(filter(None, map(self._token, call.pieces)), None)

    def _flush(self, reason: str | None) -> None:
        if self._waiting or reason:
            waiting, self._waiting = self._waiting, []
            self._send(self._reply.chunks(waiting, reason))

    def _send(self, chunks: Iterator[Body]) -> None:
        for chunk in chunks:
            self._sink.event(chunk)


class Stream:
    """The events of one reply on the wire."""

    def __init__(self, engine: FakeEngine, connection: Connection, reply: Reply) -> None:
        self._engine = engine
        self._connection = connection
        self._reply = reply
        self._begun = False
        self._held = b""

    def event(self, chunk: Body) -> None:
        self._data(json.dumps(chunk, ensure_ascii=False).encode())

    def _data(self, data: bytes) -> None:
        end = self._engine.line_end
        comment = self._engine.comment(end) if self._engine.comments else b""
        self._write(comment + self._engine.data_field + data + end + end)

    def _write(self, data: bytes) -> None:
        if not self._begun:
            self._connection.begin(**self._reply.headers)
            self._begun = True
        self._held += data
        if not self._engine.in_one_write:
            self.flush()

    def flush(self) -> None:
        self._connection.send(self._held)
        self._held = b""

    def end(self, done: bool = True) -> None:
        if done and self._reply.done is not None:
            self._data(self._reply.done)
        self._write(b"")
        self.flush()
        self._connection.end()

    async def act(self, act: Act) -> bool:
        match act:
            case Gate():
                self.flush()
                return await wait(act, self._reply.aborted)
            case Raw(data):
                self._write(data)
                return False
            case Error():
                self.event(self._reply.error(act))
                self.end(self._reply.done_after_error)
            case Fin():
                self.end(done=False)
            case Reset():
                self._write(b"")
                self.flush()
                # What was sent must be read before the reset throws it away.
                await asyncio.sleep(0.05)
                self._connection.reset()
        raise Ended


class Whole:
    """A reply in one piece."""

    def __init__(self, connection: Connection, reply: Reply) -> None:
        self._connection = connection
        self._reply = reply
        self._chunks: list[Body] = []

    def event(self, chunk: Body) -> None:
        self._chunks.append(chunk)

    def end(self) -> None:
        self._connection.json(self._reply.whole(self._chunks), **self._reply.headers)

    async def act(self, act: Act) -> bool:
        match act:
            case Gate():
                return await wait(act, self._reply.aborted)
            case Raw():
                return False
            case Error(_, code):
                self._connection.json(self._reply.error(act), code)
            case Fin():
                self._connection.close()
            case Reset():
                self._connection.reset()
        raise Ended


async def wait(gate: Gate, aborted: asyncio.Event | None = None) -> bool:
    """Until the gate opens; whether it was the decode that was aborted."""
    gate.reached.set()
    either = [asyncio.ensure_future(gate.opened.wait())]
    if aborted is not None:
        either.append(asyncio.ensure_future(aborted.wait()))
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in either:
            task.cancel()
    return aborted is not None and aborted.is_set()
