"""OpenAI's Responses API, the requests: a /v1/responses body to a chat completions body. Pure.

Stateless: what needs a stored response is refused. Known losses: `reasoning.summary` (the thinking
itself comes back), `max_tool_calls` (of hosted tools only) and the keys of OpenAI's prompt cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.apis.chat_parts import (
    function_tool,
    json_format,
    named_tool,
    objects,
    optional,
    refuse,
    refused,
    required,
    shown,
    streaming,
    tokens,
    untouched,
    wrong,
)
from gateway.apis.responses_items import chat_messages
from gateway.apis.responses_stream import ResponsesStream, whole
from gateway.openai_api import MAX_TOP_LOGPROBS, model_of

__all__ = ["ResponsesStream", "to_chat", "whole"]

_STATELESS = "this gateway keeps no state; send all items in `input`"
_REFUSED = {
    "background": "this gateway keeps no state; leave it out and set `stream`",
    "context_management": "nothing is compacted here; leave it out and shorten `input` yourself",
    "conversation": _STATELESS,
    "moderation": "nothing is moderated here; leave it out",
    "previous_response_id": _STATELESS,
    "prompt": "no prompt templates are stored here; send `instructions` and `input`",
}
# The last row says nothing about the text that is wanted.
_TRANSLATED = (
    *("model", "input", "instructions", "max_output_tokens", "reasoning", "text", "tools"),
    *("tool_choice", "stream", "stream_options", "include", "top_logprobs", *_REFUSED),
    *("metadata", "store", "truncation", "service_tier", "max_tool_calls", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "background_options"),
)


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completions body. RequestError names the field, the value and the remedy."""
    refuse(body, _REFUSED)
    if body.get("truncation") not in (None, "disabled"):
        raise wrong("truncation", body["truncation"], "disabled: shorten `input` yourself")
    _check_metadata(body)
    return {
        **untouched(body, _TRANSLATED),
        "model": model_of(body),
        "messages": chat_messages(body),
        **_limits(body),
        **streaming(body),
        **_tools(body),
        **_text(body),
        **_logprobs(body),
    }


def _check_metadata(body: Mapping[str, Any]) -> None:
    metadata = optional(body, "metadata", dict) or {}
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise wrong(f"metadata.{key}", value, "a text")


def _limits(body: Mapping[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if (limit := tokens(body, "max_output_tokens")) is not None:
        limits["max_completion_tokens"] = limit
    reasoning = optional(body, "reasoning", dict) or {}
    if effort := optional(reasoning, "effort", str, "reasoning"):
        limits["reasoning_effort"] = effort
    return limits


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if body.get("tools"):
        chat["tools"] = [_tool(tool, field) for field, tool in objects(body["tools"], "tools")]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = named_tool(choice, "tool_choice")
    elif choice in ("auto", "none", "required"):
        chat["tool_choice"] = choice
    elif choice is not None:
        wanted = "auto, none, required or a tool of type function"
        raise wrong("tool_choice", choice, f"{wanted}; send only the tools that may be called")
    return chat


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        why = f"is {shown(kind)}; tools of that type aren't hosted here"
        raise refused(f"{field}.type", f"{why}: define one of type 'function' and run it yourself")
    return function_tool(tool, "parameters", field)


def _text(body: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    text = optional(body, "text", dict) or {}
    if verbosity := optional(text, "verbosity", str, "text"):
        chat["verbosity"] = verbosity
    form = optional(text, "format", dict, "text") or {"type": "text"}
    match form.get("type"):
        case "text":
            return chat
        case "json_object":
            return {**chat, "response_format": {"type": "json_object"}}
        case "json_schema":
            name = required(form, "name", str, "text.format")
            return {**chat, "response_format": json_format(name, form, "text.format")}
    raise wrong("text.format.type", form.get("type"), "text, json_object or json_schema")


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Asked for by either of the two fields. Other things to `include` don't occur here."""
    top: int | None = optional(body, "top_logprobs", int)
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise wrong("top_logprobs", top, f"from 0 to {MAX_TOP_LOGPROBS}")
    included = "message.output_text.logprobs" in (optional(body, "include", list) or ())
    return {"logprobs": True, "top_logprobs": top or 0} if top or included else {}
