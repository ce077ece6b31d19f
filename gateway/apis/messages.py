"""Anthropic's Messages API, the requests: a /v1/messages body to a chat completions body. Pure.

Known losses: `thinking.budget_tokens` and `thinking.display` are taken as hints, a tool's
`input_examples` and `defer_loading` too; `is_error` becomes "Error: " before the tool's result.
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
    streaming,
    tokens,
    untouched,
    wrong,
)
from gateway.apis.messages_stream import MessagesStream, error_body, whole
from gateway.apis.messages_turns import chat_messages, prefill
from gateway.openai_api import model_of

__all__ = ["MessagesStream", "count_tokens_to_chat", "error_body", "to_chat", "whole"]

_THINKS = {"enabled": True, "adaptive": True, "disabled": False}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REFUSED = {
    "container": "there are no containers here; leave it out",
    "inference_geo": "where the engines behind this gateway run can't be chosen; leave it out",
    "mcp_servers": "this gateway calls no MCP servers; call them yourself and send their tools",
}
# The last row says nothing about the text that is wanted: hints, and Anthropic's accounts.
_TRANSLATED = (
    *("model", "max_tokens", "messages", "system", "stop_sequences", "stream", "stream_options"),
    *("tools", "tool_choice", "metadata", "thinking", "output_config", "output_format"),
    *("context_management", *_REFUSED),
    *("cache_control", "diagnostics", "service_tier", "speed", "user_profile_id", "workspace_id"),
)


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completions body. RequestError names the field, the value and the remedy."""
    chat = count_tokens_to_chat(body)
    if "max_tokens" not in chat:
        raise refused("max_tokens", "is missing: say how many tokens the reply may have")
    return chat


def count_tokens_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a /v1/messages/count_tokens body, which has no `max_tokens`."""
    refuse(body, _REFUSED)
    _check_edits(body)
    messages = chat_messages(body)
    return {
        **untouched(body, _TRANSLATED),
        "model": model_of(body),
        "messages": messages,
        **prefill(messages),
        **_limits(body),
        **streaming(body),
        **_tools(body),
        **_thinking(body),
        **_output(body),
    }


def _limits(body: Mapping[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if (limit := tokens(body, "max_tokens")) is not None:
        limits["max_tokens"] = limit
    if stops := optional(body, "stop_sequences", list):
        if not all(isinstance(stop, str) for stop in stops):
            raise wrong("stop_sequences", stops, "a list of texts")
        limits["stop"] = stops
    if user := optional(optional(body, "metadata", dict) or {}, "user_id", str, "metadata"):
        limits["user"] = user
    return limits


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if body.get("tools"):
        chat["tools"] = [_tool(tool, field) for field, tool in objects(body["tools"], "tools")]
    choice = optional(body, "tool_choice", dict)
    if choice is None:
        return chat
    kind = optional(choice, "type", str, "tool_choice")
    if kind == "tool":
        chat["tool_choice"] = named_tool(choice, "tool_choice")
    elif kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise wrong("tool_choice.type", kind, "auto, any, tool or none")
    if optional(choice, "disable_parallel_tool_use", bool, "tool_choice"):
        chat["parallel_tool_calls"] = False
    return chat


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        why = f"is {kind!r}, a tool of Anthropic's own that no engine here has"
        raise refused(f"{field}.type", f"{why}; define one of yours with `input_schema`")
    required(tool, "input_schema", dict, field)
    return function_tool(tool, "input_schema", field)


def _thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Given `chat_template_kwargs` have the last word: they are nearer to the model."""
    thinking = optional(body, "thinking", dict)
    if thinking is None:
        return {}
    kind = optional(thinking, "type", str, "thinking")
    if kind not in _THINKS:
        raise wrong("thinking.type", kind, "enabled, adaptive or disabled")
    given = optional(body, "chat_template_kwargs", dict) or {}
    return {"chat_template_kwargs": {"enable_thinking": _THINKS[kind], **given}}


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    config = optional(body, "output_config", dict) or {}
    if effort := optional(config, "effort", str, "output_config"):
        chat["reasoning_effort"] = effort
    field = "output_config.format"
    form = optional(config, "format", dict, "output_config")
    if form is None:  # its name in the beta
        field, form = "output_format", optional(body, "output_format", dict)
    if form:
        if form.get("type") != "json_schema":
            raise wrong(f"{field}.type", form.get("type"), "json_schema")
        chat["response_format"] = json_format("output", {"strict": True, **form}, field)
    return chat


def _check_edits(body: Mapping[str, Any]) -> None:
    """Edits that would take something out of the context are refused; those that keep all pass."""
    management = optional(body, "context_management", dict) or {}
    edits = optional(management, "edits", list, "context_management") or []
    for _, edit in objects(edits, "context_management.edits"):
        if edit.get("keep") != "all":
            why = "can't be done here; leave it out, and send the messages that shall count"
            raise refused("context_management.edits", why)
