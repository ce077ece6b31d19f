"""The dialect of llama.cpp's server, as b11549 was seen to speak it.

Sources: a running b11549 (chats, /apply-template and their errors with a plain template and with
Qwen3's); ggml-org/llama.cpp `common/chat-auto-parser-generator.cpp`, `common/chat.cpp`,
`tools/server/server-common.cpp`. Only the error about `enable_thinking` is of older builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gateway.fakes import templates
from tests.gateway.fakes.chat import CLOSE, CONTENT, OPEN, ChatReply, Parts, is_open
from tests.gateway.fakes.decode import Body, Reply, Token
from tests.gateway.fakes.engines import CHAT, FakeEngine
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.fakes.merging import merged

TWO_AT_THE_END = "Cannot have 2 or more assistant messages at the end of the list."
NOT_BOTH = "Cannot set both add_generation_prompt and continue_final_message to true."
NOT_THINKING = "Assistant response prefill is incompatible with enable_thinking."
_RENDERING = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


class FakeLlamaCpp(FakeEngine):
    """Tokens that end inside a character have no chunk; the last chunk has the usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.prefill_assistant = True
        """Not started with `--no-prefill-assistant`."""
        self.refuses_prefill = False
        """An older build: no prefill but with `enable_thinking: false`."""

    def listing(self) -> dict[str, Any]:
        return {"id": self.model, "aliases": [self.model], "owned_by": "llamacpp", "meta": {}}

    async def other(self, request: Request, connection: Connection) -> None:
        match request.path:
            case "/props":
                settings = {"n_ctx": self.context}
                connection.json({"default_generation_settings": settings, "build_info": "b11549"})
            case "/apply-template":
                connection.json({"prompt": self._rendered(request.body)})
            case "/tokenize":
                body = request.body
                special = body.get("add_special", False)
                tokens = self.tokenizer.encode(body["content"], special=special)
                connection.json({"tokens": tokens})
            case "/detokenize":
                connection.json({"content": self.tokenizer.decode(request.body["tokens"])})
            case _:
                connection.json({"error": {"code": 404, "message": "File Not Found"}}, 404)

    def refusal(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> Any:
        return super().refusal(message, status, kind)

    def ids_of(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=True)
        ids = []
        for part in prompt:
            ids += self.tokenizer.encode(part) if isinstance(part, str) else [part]
        return ids

    def prompt_of(self, request: Request) -> list[int]:
        if request.path != CHAT:
            return self.ids_of(request.body["prompt"])
        return self.tokenizer.encode(self._rendered(request.body))

    def reply(self, request: Request) -> Reply:
        kind = LlamaCppChat if request.path == CHAT else LlamaCppCompletion
        return kind(self, request.body, self.prompt_of(request))

    # ---- the template ---------------------------------------------------------------------------

    def _rendered(self, body: Body) -> str:
        return self.rendered(**{name: body[name] for name in _RENDERING if name in body})

    def rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        mode = options.pop("continue_final_message", False)
        if mode and options.get("add_generation_prompt", True):
            raise self.refusal(NOT_BOTH)
        roles = [message["role"] for message in messages]
        if not mode and not (self.prefill_assistant and roles[-1] == "assistant"):
            return super().rendered(messages, **options)
        if roles[-2:] == ["assistant"] * 2:
            raise self.refusal(TWO_AT_THE_END)
        thinks = (options.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        if self.refuses_prefill and thinks:
            raise self.refusal(NOT_THINKING)
        before = templates.turns(messages[:-1], self.template, options.get("tools"))
        head = templates.header(self.opens, options)
        return self.system + before + self._prefilled(head, messages[-1], mode)

    def _prefilled(self, head: str, message: dict[str, Any], mode: Any) -> str:
        """The last message, whatever its role, as the beginning of the assistant's turn."""
        content, thought = templates.content_of(message), message.get("reasoning_content") or ""
        in_thought = mode == "reasoning_content" or (mode != "content" and thought and not content)
        if self.tags:
            opens, closes = self.tags
            head = head.partition(opens)[0] + opens + thought + ("" if in_thought else closes)
        return head if in_thought else head + content

    @property
    def tags(self) -> tuple[str, str] | None:
        """The reasoning tags that the server reads from the template, blanks included."""
        qwen = ("<think>\n", "\n</think>\n\n") if self.template == "qwen3" else None
        return self.think_tags or qwen


class LlamaCppCompletion(Reply):
    done_after_error = False

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        for token in tokens:
            if token.text:
                entries = {"content": [_entry(token)]} if self.body.get("logprobs") else None
                yield self._chunk(token.text, entries, None)
        if reason:
            yield self._chunk("", None, reason, usage=self.usage())

    def _chunk(self, text: str, logprobs: Any, reason: str | None, **more: Any) -> Body:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {"object": "text_completion", "choices": [choice], **_timings(self), **more}


class LlamaCppChat(ChatReply):
    """The role's chunk comes with the first token; the blanks beside the tags are lost."""

    done_after_error = False

    def __init__(self, engine: FakeLlamaCpp, body: Body, prompt: list[int]) -> None:
        super().__init__(engine, body, prompt)
        self._begun = False
        self._blank = False
        begun = engine.tokenizer.decode(prompt)
        self._prefill = begun.rpartition("assistant\n")[2]
        if engine.tags and body.get("reasoning_format") != "none":
            self.parts = Parts(is_open(begun), "reasoning_content")

    def first(self) -> Iterator[Body]:
        yield from ()

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        for token in tokens:
            yield from self._of_token(token)
        if reason:
            usage = {} if self.wants_usage else _timings(self)
            choice = {"index": 0, "delta": {}, "finish_reason": self.finish(reason)}
            yield self.of([choice], **usage)

    def _of_token(self, token: Token) -> Iterator[Body]:
        if not self._begun:
            self._begun = True
            tagged = self.parts is not None and token.text == OPEN
            more = self._logprobs(token) if tagged else {}
            choice = {"index": 0, "delta": {"role": "assistant", "content": None}}
            yield self.of([{**choice, "finish_reason": None, **more}])
        [(field, _)] = self.sorted([token])
        if self.parts and token.text in (OPEN, CLOSE):
            self._blank = True
        elif self._blank and token.text.isspace():
            return
        elif field and token.text:
            self._blank = False
            choice = {"index": 0, "delta": {field: token.text}, "finish_reason": None}
            yield self.of([{**choice, **self._logprobs(token)}])

    def _logprobs(self, token: Token) -> Body:
        return {"logprobs": {"content": [_entry(token)]}} if self.body.get("logprobs") else {}

    def last(self) -> Iterator[Body]:
        if self.wants_usage:
            yield self.of([], usage=self.usage(), **_timings(self))

    def whole(self, chunks: list[Body]) -> Body:
        """Unlike the stream it repeats the prefill."""
        answer = merged(chunks)
        message = answer["choices"][0]["message"]
        if self.body["messages"][-1]["role"] == "assistant":
            text = templates.content_of(self.body["messages"][-1])
            message[CONTENT] = text + (message[CONTENT] or "")
        return {**answer, "usage": self.usage(), **_timings(self)}


def _timings(reply: Reply) -> Body:
    return {"timings": {"predicted_n": reply.made, "cache_n": 0}}


def _entry(token: Token) -> Body:
    one = {
        "id": token.id,
        "token": token.text,
        "bytes": list(token.text.encode()),
        "logprob": -0.25,
    }
    return {**one, "top_logprobs": [one]}
