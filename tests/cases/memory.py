"""A relay in memory: fake engines write the bytes, the gateway's own readers and session read them.

No sockets: what an engine would send is cut as a test wants it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.engines.chat import Chat, ChatReader, Prefill, chat_body
from gateway.engines.hosted import HostedReader
from gateway.engines.llamacpp import LlamaCppReader
from gateway.engines.reading import ChunkReader, events_of
from gateway.engines.served_tokenizer import TokenIdsReader
from gateway.engines.tgi import TgiReader
from gateway.errors import GatewayError
from gateway.observed import Observed
from gateway.relay import relay
from gateway.replies import Folded, Reply
from relaygen.events import DecodeRequest, Delta, Event, Finished, Output, Role
from relaygen.policy import Policy
from relaygen.session import Limits, RelaySession
from tests.gateway.fakes import (
    FakeEngine,
    FakeHosted,
    FakeLlamaCpp,
    FakeSglang,
    FakeTgi,
    FakeVllm,
    Request,
    Script,
)
from tests.gateway.fakes.decode import Decode
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.fakes.script import ASSISTANT, Act
from tests.gateway.fakes.tgi import GENERATE_STREAM
from tests.gateway.support import nothing_ahead
from tests.relaygen.support import make_policy

T = TypeVar("T")
Wiring = Callable[[Sequence[bytes]], Iterable[bytes]]
"""From the data of a stream's events to the reads by which its bytes arrive."""

POLICY = make_policy("Now", "Thus")
NO_LIMITS = Limits()
URL = "http://engine"
ASKED = [{"role": "user", "content": "How many?"}]
_ROOM = 2000


_LOOP = asyncio.new_event_loop()


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def plain(data: Sequence[bytes]) -> list[bytes]:
    """The whole stream in one read."""
    return [b"".join(b"data: %s\n\n" % one for one in data)]


def reads(parts: Iterable[bytes]) -> Callable[[], Awaitable[bytes]]:
    left = iter(parts)

    async def read() -> bytes:
        return next((part for part in left if part), b"")

    return read


def events(parts: Iterable[bytes], reader: ChunkReader) -> list[Event]:
    """What one stream is to the session."""

    async def all_() -> list[Event]:
        return [event async for event in events_of(reads(parts), reader, URL)]

    return at_once(all_())


# ---- dialects -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    """A fake engine, the endpoint that is asked, and who of the gateway reads its answer."""

    name: str
    fake: type[FakeEngine]
    path: str
    fields: dict[str, Any]
    reader: Callable[[], ChunkReader] | None = None
    ids: bool = False
    quirks: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    def data(self, script: Script, prefix: str, tokens_per_chunk: int) -> list[bytes]:
        """The data of all events of one decode."""
        fake = self.fake(script, context=100_000)
        for quirk, value in self.quirks.items():
            setattr(fake, quirk, value)
        content = json.dumps({**self.fields, **self._prompt(prefix)}).encode()
        reply = fake.reply(Request("POST", self.path, {}, content, 0))
        sink = _Events(reply.done)
        acts = script(ASSISTANT + prefix)
        at_once(Decode(reply, sink, fake.tokenizer, tokens_per_chunk).run(acts))
        return sink.data

    def reading(self, prefix: str) -> ChunkReader:
        return self.reader() if self.reader else ChatReader(self._chat, prefix)

    def _prompt(self, prefix: str) -> dict[str, Any]:
        if self.path == CHAT:
            return {**chat_body(self._chat, prefix), "model": "m", "stream": True}
        return {"inputs" if self.path == GENERATE_STREAM else "prompt": ASSISTANT + prefix}

    @property
    def _chat(self) -> Chat:
        form = Prefill.CONTINUE if self.fake is FakeVllm else Prefill.TRAILING
        return Chat({"messages": ASKED}, POLICY.thinking, prefill=form)


class _Events:
    """Takes a decode's events down."""

    def __init__(self, done: bytes | None) -> None:
        self._done = done
        self.data: list[bytes] = []

    def event(self, chunk: dict[str, Any]) -> None:
        self.data.append(json.dumps(chunk, ensure_ascii=False).encode())

    async def act(self, act: Act) -> bool:
        raise AssertionError(f"in memory nothing breaks: {act}")

    def end(self) -> None:
        if self._done is not None:
            self.data.append(self._done)


_MOST = {"max_tokens": _ROOM, "stream_options": {"include_usage": True}}
_TOLD = {**_MOST, "logprobs": 0, "return_token_ids": True}
_NATIVE = {"parameters": {"max_new_tokens": _ROOM, "details": True}}
COMPLETING = (
    Dialect("vllm", FakeVllm, COMPLETIONS, _TOLD, TokenIdsReader, ids=True),
    Dialect("llamacpp", FakeLlamaCpp, COMPLETIONS, {**_MOST, "logprobs": 1}, LlamaCppReader, True),
    Dialect("sglang", FakeSglang, COMPLETIONS, {**_TOLD, "rid": "r"}, TokenIdsReader, ids=True),
    Dialect("tgi", FakeTgi, GENERATE_STREAM, _NATIVE, TgiReader),
    Dialect("hosted", FakeHosted, COMPLETIONS, _MOST, HostedReader),
)
CHATTING = (
    Dialect("vllm chat", FakeVllm, CHAT, _MOST, quirks={"chats": True}),
    Dialect("llamacpp chat", FakeLlamaCpp, CHAT, _MOST, quirks={"chats": True}),
    Dialect("hosted chat", FakeHosted, CHAT, _MOST, quirks={"reasoning": "inline"}),
)
DIALECTS = COMPLETING + CHATTING


# ---- a generation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What the client has of a generation."""

    reasoning: str
    content: str
    finish: str
    tokens: int


@dataclass(frozen=True)
class Relay:
    """One generation by two engines that speak a dialect."""

    dialect: Dialect
    script: Script
    policy: Policy = POLICY
    limits: Limits = NO_LIMITS
    tokens_per_chunk: int = 1

    def told(self, wiring: Wiring = plain) -> Told:
        def decode(request: DecodeRequest) -> AsyncGenerator[Event]:
            prefix = request.prefix or ""
            assert isinstance(prefix, str)
            data = self.dialect.data(self.script, prefix, self.tokens_per_chunk)
            return events_of(reads(wiring(data)), self.dialect.reading(prefix), URL)

        session = RelaySession(self.policy, self.limits, handoff="text")
        return _LOOP.run_until_complete(_folded(session, decode))


async def _broken(error: GatewayError, *, started: bool) -> list[Output]:
    """None of these engines breaks."""
    raise error


async def _folded(
    session: RelaySession, decode: Callable[[DecodeRequest], AsyncGenerator[Event]]
) -> Told:
    reply = Reply("id", 1, "pair", chat=True, field="reasoning_content", trace=False, logprobs=None)
    folded = Folded()
    folded.add(reply.role_chunk(0, (Role.LARGE, 0)))
    finished: list[Finished] = []
    async for outputs in relay(session, nothing_ahead(session, decode), _broken, Observed()):
        for chunk in reply.delta_chunks(0, (o for o in outputs if isinstance(o, Delta))):
            folded.add(chunk)
        finished += [output for output in outputs if isinstance(output, Finished)]
    message = folded.whole()["choices"][0]["message"]
    [end] = finished
    return Told(
        message.get("reasoning_content", ""),
        message["content"],
        end.reason,
        end.usage.completion_tokens,
    )
