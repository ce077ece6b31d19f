"""Hosted chat APIs: no ids, no /tokenize, and each its own way to go on with a message.

Sources, documentation only, nothing was run: api-docs.deepseek.com (chat prefix completion,
thinking mode) and its mirror at share.apidog.com; docs.litellm.ai/docs/completion/prefix; Mistral's
OpenAPI document (AssistantMessage.prefix); openrouter.ai/docs/api-reference/streaming and
/docs/errors. The texts of DeepSeek's and Mistral's errors are from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from tests.gateway.fakes import templates
from tests.gateway.fakes.chat import CLOSE, CONTENT, OPEN, ChatReply, Parts, is_open, written
from tests.gateway.fakes.decode import Body, Refused, Reply, Token
from tests.gateway.fakes.engines import FakeEngine
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.fakes.script import Error

Style = Literal["openai", "deepseek", "mistral", "openrouter"]
Prefill = Literal["continues", "new_turn", "echoes"]
Reasoning = Literal["reasoning", "reasoning_content", "both", "inline"]

DEEPSEEK_LAST = (
    "The last message of deepseek-reasoner must be a user message, or an assistant message with "
    "prefix mode on (refer to https://api-docs.deepseek.com/guides/chat_prefix_completion)."
)
MISTRAL_LAST = (
    "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant"
)
_FIELDS: dict[Style, Reasoning] = {
    "openai": "reasoning_content",
    "deepseek": "reasoning_content",
    "mistral": "inline",
    "openrouter": "reasoning",
}


class FakeHosted(FakeEngine):
    """Serves chats, and completions of text where it has them, below any path."""

    def __init__(self, *args: Any, style: Style = "openai", **options: Any) -> None:
        super().__init__(*args, **options)
        self.chats = True
        self.style = style
        self.prefill: Prefill = "continues"
        """What a trailing message of the assistant does, where it is allowed at all."""
        self.completions = style in ("openai", "openrouter")
        """Whether there is /v1/completions."""
        self.reports_usage = True
        self.reasoning = _FIELDS[style]
        """The field of thoughts; "inline": in the content, tags and all."""
        self.refused_fields = frozenset({"logprobs"} if style == "mistral" else ())
        """Answered with 422 if they are not null."""
        self.comments = style == "openrouter"
        self.asides = {"The capital of Fran": capital}

    @property
    def beta_url(self) -> str:
        """DeepSeek's base URL for prefixes."""
        return self.url.removesuffix("/v1") + "/beta"

    # ---- HTTP -----------------------------------------------------------------------------------

    def is_decode(self, path: str) -> bool:
        return is_chat(path) or (self.completions and path.endswith("/completions"))

    def listing(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 1, "owned_by": self.style}

    async def other(self, request: Request, connection: Connection) -> None:
        if not request.path.endswith("/models"):
            raise self.refusal(f"Unknown request URL: {request.method} {request.path}", 404)
        connection.json({"object": "list", "data": [self.listing()]})

    def refusal(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> Any:
        if self.style == "mistral":
            error = {"object": "error", "message": message, "type": kind, "param": None}
            return Refused({**error, "code": "3230"}, status)
        if self.style == "openrouter":
            return Refused({"error": {"code": status, "message": message}}, status)
        return Refused(
            {"error": {"message": message, "type": kind, "param": None, "code": kind}}, status
        )

    def comment(self, end: bytes) -> bytes:
        if self.style == "openrouter":
            return b": OPENROUTER PROCESSING" + end + end
        return super().comment(end)

    # ---- decoding -------------------------------------------------------------------------------

    def prompt_of(self, request: Request) -> list[int]:
        if not is_chat(request.path):
            if not isinstance(request.body.get("prompt"), str):
                raise self.refusal("prompt: must be a string")
            return self.tokenizer.encode(request.body["prompt"], special=True)
        prefix = self.prefix_of(request)
        messages, options = request.body["messages"], {"tools": request.body.get("tools")}
        if prefix is None or self.prefill == "new_turn":
            return self.tokenizer.encode(self.rendered(messages, **options))
        before = self.rendered(messages[:-1], add_generation_prompt=False, **options)
        return self.tokenizer.encode(before + templates.header("", {}) + prefix)

    def prefix_of(self, request: Request) -> str | None:
        """What of the assistant's last message goes before the reply. Raises: Refused."""
        *before, last = request.body["messages"]
        if any(message.get("prefix") for message in before):
            raise self.refusal("Only the last message may have prefix mode on.")
        if last["role"] != "assistant":
            return None
        self._allow(last, request.path)
        thought, content = last.get("reasoning_content"), templates.content_of(last)
        if self.style != "deepseek" or not thought:
            return content
        return OPEN + thought + (CLOSE + content if content else "")

    def _allow(self, last: Body, path: str) -> None:
        prefixed = last.get("prefix") is True
        if self.style == "deepseek":
            if not prefixed:
                raise self.refusal(DEEPSEEK_LAST)
            if not path.startswith("/beta/"):
                raise self.refusal("Prefix mode is a beta feature: use the base URL with /beta.")
        if self.style == "mistral" and not prefixed:
            raise self.refusal(MISTRAL_LAST, 400, "invalid_request_message_order")

    def reply(self, request: Request) -> Reply:
        for field in self.refused_fields:
            if request.body.get(field) is not None:
                what = {"type": "extra_forbidden", "loc": ["body", field]}
                told = {**what, "msg": "Extra inputs are not permitted"}
                raise Refused({"detail": [told]}, 422)
        prompt = self.prompt_of(request)
        if not is_chat(request.path):
            return HostedCompletion(self, request.body, prompt)
        return HostedChat(self, request.body, prompt, self.prefix_of(request) or "")


def capital(prompt: str) -> list[str]:
    """What any model does when asked to go on with a fact, and with anything else."""
    begun = written(prompt)
    if begun.endswith("The capital of Fran"):
        return ["ce", " is", " Paris", "."]
    if begun.endswith("The capital of France is"):
        return [" Paris", "."]
    return ["One", ",", " two", ",", " three", "."]


def is_chat(path: str) -> bool:
    return path.endswith("/chat/completions")


class _HostedReply(Reply):
    """Where the usage stands, and what an error within the stream is."""

    engine: FakeHosted
    done_after_error = False

    @property
    def wants_usage(self) -> bool:
        return self.engine.reports_usage and super().wants_usage

    @property
    def usage_rides(self) -> bool:
        """On the last chunk, whether it was asked for or not."""
        return self.engine.reports_usage and self.engine.style in ("deepseek", "mistral")

    def usage(self) -> Body:
        usage = super().usage()
        if self.engine.style != "deepseek":
            return usage
        asked = usage["prompt_tokens"]
        return {**usage, "prompt_cache_hit_tokens": 0, "prompt_cache_miss_tokens": asked}

    def error(self, error: Error) -> Body:
        one: Body = {"code": error.code, "message": error.message}
        if self.engine.style == "openrouter":
            choice = {"index": 0, "delta": {"content": ""}, "finish_reason": "error"}
            head = {"id": "gen-1", "object": "chat.completion.chunk", "created": 1}
            return {**head, "provider": "Fake", "error": one, "choices": [choice]}
        return {"error": {**one, "type": "server_error", "param": None}}

    def whole(self, chunks: list[Body]) -> Body:
        answer = super().whole(chunks)
        if not self.engine.reports_usage:
            del answer["usage"]
        return answer


class HostedCompletion(_HostedReply):
    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        text = "".join(token.text for token in tokens)
        choice = {"index": 0, "text": text, "logprobs": self._logprobs(tokens)}
        yield self._of([{**choice, "finish_reason": reason}])

    def _of(self, choices: list[Body], **more: Any) -> Body:
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1}
        return {**head, "model": self.engine.model, "choices": choices, **more}

    def _logprobs(self, tokens: list[Token]) -> Body | None:
        if self.body.get("logprobs") is None:
            return None
        return {
            "text_offset": [0] * len(tokens),
            "tokens": [token.shown for token in tokens],
            "token_logprobs": [-0.25] * len(tokens),
            "top_logprobs": [{token.shown: -0.25} for token in tokens],
        }

    def last(self) -> Iterator[Body]:
        if self.wants_usage:
            yield self._of([], usage=self.usage())


class HostedChat(ChatReply, _HostedReply):
    def __init__(self, engine: FakeHosted, body: Body, prompt: list[int], prefix: str) -> None:
        super().__init__(engine, body, prompt)
        echoes = engine.prefill == "echoes"
        self._echo = prefix if echoes else ""
        if engine.style == "openrouter":
            self.headers["x-generation-id"] = "gen-1"
        if engine.reasoning != "inline":
            thinking = is_open(engine.tokenizer.decode(prompt)) and not self._echo
            self.parts = Parts(thinking, "reasoning_content")

    def first(self) -> Iterator[Body]:
        yield from super().first()
        tokenizer = self.engine.tokenizer
        pieces = [(i, tokenizer.decode([i])) for i in tokenizer.encode(self._echo)]
        for field, group in self.sorted([Token(i, text, text) for i, text in pieces]):
            if field is not None:
                yield self.chunk(self._delta(field, "".join(token.text for token in group)))

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        for field, group in self.sorted(tokens):
            text = "".join(token.text for token in group)
            if field is not None and text:
                yield self.chunk(self._delta(field, text), logprobs=self.logprobs(group))
        if reason:
            choice = self.chunk({}, self.finish(reason))
            yield {**choice, "usage": self.usage()} if self.usage_rides else choice

    def _delta(self, field: str, text: str) -> Body:
        if field == CONTENT:
            return {CONTENT: text}
        kind = self.engine.reasoning
        names = ("reasoning", "reasoning_content") if kind == "both" else (kind,)
        return {CONTENT: None, **dict.fromkeys(names, text)}

    def last(self) -> Iterator[Body]:
        if self.wants_usage and not self.usage_rides:
            yield self.of([], usage=self.usage())
