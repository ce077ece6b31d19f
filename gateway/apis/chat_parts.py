"""What the foreign requests share on their way to chat completions: fields, parts, tools. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.errors import RequestError

Message = dict[str, Any]

_KINDS: dict[type, str] = {
    bool: "true or false",
    dict: "an object",
    int: "an integer",
    list: "a list",
    str: "a text",
}


def shown(value: object) -> str:
    """A value as an error message tells it: short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def refused(field: str, why: str) -> RequestError:
    """The error of a field that can't be served. `why` goes on after the field's name."""
    return RequestError(f"`{field}` {why}", param=field)


def wrong(field: str, value: object, wanted: str) -> RequestError:
    return refused(field, f"is {shown(value)}; it must be {wanted}")


def optional(body: Mapping[str, Any], key: str, kind: type, within: str = "") -> Any:
    """The value of a field, None where it is missing or null. `within`: the path of `body`."""
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise wrong(_path(within, key), value, _KINDS[kind])
    return value


def required(body: Mapping[str, Any], key: str, kind: type, within: str = "") -> Any:
    value = optional(body, key, kind, within)
    if value is None:
        raise refused(_path(within, key), f"is missing: it must be {_KINDS[kind]}")
    return value


def tokens(body: Mapping[str, Any], key: str) -> int | None:
    """A limit in tokens, at least 1."""
    value: int | None = optional(body, key, int)
    if value is not None and value < 1:
        raise wrong(key, value, "at least 1")
    return value


def objects(value: object, field: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with the path that an error names."""
    if not isinstance(value, list):
        raise wrong(field, value, "a list of objects")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{field}[{i}]", item, "an object")
    return [(f"{field}[{i}]", item) for i, item in enumerate(value)]


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuses the fields that `reasons` names, where they ask for something."""
    for key, why in reasons.items():
        if body.get(key):
            raise refused(key, f"is {shown(body[key])}; {why}")
    if body.get("n") not in (None, 1):
        raise wrong("n", body["n"], "1, as this API has one reply; use /v1/chat/completions")


def untouched(body: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """What travels on as it is: every field but the known ones."""
    skipped = frozenset(known)
    return {k: v for k, v in body.items() if k not in skipped and v is not None}


def streaming(body: Mapping[str, Any]) -> dict[str, Any]:
    """The usage is always asked for: the last events of both formats must tell it."""
    if not optional(body, "stream", bool):
        return {"stream": False}
    return {"stream": True, "stream_options": {"include_usage": True}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


def content_of(parts: list[dict[str, Any]], joint: str = "\n") -> str | list[dict[str, Any]]:
    """One text where there are only texts: what every chat template takes.

    Joined by a line break, as vLLM and llama.cpp join the texts of a message themselves.
    """
    if all(part["type"] == "text" for part in parts):
        return joint.join(part["text"] for part in parts)
    return parts


def assistant(texts: list[str], thoughts: list[str], calls: list[dict[str, Any]]) -> Message:
    """A message that a model wrote: its texts lie close together, no line break between."""
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def function_tool(tool: Mapping[str, Any], schema: str, within: str) -> dict[str, Any]:
    """A tool whose parameters lie in the field `schema`."""
    function: dict[str, Any] = {"name": required(tool, "name", str, within)}
    if description := optional(tool, "description", str, within):
        function["description"] = description
    if (parameters := optional(tool, schema, dict, within)) is not None:
        function["parameters"] = parameters
    if (strict := optional(tool, "strict", bool, within)) is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def named_tool(choice: Mapping[str, Any], within: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": required(choice, "name", str, within)}}


def json_format(name: str, form: Mapping[str, Any], within: str) -> dict[str, Any]:
    """`response_format` of a JSON schema."""
    schema: dict[str, Any] = {"name": name, "schema": required(form, "schema", dict, within)}
    for key, kind in (("description", str), ("strict", bool)):
        if (value := optional(form, key, kind, within)) is not None:
            schema[key] = value
    return {"type": "json_schema", "json_schema": schema}


def _path(within: str, key: str) -> str:
    return f"{within}.{key}" if within else key
