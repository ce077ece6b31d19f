"""The dialects of vLLM 0.32 and llama.cpp b11549, as far as the gateway speaks them."""

from __future__ import annotations

import asyncio
import codecs
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.gateway.fakes.http import Connection, FakeServer, Request
from tests.gateway.fakes.script import Error, Fin, Gate, Raw, Reset, Script, writes
from tests.gateway.fakes.tokens import Tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_OK = writes("ok")


@dataclass(frozen=True)
class Token:
    """One decoded token; `text` is "" while a character is incomplete, and for the end of turn."""

    id: int
    text: str
    shown: str


class FakeEngine(FakeServer):
    """Decodes by script. Public attributes may be changed at any time."""

    owner: str
    paths: tuple[str, ...]

    def __init__(
        self,
        script: Script = _OK,
        *,
        model: str = "model",
        tokenizer: Tokenizer | None = None,
        context: int = 4096,
        system: str = "",
        opens: str = "",
    ) -> None:
        super().__init__()
        self.script = script
        self.model = model
        self.tokenizer = tokenizer or Tokenizer()
        self.context = context
        self.system = system
        """What this model's template writes first."""
        self.opens = opens
        """What it writes after the assistant's header."""
        self.refusals: dict[str, tuple[int, bytes]] = {}
        """By path: an HTTP error instead of an answer."""
        self.gates: dict[str, Gate] = {}
        """By path: answers wait for it."""
        self.whole_reply = b'{"id": "whole",  "choices": []}'
        self.dies_on_reuse: Literal["close", "reset", None] = None
        self.dies_always = False
        self.tokens_per_chunk = 1
        self.line_end = b"\n"
        self.comments = False
        self.in_one_write = False

    # ---- what the tests ask ---------------------------------------------------------------------

    @property
    def decodes(self) -> list[Request]:
        return self.asked(COMPLETIONS)

    async def decode(self, number: int = 0) -> Request:
        return await self.request(COMPLETIONS, number)

    def prompts(self) -> list[str]:
        """The texts that decodes were sent: ids, text or a mix."""
        return [self.text_of(request.body["prompt"]) for request in self.decodes]

    def text_of(self, prompt: Any) -> str:
        return self.tokenizer.decode(self.ids_of(prompt))

    def ids_of(self, prompt: Any) -> list[int]:
        raise NotImplementedError

    def rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The chat template: ChatML."""
        turns = "".join(f"<|im_start|>{m['role']}\n{_content(m)}<|im_end|>\n" for m in messages)
        if not options.get("add_generation_prompt", True):
            return self.system + turns.removesuffix("<|im_end|>\n")
        opens = self.opens
        if (options.get("chat_template_kwargs") or {}).get("enable_thinking") is False:
            opens = "<think>\n\n</think>\n\n"
        return f"{self.system}{turns}<|im_start|>assistant\n{opens}"

    # ---- HTTP -----------------------------------------------------------------------------------

    async def refuses(self, connection: Connection) -> bool:
        if self.dies_always:
            connection.close()
            return True
        if self.dies_on_reuse is None or connection.requests < 2:
            return False
        if self.dies_on_reuse == "reset":
            connection.reset()
        else:
            connection.close()
        return True

    async def answer(self, request: Request, connection: Connection) -> None:
        if gate := self.gates.get(request.path):
            await _wait(gate)
        if refusal := self.refusals.get(request.path):
            status, body = refusal
            connection.whole(body, status)
        elif request.path == "/v1/models":
            connection.json({"object": "list", "data": [self.listing()]})
        elif request.path == CHAT or self.takes_whole(request):
            connection.whole(self.whole_reply, **{"x-engine": "fake"})
        elif request.path == COMPLETIONS:
            await self._decode(request, connection)
        else:
            await self.other(request, connection)

    def takes_whole(self, request: Request) -> bool:
        """A completion that the gateway passed through."""
        return request.path == COMPLETIONS and not request.body.get("stream")

    @abstractmethod
    def listing(self) -> dict[str, Any]: ...

    @abstractmethod
    async def other(self, request: Request, connection: Connection) -> None: ...

    # ---- decoding -------------------------------------------------------------------------------

    async def _decode(self, request: Request, connection: Connection) -> None:
        body = request.body
        prompt = self.ids_of(body["prompt"])
        room = self.context - len(prompt)
        try:
            acts = list(self.script(self.tokenizer.decode(prompt)))
        except AssertionError as error:
            connection.json({"error": {"message": str(error), "code": 500}}, 500)
            return
        limit = min(body.get("max_tokens", 16), room)
        stream = _Stream(self, connection)
        try:
            async for chunk in self._chunks(acts, limit, stream, body):
                stream.event(json.dumps(chunk, ensure_ascii=False).encode())
        except _Ended:
            return
        stream.event(b"[DONE]")
        stream.flush()
        connection.end()

    async def _chunks(
        self, acts: list[Any], limit: int, stream: _Stream, body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        waiting: list[Token] = []
        made = 0
        for act in [*acts, self.tokenizer.piece(self.tokenizer.eos)]:
            if not isinstance(act, str | bytes):
                for chunk in self.chunks(waiting, None, made, body):
                    yield chunk
                waiting = []
                await stream.act(act)
                continue
            token = self.tokenizer.id_of(act)
            text = self.tokenizer.piece(token)
            ends = token == self.tokenizer.eos
            shown = "" if ends else decoder.decode(text)
            waiting.append(Token(token, shown, "<|im_end|>" if ends else shown))
            made += 1
            reason = "stop" if ends else "length" if made >= limit else None
            if len(waiting) >= self.tokens_per_chunk or reason:
                for chunk in self.chunks(waiting, reason, made, body):
                    yield chunk
                waiting = []
            if reason:
                break
        for chunk in self.last(made, body):
            yield chunk

    @abstractmethod
    def chunks(
        self, tokens: list[Token], reason: str | None, made: int, body: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """The chunks of some tokens; with a reason they are the last."""

    def last(self, made: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from ()


class _Ended(Exception):
    """The script ended the reply its own way."""


class _Stream:
    """The events of one reply on the wire."""

    def __init__(self, engine: FakeEngine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._begun = False
        self._held = b""

    def event(self, data: bytes) -> None:
        end = self._engine.line_end
        comment = b": keep-alive" + end + b":" + end + end if self._engine.comments else b""
        self._write(comment + b"data: " + data + end + end)

    def _write(self, data: bytes) -> None:
        if not self._begun:
            self._connection.begin()
            self._begun = True
        self._held += data
        if not self._engine.in_one_write:
            self.flush()

    def flush(self) -> None:
        self._connection.send(self._held)
        self._held = b""

    async def act(self, act: Reset | Fin | Error | Raw | Gate) -> None:
        match act:
            case Gate():
                self.flush()
                await _wait(act)
                return
            case Raw(data):
                self._write(data)
                return
            case Error(message):
                self.event(json.dumps({"error": {"message": message, "code": 429}}).encode())
                self.event(b"[DONE]")
                self.flush()
                self._connection.end()
            case Fin():
                self._write(b"")
                self.flush()
                self._connection.end()
            case Reset():
                self._write(b"")
                self.flush()
                # What was sent must be read before the reset throws it away.
                await asyncio.sleep(0.05)
                self._connection.reset()
        raise _Ended


async def _wait(gate: Gate) -> None:
    gate.reached.set()
    await gate.opened.wait()


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class FakeVllm(FakeEngine):
    def listing(self) -> dict[str, Any]:
        return {"id": self.model, "owned_by": "vllm", "max_model_len": self.context}

    async def other(self, request: Request, connection: Connection) -> None:
        match request.path:
            case "/version":
                connection.json({"version": "0.32.0"})
            case "/tokenize":
                tokens = self._tokenized(**request.body)
                connection.json({"count": len(tokens), "tokens": tokens})
            case "/detokenize":
                connection.json({"prompt": self.tokenizer.decode(request.body["tokens"])})
            case _:
                connection.json({"detail": "Not Found"}, 404)

    def _tokenized(
        self, *, prompt: str | None = None, add_special_tokens: bool = True, **body: Any
    ) -> list[int]:
        if prompt is not None:
            return self.tokenizer.encode(prompt, special=add_special_tokens)
        return self.tokenizer.encode(self.rendered(**body))

    def ids_of(self, prompt: Any) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def chunks(
        self, tokens: list[Token], reason: str | None, made: int, body: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if tokens:
            choice = {
                "index": 0,
                "text": "".join(token.text for token in tokens),
                "logprobs": self._logprobs(tokens, body.get("logprobs")),
                "finish_reason": reason,
                "stop_reason": None,
                "token_ids": [t.id for t in tokens] if body.get("return_token_ids") else None,
            }
            yield {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None}

    def _logprobs(self, tokens: list[Token], top: int | None) -> dict[str, Any] | None:
        if top is None:
            return None
        others = {f"other{rank}": -2.0 - rank for rank in range(max(0, top - 1))}
        return {
            "text_offset": [0] * len(tokens),
            "tokens": [token.shown for token in tokens],
            "token_logprobs": [-0.25] * len(tokens),
            "top_logprobs": [{token.shown: -0.25, **others} for token in tokens],
        }

    def last(self, made: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 1, "completion_tokens": made, "total_tokens": made + 1}
            yield {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": usage}


class FakeLlamaCpp(FakeEngine):
    """Tokens that end inside a character have no chunk; the last chunk has the usage."""

    def listing(self) -> dict[str, Any]:
        return {"id": self.model, "aliases": [self.model], "owned_by": "llamacpp", "meta": {}}

    async def other(self, request: Request, connection: Connection) -> None:
        match request.path:
            case "/props":
                settings = {"n_ctx": self.context}
                connection.json({"default_generation_settings": settings, "build_info": "b11549"})
            case "/apply-template":
                connection.json({"prompt": self.rendered(**request.body)})
            case "/tokenize":
                body = request.body
                special = body.get("add_special", False)
                tokens = self.tokenizer.encode(body["content"], special=special)
                connection.json({"tokens": tokens})
            case "/detokenize":
                connection.json({"content": self.tokenizer.decode(request.body["tokens"])})
            case _:
                connection.json({"error": {"code": 404, "message": "File Not Found"}}, 404)

    def ids_of(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=True)
        ids = []
        for part in prompt:
            ids += self.tokenizer.encode(part) if isinstance(part, str) else [part]
        return ids

    def chunks(
        self, tokens: list[Token], reason: str | None, made: int, body: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        for token in tokens:
            if token.text:
                entries = {"content": [_entry(token)]} if body.get("logprobs") else None
                yield self._chunk(token.text, entries, None, made)
        if reason:
            usage = {"prompt_tokens": 1, "completion_tokens": made, "total_tokens": made + 1}
            yield self._chunk("", None, reason, made, usage=usage)

    def _chunk(
        self, text: str, logprobs: Any, reason: str | None, made: int, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        timings = {"predicted_n": made, "cache_n": 0}
        return {"object": "text_completion", "choices": [choice], "timings": timings, **more}


def _entry(token: Token) -> dict[str, Any]:
    one = {
        "id": token.id,
        "token": token.text,
        "bytes": list(token.text.encode()),
        "logprob": -0.25,
    }
    return {**one, "top_logprobs": [one]}
