"""What every engine can do, and the part of it that all OpenAI-style servers share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import structlog

from gateway.chats import chat_chunks
from gateway.connections import Asked
from gateway.engines.chat import Chat, ChatReader, Parser, Prefill, chat_body
from gateway.engines.reading import ChunkReader, events_of
from gateway.engines.tokenization import Prompt, Tokenization
from gateway.errors import BusyError, GatewayError, RequestError, UnreachableError
from gateway.http1 import Response
from gateway.upstream import Upstream, encoded, raise_for_error
from relaygen.events import DecodeChunk, DecodeRequest, Event, Piece
from relaygen.policy import Thinking

Continuation = Literal["completions", "chat"]

log = structlog.get_logger()

# vLLM: "... logprobs of 21, which is greater than max allowed: 20"; OpenAI: "... maximum is 5".
_LOGPROB_LIMIT = re.compile(
    r"logprobs.*?(?:max(?:imum)? allowed:?|maximum (?:value )?is|"
    r"must be (?:<=|at most|less than or equal to)) (\d+)",
    re.S,
)
_PASSING = (503, 504)
"""Statuses that tell of the moment, not of what a server can do."""
GREETING = {"role": "user", "content": "Hi"}
_THOUGHT = "Okay, let me see."


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the probe learned. `vocabulary` fingerprints the tokenizer; `context` is in tokens.

    `ids` tells whether the engine takes token ids and tells those it decodes, `bos` how many a
    rendered prompt begins with, `continuation` by which endpoint a prefix is gone on from.
    """

    dialect: str
    version: str
    models: tuple[str, ...]
    context: int | None
    vocabulary: str | None
    ids: bool = True
    max_logprobs: int | None = None
    bos: int | None = None
    continuation: Continuation = "completions"

    def serves(self, model: str) -> bool:
        """llama.cpp serves its one model under any name; some hosted APIs list none."""
        return model in self.models or self.dialect == "llamacpp" or not self.models


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one server from another: cheap to ask, asked again and again."""

    version: str
    models: tuple[str, ...]
    context: int | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The request fields that go to the engine as they are, and the logprobs wanted (0: none).

    `headers` join what the engine does to a trace. A decode that `tells` has ASKED as its first
    event, once its request is written.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tells: bool = False


ASKED = DecodeChunk(())
"""No token yet: the engine has been asked."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a decode, and who reads its answer."""

    path: str
    body: dict[str, Any]
    reader: ChunkReader


class Engine(Tokenization):
    """One server. Subclasses know their dialect's paths, request fields and chunk shapes."""

    dialect: ClassVar[str]
    ids: ClassVar[bool] = True
    """Whether it takes token ids, and tells those that it decodes."""
    renders: ClassVar[bool] = True
    """Whether it renders and tokenizes prompts."""
    form_prefills: ClassVar[frozenset[Prefill]] = frozenset(Prefill)
    """Those of them that go together with tools and structured output."""
    tools: ClassVar[bool] = True
    """Whether anything tells that its chat endpoint takes an unfinished message with tools."""
    prefill_given = False
    """Whether the settings say how a message is gone on with: not for us to question."""
    prefills: tuple[Prefill, ...] = ()
    """How its chat endpoint may be told to go on from an unfinished message, the best first."""
    ignores: ClassVar[frozenset[str]] = frozenset()
    """Request fields that it does not know, or that must not be sent."""
    max_logprobs: int | None = None
    """Most alternatives a token that it tells; None where there is no limit."""

    def __init__(self, upstream: Upstream, continuation: Continuation = "completions") -> None:
        super().__init__()
        self.upstream = upstream
        self.continuation = continuation
        self._going_on: dict[tuple[str, Thinking, bool], Prefill | None] = {}
        self._parsers: dict[str, Parser] = {}

    @property
    def url(self) -> str:
        return self.upstream.url

    @abstractmethod
    async def identify(self) -> Identity:
        """Asks the server what it is and serves."""

    async def probe(self, identity: Identity) -> EngineInfo:
        """What the server can do, beyond what it says of itself."""
        model = identity.models[0] if identity.models else None
        return EngineInfo(
            dialect=self.dialect,
            version=identity.version,
            models=identity.models,
            context=identity.context,
            vocabulary=await self.vocabulary(model) if model else None,
            ids=self.ids and self.continuation == "completions",
            max_logprobs=self.max_logprobs,
            bos=await self._rendered_bos(model) if model else None,
            continuation=self.continuation,
        )

    async def _rendered_bos(self, model: str) -> int | None:
        """How many BOS a rendered prompt has; None where the engine renders none."""
        try:
            prompt = await self.render(model, {"messages": [GREETING]})
            begin = await self.begin(model)
        except UnreachableError:
            raise
        except GatewayError:
            return None
        if not begin or prompt.ids is None:
            return 0
        return prompt.ids.count(begin[-1])

    @property
    def counts(self) -> str:
        """How its tokens are counted, for /readyz."""
        return "exact"

    def wire_model(self, model: str) -> str:
        """The model's name as this server wants it in a request."""
        return model

    # ---- decoding -------------------------------------------------------------------------------

    async def decode(
        self, model: str, prompt: Prompt, request: DecodeRequest, sampling: Sampling
    ) -> AsyncGenerator[Event]:
        """One upstream generation: its events, ending in DecodeFinished.

        Closing the iterator early closes the connection, which aborts the generation upstream.
        Raises RequestError or UpstreamError where the engine refuses, breaks or can't be reached.
        """
        tells = sampling.tells
        while True:
            call = await self._call(model, prompt, request, sampling)
            try:
                async with self._asked(call, sampling.headers) as asked:
                    if tells:
                        yield ASKED
                        tells = False
                    response = await self._answer(asked)
                    async with aclosing(events_of(response.read, call.reader, self.url)) as events:
                        async for event in events:
                            yield event
                return
            except RequestError as error:
                if not self._once_more(error, call, sampling):
                    raise

    def _once_more(self, error: RequestError, call: Call, sampling: Sampling) -> bool:
        """Whether the refused call may do when it is made anew."""
        return self._lower_logprobs(error, sampling)

    def _lower_logprobs(self, error: RequestError, sampling: Sampling) -> bool:
        """Whether fewer alternatives may do: the server said how many it tells at most."""
        told = _LOGPROB_LIMIT.search(error.message)
        if told is None or int(told.group(1)) >= self._logprobs(sampling):
            return False
        self.max_logprobs = int(told.group(1))
        log.warning("fewer logprobs than asked for", engine=self.url, limit=self.max_logprobs)
        return True

    @asynccontextmanager
    async def _asked(self, call: Call, headers: Mapping[str, str]) -> AsyncGenerator[Asked]:
        body = {key: value for key, value in call.body.items() if value is not None}
        begun = True
        try:
            content = encoded(body)
            async with self.upstream.asked("POST", call.path, content, headers) as asked:
                yield asked
        except (RequestError, UnreachableError):
            begun = False
            raise
        finally:
            if begun and call.reader.finish is None:
                self.abandon(call.body)

    async def _answer(self, asked: Asked) -> Response:
        response = await self.upstream.answer(asked)
        await raise_for_error(response, self.url)
        return response

    def abandon(self, body: Mapping[str, Any]) -> None:
        """A request is left before its end, and its connection closed: what else there is to do."""

    async def _call(
        self, model: str, prompt: Prompt, request: DecodeRequest, sampling: Sampling
    ) -> Call:
        """The request for one decode."""
        if prompt.chat is not None:
            return await self._chat_call(model, prompt.chat, request, sampling)
        body = {
            "model": self.wire_model(model),
            "prompt": await self._prompt(model, prompt, request.prefix),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields(request, sampling),
        }
        return Call("/v1/completions", body, self._reader(sampling))

    async def _prompt(self, model: str, prompt: Prompt, prefix: tuple[int, ...] | str) -> Any:
        """The `prompt` field: the rendered prompt with the prefix after it."""
        if isinstance(prefix, str):
            return await self.text(model, prompt) + prefix
        assert prompt.ids is not None, "ids go on from ids"
        return [*prompt.ids, *prefix]

    @abstractmethod
    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        """Request fields of this dialect's completions endpoint."""

    @abstractmethod
    def _reader(self, sampling: Sampling) -> ChunkReader:
        """A fresh reader for one decode's chunks."""

    def _logprobs(self, sampling: Sampling) -> int:
        """Alternatives to ask for: what is wanted, within the engine's limit."""
        wanted = sampling.logprobs or 0
        return wanted if self.max_logprobs is None else min(wanted, self.max_logprobs)

    def _seed(self, seed: int | None) -> int | None:
        """A seed that the engine takes."""
        return seed

    def ignored(self, fields: Mapping[str, Any]) -> list[str]:
        """Which of these request fields would have no effect."""
        return sorted(fields.keys() & self.ignores)

    def _known(self, sampling: Sampling) -> dict[str, Any]:
        return {k: v for k, v in sampling.fields.items() if k not in self.ignores}

    # ---- the chat endpoint ----------------------------------------------------------------------

    async def _chat_call(
        self, model: str, chat: Chat, request: DecodeRequest, sampling: Sampling
    ) -> Call:
        prefix = request.prefix
        assert isinstance(prefix, str) or not prefix, "a chat goes on from text"
        prefix = prefix or ""
        assert isinstance(prefix, str)
        body = {
            **chat_body(chat, prefix),
            **self._known(sampling),
            **self._chat_fields(),
            "model": self.wire_model(model),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.max_tokens,
            "seed": self._seed(request.seed),
        }
        if request.min_tokens and "min_tokens" not in self.ignores:
            body["min_tokens"] = request.min_tokens
        if sampling.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self._logprobs(sampling)}
        reader = ChatReader(chat, prefix, await self._parser(model, chat))
        return Call("/v1/chat/completions", body, reader)

    def _chat_fields(self) -> dict[str, Any]:
        """Request fields of this dialect's chat endpoint, for a decode."""
        return {}

    async def _parser(self, model: str, chat: Chat) -> Parser:
        """What is known of the server's parser of thoughts; its readers learn more."""
        return self._parsers.setdefault(model, Parser())

    async def chat(
        self, body: Mapping[str, Any], request: DecodeRequest, sampling: Sampling
    ) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a chat that the engine writes by itself, as they are.

        Closing the iterator early closes the connection, as with a decode. Raises as that does.
        """
        fields = {
            **body,
            **self._known(sampling),
            **self._rid(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.max_tokens,
            "min_tokens": None if "min_tokens" in self.ignores else request.min_tokens or None,
            "seed": self._seed(request.seed),
        }
        if sampling.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self._logprobs(sampling)}
        call = Call("/v1/chat/completions", fields, _Noting())
        async with (
            self._asked(call, sampling.headers) as asked,
            aclosing(chat_chunks(self.upstream, await self._answer(asked))) as chunks,
        ):
            async for chunk in chunks:
                call.reader.read(chunk)
                yield chunk

    def _rid(self) -> dict[str, Any]:
        """The field by which the engine is later told to abort a request, if it needs that."""
        return {}

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A client's request that this engine serves whole, as it wants it."""
        return {**body, "model": self.wire_model(str(body["model"]))}

    async def goes_on(self, model: str, thinking: Thinking, *, closed: bool) -> Prefill | None:
        """How the chat endpoint goes on exactly from a thought, open or closed; None: it doesn't.

        Shown by its template, which must render the unfinished message as the model wrote it.
        """
        if self.prefill_given:
            return self.prefills[0]
        key = (model, thinking, closed)
        if key not in self._going_on:
            tried = [p for p in self.prefills if await self._continues(model, thinking, closed, p)]
            self._going_on[key] = tried[0] if tried else None
        return self._going_on[key]

    async def _continues(self, model: str, thinking: Thinking, closed: bool, form: Prefill) -> bool:
        request = {"messages": [GREETING], "add_generation_prompt": True}
        try:
            plain = await self.text(model, await self.render(model, request))
            opened = opened_by(plain, thinking)
            prefix = _THOUGHT if opened else f"{thinking.open}\n{_THOUGHT}"
            if closed:
                prefix += f"\n{thinking.close}"
            body = chat_body(Chat(request, thinking, opened, form, form), prefix)
            rendered = await self.text(model, await self.render(model, body))
        except (UnreachableError, BusyError):
            raise
        except GatewayError as error:
            if error.status in _PASSING:
                raise
            return False  # the template refuses such a message
        # A template may write the blank lines after the thinking itself: parsers swallow them.
        beyond = rendered.removeprefix(plain + prefix)
        return beyond != rendered and (not beyond or (closed and not beyond.strip()))


def with_max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """A limit under its newer name put under the older one, which servers heed in any version."""
    newer = body.get("max_completion_tokens")
    if newer is None or body.get("max_tokens") is not None:
        return body
    rest = {key: value for key, value in body.items() if key != "max_completion_tokens"}
    return {**rest, "max_tokens": newer}


class _Noting(ChunkReader):
    """Notes how a chat ends, and leaves its chunks alone."""

    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        return []


def opened_by(rendered: str, thinking: Thinking) -> str:
    """What the template has written of the reply: its opening tag and the blanks around, or ""."""
    end = rendered.rstrip()
    return rendered[len(end) - len(thinking.open) :] if end.endswith(thinking.open) else ""
