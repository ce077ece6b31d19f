"""The chunks of a stream as the answer in one piece."""

from __future__ import annotations

from typing import Any


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Texts joined, deltas turned into a message, log-probabilities in one list."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    for chunk in chunks:
        for part in chunk["choices"]:
            _add(choice, part)
    head = {k: v for k, v in chunks[0].items() if k not in ("choices", "usage", "object")}
    if (message := choice.get("message")) is None:
        return {**head, "object": "text_completion", "choices": [choice]}
    message.setdefault("content", None)
    return {**head, "object": "chat.completion", "choices": [choice]}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "delta":
            _add_delta(choice.setdefault("message", {}), value)
        elif isinstance(value, dict):
            _add_lists(choice, name, value)
        elif name in ("text", "token_ids") and value is not None:
            choice[name] = (choice.get(name) or type(value)()) + value
        elif value is not None:
            choice[name] = value
        else:
            choice.setdefault(name, None)


def _add_lists(choice: dict[str, Any], name: str, value: dict[str, Any]) -> None:
    held = choice.get(name) or {}
    choice[name] = {key: [*held.get(key, []), *entries] for key, entries in value.items()}


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for call in value or []:
                _add_call(message.setdefault("tool_calls", []), call)
        elif name == "role":
            message["role"] = value or message.get("role")
        elif value is not None:
            message[name] = (message.get(name) or "") + value


def _add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    function = call["function"]
    if function.get("name"):
        calls.append({"id": call.get("id"), "type": "function", "function": {**function}})
    else:
        calls[-1]["function"]["arguments"] += function["arguments"]
