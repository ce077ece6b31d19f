"""The dialect of text-generation-inference, read from its source; it was never run here.

Sources, huggingface/text-generation-inference `router/src/`: `server.rs` (commit 003eaec0),
`lib.rs` (the version with ChatTokenizeResponse), `validation.rs` (01067f8b), `infer/mod.rs`
(05816268), `infer/chat_template.rs`. The blank after `data:` is axum's since 0.7
(tokio-rs/axum#2149), which routers up to TGI 2.0 are older than. The shape of error events in
streams is that of the router's last versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gateway.fakes import templates
from tests.gateway.fakes.chat import ChatReply, entry
from tests.gateway.fakes.decode import Body, Refused, Reply, Token
from tests.gateway.fakes.engines import CHAT, COMPLETIONS, FakeEngine
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.fakes.script import Error
from tests.gateway.fakes.tokens import SPECIALS

GENERATE, GENERATE_STREAM = "/generate", "/generate_stream"
MAX_STOPS = 4
MAX_TOP = 5
_NATIVE = (GENERATE, GENERATE_STREAM)
_THOUGHT = ("<think>", "</think>")
_SPECIALS = frozenset(text.encode() for text in SPECIALS if text not in _THOUGHT)
_STATUS = {"validation": 422, "generation": 424, "overloaded": 429, "template_error": 422}


class FakeTgi(FakeEngine):
    """Text in, ids out: /generate_stream; `model` is what /v1/models says, requests say "tgi"."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chats = True
        self.nested_errors = True
        """Errors in streams are `{"error": {"message", "http_status_code"}}`; older: flat."""
        self.overloaded = False
        self.healthy = True
        self.sampling: list[Body] = []
        """What each decode really samples with."""

    # ---- HTTP -----------------------------------------------------------------------------------

    def is_decode(self, path: str) -> bool:
        return path in (*_NATIVE, COMPLETIONS, CHAT)

    def streams(self, request: Request) -> bool:
        return request.path == GENERATE_STREAM or (
            request.path != GENERATE and super().streams(request)
        )

    def listing(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": self.model}

    async def other(self, request: Request, connection: Connection) -> None:
        match request.path:
            case "/info":
                connection.json(self._info())
            case "/health" | "/ping" if self.healthy:
                connection.whole(b"")
            case "/health" | "/ping":
                connection.json({"error": "unhealthy", "error_type": "healthcheck"}, 503)
            case "/tokenize":
                text = request.body["inputs"]
                connection.json(self._simple(self.tokenizer.encode(text, special=True)))
            case "/chat_tokenize":
                text = self._templated(request.body)
                tokens = self._simple(self.tokenizer.encode(text))
                connection.json({"tokenize_response": tokens, "templated_text": text})
            case _:
                connection.whole(b"", 404)

    def _info(self) -> Body:
        return {
            "model_id": self.model,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": 128,
            "max_best_of": 2,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": self.context - 1,
            "max_total_tokens": self.context,
            "validation_workers": 2,
            "max_client_batch_size": 4,
            "router": "text-generation-router",
            "version": "3.3.7",
            "sha": None,
            "docker_label": None,
        }

    def _simple(self, ids: list[int]) -> list[Body]:
        """Tokens with their place in the text, where one that was added has none."""
        tokens, at = [], 0
        for number, token in enumerate(ids):
            added = number == 0 and token == self.tokenizer.bos
            text = "" if added else self.tokenizer.decode([token])
            tokens.append({"id": token, "text": text, "start": at, "stop": at + len(text)})
            at += len(text)
        return tokens

    # ---- errors ---------------------------------------------------------------------------------

    def refusal(self, message: str, status: int = 422, kind: str = "validation") -> Refused:
        if kind == "validation":
            message = f"Input validation error: {message}"
        return Refused({"error": message, "error_type": kind}, _STATUS.get(kind, status))

    def refuse(self, refused: Refused, request: Request, connection: Connection) -> None:
        """In streams any error is an event after a 200."""
        if not self.is_decode(request.path) or not self.streams(request):
            super().refuse(refused, request, connection)
            return
        event = Refused(self.error_event(refused.body["error"], refused.body["error_type"]))
        connection.begin()
        connection.send(self.data_field + event.json + b"\n\n")
        if request.path != GENERATE_STREAM:
            connection.send(self.data_field + b"[DONE]\n\n")
        connection.end()

    def error_event(self, message: str, kind: str) -> Body:
        if self.nested_errors:
            return {"error": {"message": message, "http_status_code": 422}}
        return {"error": message, "error_type": kind}

    # ---- decoding -------------------------------------------------------------------------------

    def prompt_of(self, request: Request) -> list[int]:
        body = request.body
        if request.path == CHAT:
            return self.tokenizer.encode(self._templated(body))
        text = body["inputs"] if request.path in _NATIVE else body["prompt"]
        if not isinstance(text, str):
            raise Refused({"error": "inputs: invalid type, expected a string"}, 422)
        return self.tokenizer.encode(text, special=True)

    def _templated(self, body: Body) -> str:
        """A last turn of the assistant is cut at its content, if the template kept that."""
        messages = body["messages"]
        text = self.rendered(messages, tools=body.get("tools"))
        if messages[-1]["role"] != "assistant":
            return text
        content = templates.content_of(messages[-1])
        at = text.rfind(content)
        return text if at < 0 else text[: at + len(content)].rstrip()

    def reply(self, request: Request) -> Reply:
        if self.overloaded:
            raise self.refusal("Model is overloaded", 429, "overloaded")
        body = request.body
        native = request.path in _NATIVE
        sampling = body.get("parameters") or {} if native else openai_sampling(body)
        self.sampling.append(sampling)
        self._deserialize(sampling)
        prompt = self.prompt_of(request)
        self._validate(sampling, prompt)
        if sampling.get("adapter_id"):
            why = f"Request failed during generation: no adapter {sampling['adapter_id']}"
            raise self.refusal(why, 424, "generation")
        kind = {CHAT: TgiChat, COMPLETIONS: TgiCompletion}.get(request.path, TgiGenerate)
        return kind(self, {**body, "parameters": sampling}, prompt)

    def _deserialize(self, sampling: Body) -> None:
        """Wrong types never reach the router: no event, even in streams. Raises: Malformed."""
        seed = sampling.get("seed")
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**64):
            raise Malformed(f"parameters.seed: invalid value: `{seed}`, expected u64")
        if not isinstance(sampling.get("stop") or [], list):
            raise Malformed("parameters.stop: invalid type, expected a sequence")

    async def _decode(self, request: Request, connection: Connection) -> None:
        try:
            await super()._decode(request, connection)
        except Malformed as malformed:
            connection.whole(str(malformed).encode(), 422, **{"content-type": "text/plain"})

    def _validate(self, sampling: Body, prompt: list[int]) -> None:
        for wrong, message in _wrongs(sampling):
            if wrong:
                raise self.refusal(message)
        if not prompt:
            raise self.refusal("`inputs` cannot be empty")
        most, asked = self.context, sampling.get("max_new_tokens") or 0
        if len(prompt) + asked > most:
            raise self.refusal(
                f"`inputs` tokens + `max_new_tokens` must be <= {most}. Given: {len(prompt)}"
                f" `inputs` tokens and {asked} `max_new_tokens`"
            )


class Malformed(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(f"Failed to deserialize the JSON body into the target type: {why}")


def openai_sampling(body: Body) -> Body:
    """The native parameters that an OpenAI request becomes."""
    named = ("max_tokens", "temperature", "top_p", "frequency_penalty", "seed", "stop")
    sampling = {name: body[name] for name in named if body.get(name) is not None}
    sampling["max_new_tokens"] = sampling.pop("max_tokens", 100)
    if sampling.get("temperature") == 0:
        del sampling["temperature"]
    if (presence := body.get("presence_penalty")) is not None:
        sampling["repetition_penalty"] = presence + 2.0
    if top := body.get("top_logprobs"):
        sampling["top_n_tokens"] = top
    if (model := body.get("model")) not in (None, "tgi"):
        sampling["adapter_id"] = model
    return sampling


def _wrongs(sampling: Body) -> Iterator[tuple[bool, str]]:
    """In the router's order."""
    given = {name: value for name, value in sampling.items() if value is not None}
    yield given.get("temperature", 1) <= 0, "`temperature` must be strictly positive"
    penalty = given.get("repetition_penalty", 1)
    yield penalty <= 0, "`repetition_penalty` must be strictly positive"
    penalty = given.get("frequency_penalty", 0)
    yield not -2 <= penalty <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"
    yield not 0 < given.get("top_p", 0.5) < 1, "`top_p` must be > 0.0 and < 1.0"
    yield given.get("top_k", 1) <= 0, "`top_k` must be strictly positive"
    yield given.get("max_new_tokens") == 0, "`max_new_tokens` must be strictly positive"
    stops = len(given.get("stop", []))
    told = f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {stops}"
    yield stops > MAX_STOPS, told
    top = given.get("top_n_tokens", 0)
    yield top > MAX_TOP, f"`top_n_tokens` must be >= 0 and <= {MAX_TOP}. Given: {top}"


class _TgiReply(Reply):
    """Stop texts end a reply where they end a token, and stay in it."""

    engine: FakeTgi

    def __init__(self, engine: FakeTgi, body: Body, prompt: list[int]) -> None:
        self.sampling: Body = body["parameters"]
        super().__init__(engine, body, prompt)
        self._texts: list[str] = []

    def asked_for(self) -> int:
        return int(self.sampling.get("max_new_tokens") or self.engine.context)

    def reason(self, token: Token) -> str | None:
        self._texts.append(token.text)
        tail = "".join(self._texts[-200:])
        if token.id == self.engine.tokenizer.eos:
            return "eos_token"
        if any(tail.endswith(stop) for stop in self.sampling.get("stop") or []):
            return "stop_sequence"
        return super().reason(token)

    def error(self, error: Error) -> Body:
        return self.engine.error_event(error.message, "generation")


class TgiGenerate(_TgiReply):
    """One event a token, always; the last has the text and, if asked for, the details."""

    done = None

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        before = self.made - len(tokens)
        for number, token in enumerate(tokens, 1):
            event: Body = {"index": before + number, "token": self._token(token)}
            if top := self.sampling.get("top_n_tokens"):
                event["top_tokens"] = self._top(token, top)
            ends = reason is not None and number == len(tokens)
            text = "".join(self._texts) if ends else None
            details = self._details(reason) if ends and self.sampling.get("details") else None
            yield {**event, "generated_text": text, "details": details}

    def _token(self, token: Token) -> Body:
        special = self.engine.tokenizer.piece(token.id) in _SPECIALS
        return {"id": token.id, "text": token.shown, "logprob": -0.25, "special": special}

    def _top(self, token: Token, top: int) -> list[Body]:
        others = [
            {"id": 900_000 + r, "text": f"other{r}", "logprob": -2.0 - r, "special": False}
            for r in range(top - 1)
        ]
        return [self._token(token), *others]

    def _details(self, reason: str | None) -> Body:
        made = {"finish_reason": reason, "generated_tokens": self.made}
        return {**made, "seed": self.sampling.get("seed"), "input_length": len(self.prompt)}

    def whole(self, chunks: list[Body]) -> Body:
        last = chunks[-1]
        details = last["details"]
        tokens = [chunk["token"] for chunk in chunks]
        more = {"details": {**details, "prefill": [], "tokens": tokens}} if details else {}
        return {"generated_text": last["generated_text"], **more}


class TgiCompletion(_TgiReply):
    """The end of turn is text here; the last chunk has the usage."""

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        for token in tokens:
            ends = reason is not None and token is tokens[-1]
            choice = {"index": 0, "text": token.shown, "logprobs": None}
            choice["finish_reason"] = reason if ends else ""
            more = {"usage": self.usage()} if ends else {}
            yield {"object": "text_completion", **_head(self), "choices": [choice], **more}

    def whole(self, chunks: list[Body]) -> Body:
        """Unlike the stream without the end of turn, and "stop" for it."""
        answer = super().whole(chunks)
        [choice] = answer["choices"]
        choice["text"] = "".join(self._texts)
        if choice["finish_reason"] == "eos_token":
            choice["finish_reason"] = "stop"
        return answer


class TgiChat(ChatReply, _TgiReply):
    """One chunk a token, no ids and no thoughts told apart."""

    def asked_for(self) -> int:
        return _TgiReply.asked_for(self)

    def first(self) -> Iterator[Body]:
        yield from ()

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        for token in tokens:
            ends = reason is not None and token is tokens[-1]
            delta = {"role": "assistant", "content": token.text}
            finish = self.finish(reason) if reason is not None and ends else None
            yield self.chunk(delta, finish, logprobs=self.logprobs([token]))

    def finish(self, reason: str) -> str:
        return "stop" if reason == "eos_token" else reason

    def logprobs(self, tokens: list[Token]) -> Body | None:
        if not self.body.get("logprobs"):
            return None
        entries = [entry(token, self.body.get("top_logprobs") or 0) for token in tokens]
        for one in [*entries, *(likely for e in entries for likely in e["top_logprobs"])]:
            del one["bytes"]
        return {"content": entries}

    def of(self, choices: list[Body], **more: Any) -> Body:
        return {**super().of(choices), "usage": None, **_head(self), **more}


def _head(reply: Reply) -> Body:
    model = {"id": "", "created": 1, "model": reply.engine.model}
    return {**model, "system_fingerprint": "3.3.7-native"}
