"""OpenAI's Responses API, the replies: a chat completion to its events or its response. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
from gateway.apis.chat_logprobs import entry_of
from gateway.errors import GatewayError

# What the response is at its end, and why it is incomplete.
_ENDINGS: dict[str, tuple[str, str | None]] = {
    "stop": ("completed", None),
    "tool_calls": ("completed", None),
    "function_call": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "content_filter": ("incomplete", "content_filter"),
}
# The SDKs take none but a few codes.
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_ITEMS = {BlockKind.THINKING: "rs", BlockKind.TEXT: "msg", BlockKind.TOOL: "fc"}
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": None,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class ResponsesStream:
    """Feed chat chunks, write the bytes. `request` is the client's body, for what is echoed of it.

    An ending is never made up: without a `finish_reason`, `end` tells a failure.
    """

    __slots__ = ("_chat", "_ended", "_items", "_model", "_number", "_request", "_started")

    def __init__(self, model: str, request: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._request = request or {}
        self._chat = ChatBlocks()
        self._items: list[dict[str, Any]] = []  # those that are done
        self._number = 0
        self._started = False
        self._ended = False

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """UpstreamError: the engine's deltas can't be put in order."""
        steps = self._chat.feed(chunk)
        written = b"" if self._started else self._start()
        return written + b"".join(self._wire(e) for step in steps for e in self._events(step))

    def end(self) -> bytes:
        if self._ended:
            return b""
        if self._chat.finish not in _ENDINGS:
            return self.error(cut_short(self._chat.finish))
        self._ended = True
        status, _ = _ENDINGS[self._chat.finish]
        return self._lifecycle(status, status)

    def error(self, error: GatewayError) -> bytes:
        self._ended = True
        if self._started:
            code = _ERROR_CODES.get(error.status, "server_error")
            return self._lifecycle("failed", "failed", {"code": code, "message": error.message})
        code = error.code if isinstance(error.code, str) else error.type
        told = {"code": code, "message": error.message, "param": error.param}
        return self._wire({"type": "error", **told})

    def _start(self) -> bytes:
        self._started = True
        created = self._lifecycle("created", "in_progress")
        return created + self._lifecycle("in_progress", "in_progress")

    def _lifecycle(self, name: str, status: str, error: dict[str, str] | None = None) -> bytes:
        response = _response(self._chat, self._model, self._request, status, self._items)
        return self._wire({"type": f"response.{name}", "response": {**response, "error": error}})

    def _wire(self, event: dict[str, Any]) -> bytes:
        number = self._number
        self._number += 1
        return wire({**event, "sequence_number": number})

    def _events(self, step: Step) -> Iterator[dict[str, Any]]:
        block = step.block
        match step:
            case Opened():
                yield from _opened(block, _item(self._chat, block, "in_progress"))
            case Added(_, text, entries):
                logprobs = {"logprobs": list(map(entry_of, entries))}
                more = logprobs if block.kind is BlockKind.TEXT else {}
                yield self._part_event(block, "delta", {"delta": text, **more})
            case Closed():
                item = _item(self._chat, block, _item_status(self._chat, block))
                self._items.append(item)
                yield from self._closed(block, item)

    def _closed(self, block: Block, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if block.kind is BlockKind.TOOL:
            done = {"name": block.name, "arguments": block.text}
            yield self._part_event(block, "done", done)
        else:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._part_event(block, "done", {"text": block.text, **logprobs})
            yield {**_part_place(block, item), "type": "response.content_part.done", "part": part}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _part_event(self, block: Block, verb: str, more: Mapping[str, Any]) -> dict[str, Any]:
        item = {"id": _item_id(self._chat, block)}
        match block.kind:
            case BlockKind.THINKING:
                name, place = "reasoning_text", _part_place(block, item)
            case BlockKind.TEXT:
                name, place = "output_text", _part_place(block, item)
            case BlockKind.TOOL:
                name = "function_call_arguments"
                place = {"item_id": item["id"], "output_index": block.index}
        return {"type": f"response.{name}.{verb}", **place, **more}


def whole(
    completion: Mapping[str, Any], model: str, request: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The response of a chat completion. UpstreamError: it has no ending."""
    chat = ChatBlocks()
    chat.feed(completion)
    if chat.finish not in _ENDINGS:
        raise cut_short(chat.finish)
    items = [_item(chat, block, _item_status(chat, block)) for block in chat.blocks]
    return _response(chat, model, request or {}, _ENDINGS[chat.finish][0], items)


def _opened(block: Block, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
    if block.kind is not BlockKind.TOOL:
        part = _part(block.kind, "", [])
        yield {**_part_place(block, item), "type": "response.content_part.added", "part": part}


def _part_place(block: Block, item: Mapping[str, Any]) -> dict[str, Any]:
    return {"item_id": item["id"], "output_index": block.index, "content_index": 0}


def _part(kind: BlockKind, text: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    if kind is BlockKind.THINKING:
        return {"type": "reasoning_text", "text": text}
    logprobs = list(map(entry_of, entries))
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _item_id(chat: ChatBlocks, block: Block) -> str:
    return f"{_ITEMS[block.kind]}_{chat.id}_{block.index}"


def _item_status(chat: ChatBlocks, block: Block) -> str:
    """Only the last item can have been cut by a limit."""
    complete = _ENDINGS.get(chat.finish or "stop", ("incomplete",))[0] == "completed"
    return "completed" if complete or block is not chat.blocks[-1] else "incomplete"


def _item(chat: ChatBlocks, block: Block, status: str) -> dict[str, Any]:
    """`status` in_progress: an item that has just begun, and holds nothing."""
    begun = status == "in_progress"
    text = "" if begun else block.text
    parts = [] if begun else [_part(block.kind, text, block.entries)]
    head = {"id": _item_id(chat, block), "status": status}
    match block.kind:
        case BlockKind.THINKING:
            return {**head, "type": "reasoning", "summary": [], "content": parts}
        case BlockKind.TEXT:
            return {**head, "type": "message", "role": "assistant", "content": parts}
        case BlockKind.TOOL:
            call = {"call_id": block.id, "name": block.name, "arguments": text}
            return {**head, "type": "function_call", **call}


def _response(
    chat: ChatBlocks,
    model: str,
    request: Mapping[str, Any],
    status: str,
    items: list[dict[str, Any]],
) -> dict[str, Any]:
    reason = _ENDINGS.get(chat.finish or "", ("", None))[1] if status == "incomplete" else None
    given = {k: request[k] for k in _ECHOED if request.get(k) is not None}
    reasoning = request.get("reasoning") or {}
    return {
        "id": f"resp_{chat.id}",
        "object": "response",
        "created_at": chat.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "metadata": request.get("metadata") or {},
        "model": model,
        "output": items,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "text": {"format": {"type": "text"}, **(request.get("text") or {})},
        "tools": request.get("tools") or [],
        **_ECHOED,
        **given,
        "usage": _usage(chat),
    }


def _usage(chat: ChatBlocks) -> dict[str, Any] | None:
    if chat.usage is None:
        return None
    told = chat.usage
    inputs, outputs = told.get("prompt_tokens") or 0, told.get("completion_tokens") or 0
    cached = count(told, "prompt_tokens_details", "cached_tokens") or 0
    thinking = count(told, "completion_tokens_details", "reasoning_tokens") or 0
    usage = {
        "input_tokens": inputs,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": outputs,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": told.get("total_tokens") or inputs + outputs,
    }
    return usage | ({"relaygen": told["relaygen"]} if "relaygen" in told else {})
