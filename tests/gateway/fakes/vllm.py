"""vLLM's dialect, as 0.32.0 was seen to speak it.

Sources: a running 0.32.0; vllm-project/vllm `vllm/entrypoints/openai/completion/protocol.py`,
`chat_completion/protocol.py`, `chat_completion/serving.py`, `serve/tokenize/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gateway.fakes.chat import CLOSE, CONTENT, OPEN, ChatReply, Parts, written
from tests.gateway.fakes.decode import Body, Reply, Token
from tests.gateway.fakes.engines import CHAT, FakeEngine
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.fakes.script import ToolCall

_RENDERING = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


class FakeVllm(FakeEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reasoning_parser = False
        """Started with `--reasoning-parser`, of the kind of qwen3 and deepseek_r1."""

    def listing(self) -> dict[str, Any]:
        return {"id": self.model, "owned_by": "vllm", "max_model_len": self.context}

    async def other(self, request: Request, connection: Connection) -> None:
        match request.path:
            case "/version":
                connection.json({"version": "0.32.0"})
            case "/tokenize":
                tokens = self._tokenized(request.body)
                length = {"count": len(tokens), "max_model_len": self.context}
                connection.json({**length, "tokens": tokens, "token_strs": None})
            case "/detokenize":
                connection.json({"prompt": self.tokenizer.decode(request.body["tokens"])})
            case _:
                connection.json({"detail": "Not Found"}, 404)

    def prompt_of(self, request: Request) -> list[int]:
        return self._tokenized(request.body)

    def _tokenized(self, body: Body) -> list[int]:
        prompt = body.get("prompt")
        if prompt is None:
            text = self.rendered(**{name: body[name] for name in _RENDERING if name in body})
            return self.tokenizer.encode(text, special=body.get("add_special_tokens", False))
        if not isinstance(prompt, str):
            return list(prompt)
        return self.tokenizer.encode(prompt, special=body.get("add_special_tokens", True))

    def reply(self, request: Request) -> Reply:
        kind = VllmChat if request.path == CHAT else VllmCompletion
        return kind(self, request.body, self.prompt_of(request))


class VllmCompletion(Reply):
    _began = False

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        if tokens or reason:
            choice = {
                "index": 0,
                "text": "".join(token.text for token in tokens),
                "logprobs": self._logprobs(tokens),
                "finish_reason": reason,
                "stop_reason": None,
                **self._ids(tokens),
            }
            yield self._of([choice], None)

    def _of(self, choices: list[Body], usage: Body | None) -> Body:
        head = {"id": "cmpl-1", "object": "text_completion", "model": self.engine.model}
        return {**head, "choices": choices, "usage": usage}

    def _ids(self, tokens: list[Token]) -> Body:
        if not self.body.get("return_token_ids"):
            return {"prompt_token_ids": None, "token_ids": None}
        prompt = None if self._began else self.prompt
        self._began = True
        return {"prompt_token_ids": prompt, "token_ids": [t.id for t in tokens]}

    def _logprobs(self, tokens: list[Token]) -> Body | None:
        top = self.body.get("logprobs")
        if top is None:
            return None
        others = {f"other{rank}": -2.0 - rank for rank in range(max(0, top - 1))}
        return {
            "text_offset": [0] * len(tokens),
            "tokens": [token.shown for token in tokens],
            "token_logprobs": [-0.25] * len(tokens),
            "top_logprobs": [{token.shown: -0.25, **others} for token in tokens],
        }

    def last(self) -> Iterator[Body]:
        if self.wants_usage:
            yield self._of([], self.usage())


class VllmChat(ChatReply):
    """One chunk a step, with thought and answer side by side where both came in it."""

    def __init__(self, engine: FakeVllm, body: Body, prompt: list[int]) -> None:
        super().__init__(engine, body, prompt)
        if engine.reasoning_parser:
            begun = written(engine.tokenizer.decode(prompt))
            # A prefix is looked at only when streaming, and one without tags counts as a thought.
            closed = begun.rfind(CLOSE) > begun.rfind(OPEN)
            self.parts = Parts(not (closed and body.get("stream")), "reasoning")

    def first(self) -> Iterator[Body]:
        ids = self.prompt if self.body.get("return_token_ids") else None
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        yield self.of([{**choice, "finish_reason": None}], prompt_token_ids=ids)

    def chunks(self, tokens: list[Token], reason: str | None) -> Iterator[Body]:
        delta: Body = {}
        for field, group in self.sorted(tokens):
            if field is not None:
                delta[field] = delta.get(field, "") + "".join(token.text for token in group)
        ids = [t.id for t in tokens] if self.body.get("return_token_ids") else None
        if reason and not delta:
            delta = {CONTENT: ""}
        if delta or ids:
            more = {"logprobs": self.logprobs(tokens), "stop_reason": None, "token_ids": ids}
            yield self.chunk(delta, self.finish(reason) if reason else None, **more)

    def _tool(self, call: ToolCall) -> Iterator[Body]:
        pieces = [call.pieces[0], *call.arguments[:-1], "".join(call.pieces[-2:])]
        for piece, chunk in zip(["", *pieces], super()._tool(call), strict=False):
            if self.body.get("return_token_ids"):
                ids = self.engine.tokenizer.encode(piece)
                chunk["choices"][0]["token_ids"] = ids
            yield chunk
