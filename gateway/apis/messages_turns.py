"""Anthropic's Messages API, the turns: content blocks to chat messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.apis.chat_parts import (
    Message,
    assistant,
    content_of,
    image_part,
    objects,
    optional,
    refused,
    required,
    text_part,
    tool_call,
    wrong,
)

# Claude Code's first system block. Written for Anthropic's accounts, not for the model, and other
# in each request, so that no prefix of the prompt would ever be cached.
_ATTRIBUTION = "x-anthropic-billing-header:"
_REMEDIES = {
    "document": "send its text as a text block",
    "search_result": "send its text as a text block",
    "redacted_thinking": "only Anthropic can read it; leave it out",
}


@dataclass(frozen=True, slots=True)
class _Turn:
    """Successive messages of one role, which Anthropic's API takes as one turn."""

    role: str
    blocks: list[tuple[str, dict[str, Any]]]


def chat_messages(body: Mapping[str, Any]) -> list[Message]:
    messages = _system(body.get("system"))
    for turn in _turns(body):
        match turn.role:
            case "user":
                messages += _user(turn)
            case "assistant":
                messages.append(_assistant(turn))
            case _:
                parts = [_part(block, field) for field, block in turn.blocks]
                messages.append({"role": "system", "content": content_of(parts)})
    return messages


def prefill(messages: list[Message]) -> dict[str, bool]:
    """What makes a template leave the last message open, where it is the assistant's."""
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    if "tool_calls" in last or not last["content"]:
        why = "ends with the assistant, but not with a text to be continued"
        raise refused("messages", f"{why}; end it with a text, a tool_result or a user message")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _system(system: object) -> list[Message]:
    if not system:
        return []
    parts = [_part(block, field) for field, block in _blocks(system, "system")]
    texts = [part for part in parts if not part.get("text", "").startswith(_ATTRIBUTION)]
    return [{"role": "system", "content": content_of(texts)}] if texts else []


def _turns(body: Mapping[str, Any]) -> list[_Turn]:
    turns: list[_Turn] = []
    for field, message in objects(required(body, "messages", list), "messages"):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{field}.role", role, "user, assistant or system")
        blocks = _blocks(message.get("content"), f"{field}.content")
        if turns and turns[-1].role == role:
            turns[-1].blocks.extend(blocks)
        else:
            turns.append(_Turn(role, blocks))
    if not turns:
        raise wrong("messages", [], "a list of at least one message")
    return turns


def _blocks(content: object, field: str) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(content, str):
        return [(field, text_part(content))]
    if not isinstance(content, list):
        raise wrong(field, content, "a text or a list of content blocks")
    return objects(content, field)


def _user(turn: _Turn) -> Iterator[Message]:
    parts: list[dict[str, Any]] = []
    results = 0
    for field, block in turn.blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(block, field))
            continue
        if parts:
            yield {"role": "user", "content": content_of(parts)}
        yield _tool_result(block, field)
        parts, results = [], results + 1
    if parts or not results:
        yield {"role": "user", "content": content_of(parts)}


def _tool_result(block: Mapping[str, Any], field: str) -> Message:
    content = block.get("content")
    blocks = [] if content is None else _blocks(content, f"{field}.content")
    parts = [_part(item, path) for path, item in blocks]
    if optional(block, "is_error", bool, field):
        parts = _marked_as_error(parts)
    call_id = required(block, "tool_use_id", str, field)
    return {"role": "tool", "tool_call_id": call_id, "content": content_of(parts)}


def _marked_as_error(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages have no field for it, so that the model reads it in the text."""
    if not parts or parts[0]["type"] != "text":
        return [text_part("Error:"), *parts]
    text = parts[0]["text"]
    marked = text if text.casefold().startswith("error") else f"Error: {text}"
    return [text_part(marked), *parts[1:]]


def _part(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    match block.get("type"):
        case "text":
            return text_part(required(block, "text", str, field))
        case "image":
            return _image(required(block, "source", dict, field), f"{field}.source")
    raise _unserved(block, field)


def _image(source: Mapping[str, Any], field: str) -> dict[str, Any]:
    match source.get("type"):
        case "base64":
            media = required(source, "media_type", str, field)
            return image_part(f"data:{media};base64,{required(source, 'data', str, field)}")
        case "url":
            return image_part(required(source, "url", str, field))
    raise wrong(f"{field}.type", source.get("type"), "base64 or url: there are no files here")


def _assistant(turn: _Turn) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for field, block in turn.blocks:
        match block.get("type"):
            case "text":
                texts.append(required(block, "text", str, field))
            case "thinking":
                thoughts.append(required(block, "thinking", str, field))
            case "tool_use":
                calls.append(_tool_use(block, field))
            case _:
                raise _unserved(block, field)
    return assistant(texts, thoughts, calls)


def _tool_use(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    arguments = orjson.dumps(required(block, "input", dict, field)).decode()
    name = required(block, "name", str, field)
    return tool_call(required(block, "id", str, field), name, arguments)


def _unserved(block: Mapping[str, Any], field: str) -> Exception:
    kind = block.get("type")
    remedy = _REMEDIES.get(str(kind), "leave the block out")
    return refused(f"{field}.type", f"is {kind!r}, which can't be given to a model here; {remedy}")
