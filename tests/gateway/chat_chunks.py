"""Chat completion chunks for the tests of the other formats, their events, and any JSON."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import strategies as st

USAGE = {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}
WORDS = (
    "text user assistant tool function url enabled message reasoning tool_use tool_result "
    "thinking image input_image function_call any"
)
KEYS = (
    "type text role content source input id name output arguments keep edits format schema url "
    "effort user_id summary tool_use_id"
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.text(max_size=2)
    | st.sampled_from(WORDS.split()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


def delta(finish: str | None = None, /, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-abc", "created": 1, "model": "large", "choices": [choice]}


def call(arguments: str, /, name: str | None = None, **place: Any) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {**place, "function": function}


def usage(**more: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-abc", "choices": [], "usage": {**USAGE, **more}}


def events_of(wire: bytes) -> list[dict[str, Any]]:
    events = []
    for frame in wire.split(b"\n\n")[:-1]:
        name, data = frame.split(b"\n")
        events.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events
