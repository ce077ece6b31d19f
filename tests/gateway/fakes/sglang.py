"""SGLang's dialect, read from its source; 0.5.23 was never run here.

Sources, sgl-project/sglang `python/sglang/srt/`: `entrypoints/openai/protocol.py` and
`serving_completions.py` (commit 004c82e0), `serving_chat.py` (002897c2), `serving_base.py`
(c5695a4b), `serving_tokenize.py` (the version that takes messages), `utils.py`;
`managers/tokenizer_manager.py` and `managers/scheduler.py` for aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal
from uuid import uuid4

from tests.gateway.fakes import templates
from tests.gateway.fakes.chat import CLOSE, CONTENT, OPEN, ChatReply, Parts, entry
from tests.gateway.fakes.decode import Body, Refused, Reply, Sink, Token
from tests.gateway.fakes.engines import CHAT, FakeEngine
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.fakes.script import Act, Error

MAX_STOPS = 32
FULL = "The request queue is full."
EITHER = "Exactly one of 'prompt' or 'messages' must be provided."
How = Literal["end", "abort", "disconnect"]


class FakeSglang(FakeEngine):
    """Chats are always served. A decode outlives its client until it is aborted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chats = True
        self.disconnect_s = 2.0
        """How long a decode goes on when its client has closed the connection."""
        self.tokenize_takes_special = False
        """Older: /tokenize honours `add_special_tokens`; now its begin token is always added."""
        self.encodes_prefix_apart = True
        """A chat's prefix is encoded by itself; newer: with the rendered chat in one."""
        self.reasoning_parser = True
        self.force_reasoning = False
        """The parser is one for templates that open the thought themselves."""
        self.overloaded = False
        self.running: list[Reply] = []
        self.freed: dict[str, How] = {}
        """By request id, how a decode came to its end."""
        self.aborts: list[str] = []
        """The ids that aborts were asked for, known or not."""
        self.health_checks = 0
        """Each one generates a token, on a real server."""
        self._frees = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []

    async def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        await super().stop()

    async def freeing(self, rid: str, seconds: float = 5.0) -> How:
        """How the decode with this id ended, as soon as it has."""
        async with asyncio.timeout(seconds):
            while rid not in self.freed:
                self._frees.clear()
                await self._frees.wait()
        return self.freed[rid]

    # ---- HTTP -----------------------------------------------------------------------------------

    def listing(self) -> dict[str, Any]:
        one = {"id": self.model, "object": "model", "created": 1, "owned_by": "sglang"}
        return {**one, "root": self.model, "parent": None, "max_model_len": self.context}

    async def other(self, request: Request, connection: Connection) -> None:
        match request.path:
            case "/health" | "/health_generate":
                self.health_checks += 1
                connection.whole(b"")
            case "/ready":
                connection.whole(b"")
            case "/server_info" | "/get_server_info":
                connection.json({"version": "0.5.23", "max_total_num_tokens": 100_000})
            case "/model_info" | "/get_model_info":
                connection.json({"model_path": self.model, "is_generation": True})
            case "/tokenize" | "/v1/tokenize":
                connection.json(self._tokenized(request))
            case "/detokenize" | "/v1/detokenize":
                connection.json({"text": self._detokenized(request.body)})
            case "/abort_request":
                self._abort(**request.body)
                connection.whole(b"")
            case _:
                connection.json({"detail": "Not Found"}, 404)

    def refusal(self, message: str, status: int = 400, kind: str = "BadRequestError") -> Refused:
        head = {"object": "error", "message": message, "type": kind}
        return Refused({**head, "param": None, "code": status}, status)

    def _tokenized(self, request: Request) -> Body:
        body = request.body
        if ("messages" in body) == ("prompt" in body):
            raise self.refusal(EITHER, kind="BadRequest")
        prompts = body.get("prompt")
        several = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str)
        lists = [self._ids(body, p) for p in (prompts if several else [prompts])]
        tokens: Any = lists if several else lists[0]
        count: Any = [len(ids) for ids in lists] if several else len(lists[0])
        return {"tokens": tokens, "count": count, "max_model_len": self.context}

    def _ids(self, body: Body, prompt: Any) -> list[int]:
        if "messages" in body:
            return self._chat_ids(body)
        if not prompt:
            raise self.refusal("Prompt cannot be empty")
        if isinstance(prompt, list):
            return prompt
        adds = not self.tokenize_takes_special or body.get("add_special_tokens", True)
        return self.tokenizer.encode(prompt, special=adds)

    def _detokenized(self, body: Body) -> str:
        ids = body["tokens"]
        if body.get("skip_special_tokens", True):
            ids = [i for i in ids if i not in (self.tokenizer.bos, self.tokenizer.eos)]
        return self.tokenizer.decode(ids)

    # ---- aborts ---------------------------------------------------------------------------------

    def _abort(self, rid: str = "", abort_all: bool = False, **_: Any) -> None:
        """An id must be known; then all that begin with it end, as the scheduler matches."""
        self.aborts.append(rid)
        if not abort_all and rid not in [_rid(reply) for reply in self.running]:
            return
        for reply in [r for r in self.running if abort_all or _rid(r).startswith(rid)]:
            reply.aborted.set()
            self._free(reply, "abort")

    def _free(self, reply: Reply, how: How) -> None:
        if reply in self.running:
            self.running.remove(reply)
            self.freed[_rid(reply)] = how
            self._frees.set()

    async def run(self, reply: Reply, acts: list[Act], sink: Sink) -> None:
        self.running.append(reply)
        missing = (reply.body.get("min_tokens") or 0) - sum(isinstance(a, str) for a in acts)
        try:
            await super().run(reply, [*acts, *[" more"] * missing], sink)
        except asyncio.CancelledError:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self.disconnect_s, self._free, reply, "disconnect")
            self._timers.append(timer)
            raise
        self._free(reply, "end")

    # ---- decoding -------------------------------------------------------------------------------

    def prompt_of(self, request: Request) -> list[int]:
        body = request.body
        if request.path == CHAT:
            return self._chat_ids(body)
        prompt = body["prompt"]
        if not prompt:
            raise self.refusal("Prompt cannot be empty")
        return self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt

    def _chat_ids(self, body: Body) -> list[int]:
        if body.get("input_ids") is not None:
            return list(body["input_ids"])
        if not body["messages"]:
            raise self.refusal("Messages cannot be empty.")
        text, prefix = self._rendered(body)
        if self.encodes_prefix_apart:
            return self.tokenizer.encode(text) + self.tokenizer.encode(prefix)
        return self.tokenizer.encode(text + prefix)

    def _rendered(self, body: Body) -> tuple[str, str]:
        """The chat up to the assistant's header, and the prefix that goes on from there."""
        *before, last = body["messages"]
        prefix, content = "", last.get("content")
        if last["role"] == "assistant" and isinstance(content, str):
            if body.get("continue_final_message"):
                prefix, last = content, None
            else:
                last = {"role": "user", "content": content}
        messages = [*before, *([last] if last else [])]
        kwargs = {"chat_template_kwargs": body.get("chat_template_kwargs")}
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        return self.rendered(messages, tools=tools, **kwargs), prefix

    def reply(self, request: Request) -> Reply:
        body = request.body
        self._validate(body)
        kind = SglangChat if request.path == CHAT else SglangCompletion
        reply = kind(self, body, self.prompt_of(request))
        asked, most = len(reply.prompt), self.context
        if asked >= most:
            raise self.refusal(
                f"The input ({asked} tokens) is longer than the model's context length"
                f" ({most} tokens)."
            )
        if kind is SglangCompletion and asked + reply.asked_for() > most:
            raise self.refusal(
                f"Requested token count exceeds the model's maximum context length of {most} tokens"
            )
        if _rid(reply) in [_rid(other) for other in self.running]:
            raise self.refusal(f"Duplicate request ID detected: {_rid(reply)}")
        return reply

    def _validate(self, body: Body) -> None:
        stops = body.get("stop") or []
        if isinstance(stops, list) and len(stops) > MAX_STOPS:
            raise self.refusal(f"stop must have at most {MAX_STOPS} items, got {len(stops)}")
        if (most := body.get("max_tokens")) is not None and most <= 0:
            raise self.refusal("max_tokens must be positive")

    async def _decode(self, request: Request, connection: Connection) -> None:
        if not self.overloaded:
            await super()._decode(request, connection)
        elif self.streams(request):
            error = {"object": "error", "message": FULL, "type": "SERVICE_UNAVAILABLE"}
            connection.begin()
            event = Refused({"error": {**error, "param": None, "code": 503}})
            connection.send(b"data: " + event.json + b"\n\ndata: [DONE]\n\n")
            connection.end()
        else:
            raise self.refusal(FULL, 503, "SERVICE_UNAVAILABLE")


def _rid(reply: Reply) -> str:
    return str(reply.body["rid"])


class _SglangReply(Reply):
    """Stop strings end a reply, and are cut from the text of the last chunk only."""

    def __init__(self, engine: FakeEngine, body: Body, prompt: list[int]) -> None:
        named = {"rid": uuid4().hex, **{k: v for k, v in body.items() if v is not None}}
        super().__init__(engine, named, prompt)
        stops = named.get("stop") or []
        self.stops = [stops] if isinstance(stops, str) else list(stops)
        self.matched: int | str | None = None
        self._tail = ""

    def reason(self, token: Token) -> str | None:
        self._tail = (self._tail + token.text)[-1000:]
        self.matched = next((s for s in self.stops if s in self._tail), None)
        reason = "stop" if self.matched is not None else super().reason(token)
        if reason == "stop" and self.matched is None:
            self.matched = token.id
        return reason

    def shown(self, tokens: list[Token]) -> str:
        text = "".join(token.text for token in tokens)
        if isinstance(self.matched, str) and not self.body.get("no_stop_trim"):
            beyond = len(self._tail) - self._tail.index(self.matched)
            return text[: max(0, len(text) - beyond)]
        return text

    def error(self, error: Error) -> Body:
        one = {"object": "error", "message": error.message, "type": "BadRequestError"}
        return {"error": {**one, "param": None, "code": error.code}}


class SglangCompletion(_SglangReply):
    _began = False

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        ids: Body = {}
        if self.body.get("return_token_ids"):
            ids = {"token_ids": [token.id for token in tokens]}
            ids |= {} if self._began else {"prompt_token_ids": self.prompt}
        self._began = True
        choice = {"index": 0, "text": self.shown(tokens), "logprobs": self._logprobs(tokens)}
        matched = self.matched if reason == "stop" else None
        yield self._of([{**choice, "finish_reason": reason, "matched_stop": matched, **ids}])

    def _of(self, choices: list[Body], **more: Any) -> Body:
        head = {"id": _rid(self), "object": "text_completion", "created": 1}
        return {**head, "model": self.engine.model, "choices": choices, "usage": None, **more}

    def _logprobs(self, tokens: list[Token]) -> Body | None:
        """With 0 only the sampled tokens; the sampled one is in the top, or nowhere in it."""
        top = self.body.get("logprobs")
        if top is None or not tokens:
            return None
        others = {f"other{rank}": -2.0 - rank for rank in range(max(0, top - 1))}
        texts = [_text(self.engine, token) for token in tokens]
        return {
            "text_offset": [-1] * len(tokens),
            "token_logprobs": [-0.25] * len(tokens),
            "tokens": texts,
            "top_logprobs": [{text: -0.25, **others} for text in texts] if top else [],
        }

    def last(self) -> Iterator[Body]:
        if self.wants_usage:
            yield self._of([], usage=self.usage())


def _text(engine: FakeEngine, token: Token) -> str:
    """A token by itself: bytes of incomplete characters as latin-1."""
    piece = engine.tokenizer.piece(token.id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece.decode("latin-1")


class SglangChat(ChatReply, _SglangReply):
    """No ids; the reason has a chunk of its own. Only a prefix tells the parser of a thought."""

    def __init__(self, engine: FakeSglang, body: Body, prompt: list[int]) -> None:
        super().__init__(engine, body, prompt)
        if engine.reasoning_parser and body.get("separate_reasoning", True):
            last = body["messages"][-1] if body.get("continue_final_message") else {}
            prefix = templates.content_of(last) if last.get("role") == "assistant" else ""
            thinking = engine.force_reasoning or OPEN in prefix
            self.parts = Parts(
                thinking and CLOSE not in prefix, "reasoning_content", leaks_close=True
            )

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        for field, group in self.sorted(tokens):
            if field is not None and (text := self.shown(group)):
                yield self.chunk({field: text}, logprobs=self.logprobs(group))
        if reason:
            matched = self.matched if reason == "stop" else None
            yield self.chunk({}, self.finish(reason), matched_stop=matched)

    def chunk(self, delta: Body, reason: str | None = None, **more: Any) -> Body:
        none = dict.fromkeys(("role", CONTENT, "reasoning_content", "tool_calls"))
        return super().chunk({**none, **delta}, reason, **{"matched_stop": None, **more})

    def of(self, choices: list[Body], **more: Any) -> Body:
        return super().of(choices, **{"id": _rid(self), **more})

    def logprobs(self, tokens: list[Token]) -> Body | None:
        if not self.body.get("logprobs"):
            return None
        top = self.body.get("top_logprobs") or 0
        shown = [Token(t.id, t.text, _text(self.engine, t)) for t in tokens]
        return {"content": [entry(token, top) for token in shown]}
