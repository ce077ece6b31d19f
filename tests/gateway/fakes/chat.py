"""Chat replies: thoughts told from the answer, tool calls, log-probabilities in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from tests.gateway.fakes.decode import Body, Reply, Token
from tests.gateway.fakes.script import ASSISTANT, ToolCall

OPEN, CLOSE = "<think>", "</think>"
CONTENT = "content"


def written(prompt: str) -> str:
    """What the assistant's turn begins with."""
    return prompt.rpartition(ASSISTANT)[2]


def is_open(prompt: str) -> bool:
    """Whether the turn stands within a thought."""
    begun = written(prompt)
    return begun.rfind(OPEN) > begun.rfind(CLOSE)


class Parts:
    """Sorts tokens into thought and answer; the tags themselves belong to neither."""

    def __init__(self, thinking: bool, field: str, *, leaks_close: bool = False) -> None:
        self._thinking = thinking
        self._field = field
        self._leaks_close = leaks_close

    def of(self, tokens: list[Token]) -> list[tuple[str | None, list[Token]]]:
        """The tokens by field, in order; with None those that have no text to show."""
        sorted_ = [(self._one(token), token) for token in tokens]
        return [
            (field, [token for _, token in group])
            for field, group in groupby(sorted_, key=lambda pair: pair[0])
        ]

    def _one(self, token: Token) -> str | None:
        if token.text == OPEN:
            self._thinking = True
            return None
        if token.text == CLOSE and (self._thinking or not self._leaks_close):
            self._thinking = False
            return None
        return self._field if self._thinking else CONTENT


class ChatReply(Reply):
    """Chunks of `chat.completion.chunk`; subclasses say what an engine adds to them."""

    parts: Parts | None = None
    """None: all text is content, tags and all."""

    def asked_for(self) -> int:
        most = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        return int(most or self.engine.context)

    def first(self) -> Iterator[Body]:
        yield self.chunk({"role": "assistant", "content": ""})

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        for field, group in self.sorted(tokens):
            if field is not None:
                text = "".join(token.text for token in group)
                yield self.chunk({field: text}, logprobs=self.logprobs(group))
        if reason:
            yield self.chunk({}, self.finish(reason))

    def sorted(self, tokens: list[Token]) -> list[tuple[str | None, list[Token]]]:
        return self.parts.of(tokens) if self.parts else [(CONTENT, tokens)]

    def chunk(self, delta: Body, reason: str | None = None, **more: Any) -> Body:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return self.of([choice])

    def of(self, choices: list[Body], **more: Any) -> Body:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
        return {**head, "model": self.engine.model, "choices": choices, **more}

    def finish(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self.called else reason

    called = False

    def tool(self, call: ToolCall) -> Iterator[Body] | None:
        if not self.body.get("tools"):
            return None
        self.called = True
        return self._tool(call)

    def _tool(self, call: ToolCall) -> Iterator[Body]:
        for number, piece in enumerate(["", *call.arguments]):
            delta: Body = {} if call.index is None else {"index": call.index}
            if number == 0 or call.repeats_id:
                delta["id"] = call.id
            function = {"arguments": piece}
            if number == 0:
                delta["type"] = "function"
                function["name"] = call.name
            yield self.chunk({"tool_calls": [{**delta, "function": function}]})

    def logprobs(self, tokens: list[Token]) -> Body | None:
        if not self.body.get("logprobs"):
            return None
        top = self.body.get("top_logprobs") or 0
        return {"content": [entry(token, top) for token in tokens]}

    def last(self) -> Iterator[Body]:
        if self.wants_usage:
            yield self.of([], usage=self.usage())


def entry(token: Token, top: int) -> Body:
    """One token in OpenAI's shape: the sampled one is the first of the `top` likeliest."""
    others = [likely(f"other{rank}", -2.0 - rank) for rank in range(max(0, top - 1))]
    one = likely(token.shown, -0.25)
    return {**one, "top_logprobs": [one, *others] if top else []}


def likely(text: str, logprob: float) -> Body:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
