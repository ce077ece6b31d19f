"""Made-up requests near valid ones."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

MODELS = ("pair", "lpair", "big", "tiny", "lbig", "other")
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
_INTEGERS = st.integers(-3, 30) | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400])
_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    _INTEGERS,
    st.floats(),
    _TEXTS,
    st.sampled_from(["auto", "none", "required", "text", "tool", "function", "user", "assistant"]),
    st.sampled_from(MODELS),
)
_KEYS = st.sampled_from(["type", "text", "content", "name", "role", "function", "id", "input", ""])


DEPTHS = (100, 260, 900, 980, 1020)


def written(value: Any) -> bytes:
    """As JSON, with the deep lists that Python's own writer has no room for."""
    content = json.dumps(value).encode()
    for depth in DEPTHS:
        content = content.replace(f'"@{depth}@"'.encode(), b"[" * depth + b"]" * depth)
    return content


JUNK = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS | _TEXTS, inner, max_size=4),
    max_leaves=8,
) | st.sampled_from([*(f"@{depth}@" for depth in DEPTHS), "x" * 5000])

FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
_SHARED: dict[str, Any] = {
    "stream": True,
    "temperature": 0.5,
    "relaygen": {"trace": True, "mode": "relay"},
    "chat_template_kwargs": {"enable_thinking": False},
}
_CHAT: dict[str, Any] = {
    **_SHARED,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ],
    "max_completion_tokens": 9,
    "min_tokens": 1,
    "n": 2,
    "stop": ["Thus"],
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 7,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    "logit_bias": {"5": 1},
    "reasoning_effort": "low",
}
_MESSAGES: dict[str, Any] = {
    **_SHARED,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "How many?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "12", "is_error": True},
                {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
            ],
        },
    ],
    "stop_sequences": ["Thus"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "me"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
_RESPONSES: dict[str, Any] = {
    **_SHARED,
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "H"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
    ],
    "max_output_tokens": 9,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}, "verbosity": "low"},
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "look"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "truncation": "disabled",
}
_COMPLETION: dict[str, Any] = {
    **_SHARED,
    "prompt": ["How many?", "Which?"],
    "max_tokens": 5,
    "echo": True,
    "logprobs": 2,
    "n": 2,
    "best_of": 2,
    "stop": "Thus",
    "seed": 7,
    "suffix": "s",
    "min_tokens": 1,
}
USER = [{"role": "user", "content": "How many?"}]
_MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 8},
    "/v1/completions": {"prompt": "How many?", "max_tokens": 8},
    "/v1/messages": {"messages": USER, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "How many?", "max_output_tokens": 8},
    "/tokenize": {"prompt": "How many?"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/embeddings": {"input": "How many?"},
}
_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/responses": _RESPONSES,
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: a valid request, with some of its parts made wrong."""
    path = draw(st.sampled_from([*_MINIMAL, *_FIELDS]))
    more = _FIELDS.get(path, {"stream": True})
    names = draw(st.lists(st.sampled_from(sorted(more)), max_size=6, unique=True))
    model = draw(st.sampled_from(MODELS))
    body = {"model": model, **_MINIMAL[path], **{name: more[name] for name in names}}
    body = json.loads(json.dumps(body))  # its own, to be changed
    for _ in range(draw(st.integers(0, 3))):
        spoil(draw, body)
    return path, written(body)


def spoil(draw: st.DrawFn, value: Any) -> None:
    """Changes something somewhere inside."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        at = draw(st.sampled_from(places))
        inside = value[at]
        if isinstance(inside, dict | list) and inside and draw(st.booleans()):
            value = inside
            continue
        if draw(st.integers(0, 4)) == 0:
            del value[at]
        else:
            value[at] = draw(JUNK)
        return
