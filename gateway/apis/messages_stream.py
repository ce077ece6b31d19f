"""Anthropic's Messages API, the replies: a chat completion to its events or its message. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from pydantic_core import from_json

from gateway.apis.chat_blocks import (
    Added,
    Block,
    BlockKind,
    ChatBlocks,
    Closed,
    Opened,
    Step,
    count,
    cut_short,
    wire,
)
from gateway.errors import GatewayError, UpstreamError

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_DELTAS = {
    BlockKind.THINKING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.TOOL: ("input_json_delta", "partial_json"),
}


class MessagesStream:
    """Feed chat chunks, write the bytes. `model` is the name the client asked for.

    An ending is never made up: without a `finish_reason`, `end` tells an error.
    """

    __slots__ = ("_chat", "_ended", "_model", "_started")

    def __init__(self, model: str) -> None:
        self._model = model
        self._chat = ChatBlocks()
        self._started = False
        self._ended = False

    def prompted(self, tokens: int) -> None:
        """The prompt's length, which the first event tells where it is known by then."""
        self._chat.usage = {"prompt_tokens": tokens}

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """UpstreamError: the engine's deltas can't be put in order."""
        steps = self._chat.feed(chunk)
        events = [] if self._started else [self._start()]
        self._started = True
        events += (event for step in steps for event in _events(step))
        return b"".join(map(wire, events))

    def end(self) -> bytes:
        if self._ended:
            return b""
        if self._chat.finish not in _STOP_REASONS:
            return self.error(cut_short(self._chat.finish))
        self._ended = True
        delta = _ending(self._chat)
        event = {"type": "message_delta", "delta": delta, "usage": _usage(self._chat)}
        return wire(event) + wire({"type": "message_stop"})

    def error(self, error: GatewayError) -> bytes:
        self._ended = True
        return wire(error_body(error))

    def ping(self) -> bytes:
        return wire({"type": "ping"})

    def _start(self) -> dict[str, Any]:
        ending = {"stop_reason": None, "stop_sequence": None}
        message = _message(self._chat, self._model, [], ending)
        return {"type": "message_start", "message": message}


def whole(completion: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The Message of a chat completion. UpstreamError: it has no ending, or no readable call."""
    chat = ChatBlocks()
    chat.feed(completion)
    if chat.finish not in _STOP_REASONS:
        raise cut_short(chat.finish)
    content = [_content(block, chat.finish) for block in chat.blocks]
    return _message(chat, model, content, _ending(chat))


def error_body(error: GatewayError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _message(
    chat: ChatBlocks, model: str, content: list[dict[str, Any]], ending: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": f"msg_{chat.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **ending,
        "usage": _usage(chat),
    }


def _events(step: Step) -> Iterator[dict[str, Any]]:
    index = step.block.index
    match step:
        case Opened(block):
            shell = _shell(block)
            yield {"type": "content_block_start", "index": index, "content_block": shell}
        case Added(block, text):
            kind, key = _DELTAS[block.kind]
            yield _delta(index, {"type": kind, key: text})
        case Closed(block):
            if block.kind is BlockKind.THINKING:
                yield _delta(index, {"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": index}


def _delta(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _shell(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.THINKING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.TOOL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _content(block: Block, finish: str) -> dict[str, Any]:
    shell = _shell(block)
    if block.kind is BlockKind.TOOL:
        return {**shell, "input": _input(block, cut=finish == "length")}
    return {**shell, _DELTAS[block.kind][1]: block.text}


def _input(block: Block, *, cut: bool) -> dict[str, Any]:
    """A tool's arguments, where `max_tokens` cut them as far as they go: so do the SDKs."""
    if not block.text.strip():
        return {}
    try:
        whole_text = json.dumps(from_json(block.text, allow_partial=True)) if cut else block.text
        arguments = orjson.loads(whole_text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        message = f"The model called {block.name!r} with arguments that are no JSON object"
        raise UpstreamError(message, code="generation_failed")
    return arguments


def _ending(chat: ChatBlocks) -> dict[str, Any]:
    """Engines say "stop" of a call that was forced; Anthropic's API never does."""
    reason = _STOP_REASONS[chat.finish or ""]
    if reason == "end_turn" and chat.used_tools:
        reason = "tool_use"
    stop = chat.stop_text if reason == "end_turn" else None
    return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}


def _usage(chat: ChatBlocks) -> dict[str, Any]:
    """Anthropic counts the tokens that a cache served beside `input_tokens`, OpenAI within."""
    told = chat.usage or {}
    cached = count(told, "prompt_tokens_details", "cached_tokens")
    usage: dict[str, Any] = {
        "input_tokens": (told.get("prompt_tokens") or 0) - (cached or 0),
        "output_tokens": told.get("completion_tokens") or 0,
    }
    if cached is not None:
        usage["cache_read_input_tokens"] = cached
    thinking = count(told, "completion_tokens_details", "reasoning_tokens")
    if thinking is not None:
        usage["output_tokens_details"] = {"thinking_tokens": thinking}
    return usage | ({"relaygen": told["relaygen"]} if "relaygen" in told else {})
