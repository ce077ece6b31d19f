"""A fake vLLM that answers every chat with one tool call, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.gateway.fakes import Connection, FakeVllm, Request

CHAT = "/v1/chat/completions"
NAME = "add"
ARGUMENTS = {"a": 12, "b": 30}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_ID = "chatcmpl-tool-1"
_USAGE = {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}


class ToolCaller(FakeVllm):
    async def answer(self, request: Request, connection: Connection) -> None:
        if request.path != CHAT:
            await super().answer(request, connection)
        elif request.body.get("stream"):
            connection.begin()
            for chunk in self._chunks_of_call():
                connection.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            connection.send(b"data: [DONE]\n\n")
            connection.end()
        else:
            connection.json(self._reply())

    def _reply(self) -> dict[str, Any]:
        call = {"id": _ID, "type": "function", "function": _function(json.dumps(ARGUMENTS))}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
        return {**self._head("chat.completion"), "choices": [choice], "usage": _USAGE}

    def _chunks_of_call(self) -> Iterator[dict[str, Any]]:
        text = json.dumps(ARGUMENTS)
        first = {"index": 0, "id": _ID, "type": "function", "function": _function("")}
        yield self._chunk({"role": "assistant", "content": ""})
        yield self._chunk({"tool_calls": [first]})
        for part in (text[:5], text[5:]):
            yield self._chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
        yield self._chunk({}, "tool_calls")
        yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _USAGE}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": self.model}


def _function(arguments: str) -> dict[str, str]:
    return {"name": NAME, "arguments": arguments}
