"""OpenAI's Responses API, the input: items to chat messages. Pure.

A model's turn comes as several items (thinking, text, calls). Chat completions have one message of
it, so that items are gathered until one comes that can't belong to the same turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.apis.chat_parts import (
    Message,
    assistant,
    content_of,
    image_part,
    objects,
    optional,
    refused,
    required,
    shown,
    text_part,
    tool_call,
    wrong,
)

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "text": "text",
}
_REMEDIES = {
    "input_file": "send its text as an input_text part",
    "item_reference": "this gateway keeps no items; send the item itself",
}


def chat_messages(body: Mapping[str, Any]) -> list[Message]:
    """The instructions come first.

    Successive system messages become one: many chat templates take none but a first one.
    """
    items = body.get("input")
    if not isinstance(items, str | list) or not items:
        raise wrong("input", items, "a text or a list of items")
    gathered = _Messages()
    if instructions := optional(body, "instructions", str):
        gathered.add("system", instructions)
    if isinstance(items, str):
        gathered.add("user", items)
    else:
        for field, item in objects(items, "input"):
            _take(gathered, item, field)
    gathered.end_turn()
    return gathered.messages


class _Messages:
    """The messages so far, and the turn of the model that is still gathered."""

    __slots__ = ("_calls", "_texts", "_thoughts", "messages")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, role: str, content: str | list[dict[str, Any]], **more: str) -> None:
        self.end_turn()
        last = self.messages[-1] if self.messages else {}
        both = (last.get("content"), content)
        if role == last.get("role") == "system" and all(isinstance(text, str) for text in both):
            last["content"] = "\n\n".join(map(str, both))
        else:
            self.messages.append({"role": role, "content": content, **more})

    def think(self, thought: str) -> None:
        if self._texts or self._calls:
            self.end_turn()
        self._thoughts.append(thought)

    def say(self, text: str) -> None:
        if self._texts or self._calls:
            self.end_turn()
        self._texts.append(text)

    def call(self, call: dict[str, Any]) -> None:
        self._calls.append(call)

    def end_turn(self) -> None:
        if self._texts or self._thoughts or self._calls:
            self.messages.append(assistant(self._texts, self._thoughts, self._calls))
        self._texts, self._thoughts, self._calls = [], [], []


def _take(gathered: _Messages, item: Mapping[str, Any], field: str) -> None:
    match item.get("type"):
        case None | "message":
            _take_message(gathered, item, field)
        case "reasoning":
            if thought := _thought(item, field):
                gathered.think(thought)
        case "function_call":
            call_id = required(item, "call_id", str, field)
            name = required(item, "name", str, field)
            gathered.call(tool_call(call_id, name, required(item, "arguments", str, field)))
        case "function_call_output":
            output = _content(item.get("output"), f"{field}.output")
            gathered.add("tool", output, tool_call_id=required(item, "call_id", str, field))
        case kind:
            raise _unserved(kind, field)


def _take_message(gathered: _Messages, item: Mapping[str, Any], field: str) -> None:
    given = item.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise wrong(f"{field}.role", given, "user, assistant, system or developer")
    content = _content(item.get("content"), f"{field}.content")
    if role != "assistant":
        gathered.add(role, content)
    elif isinstance(content, str):
        gathered.say(content)
    else:
        raise wrong(f"{field}.content", content, "texts, as an assistant writes no images")


def _content(content: object, field: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(field, content, "a text or a list of parts")
    return content_of([_part(part, path) for path, part in objects(content, field)])


def _part(part: Mapping[str, Any], field: str) -> dict[str, Any]:
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        return text_part(required(part, _TEXTS[kind], str, field))
    if kind != "input_image":
        raise _unserved(kind, field)
    if optional(part, "image_url", str, field) is None:
        raise refused(f"{field}.image_url", "is missing: there are no files here; send a URL")
    return image_part(part["image_url"], optional(part, "detail", str, field))


def _thought(item: Mapping[str, Any], field: str) -> str:
    """The thinking itself, else its summary; "" of an item that a client has emptied."""
    for key in ("content", "summary"):
        parts = objects(item.get(key) or [], f"{field}.{key}")
        if text := "".join(required(part, "text", str, path) for path, part in parts):
            return text
    if item.get("encrypted_content"):
        why = "can't be read here: another server encrypted it; leave the reasoning item out"
        raise refused(f"{field}.encrypted_content", why)
    return ""


def _unserved(kind: object, field: str) -> Exception:
    remedy = _REMEDIES.get(str(kind), "leave it out")
    return refused(f"{field}.type", f"is {shown(kind)}, which can't be served here; {remedy}")
