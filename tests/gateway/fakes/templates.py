"""Chat templates: ChatML, and what stock templates do to thoughts in the assistant's turns.

The flags and their errors are those of transformers 5's `apply_chat_template`, which vLLM calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

Message = dict[str, Any]
Kind = Literal["verbatim", "qwen3", "r1"]
"""What a template does with an assistant's turn. "qwen3": the last turn always gets a think block,
an empty one if none is closed; earlier turns lose theirs. "r1": nothing up to the thought's end is
kept."""

NO_THOUGHT = "<think>\n\n</think>\n\n"
NOT_BOTH = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
INCOMPATIBLE = (
    "continue_final_message and add_generation_prompt are not compatible. Use "
    "continue_final_message when you want the model to continue the final message, and "
    "add_generation_prompt when you want to add a header that will prompt it to start a new "
    "assistant message instead."
)
NOT_FOUND = (
    "continue_final_message is set but the final message does not appear in the chat after "
    "applying the chat template! This can happen if the chat template deletes portions of the "
    "final message. Please verify the chat template and final message in your chat to ensure they "
    "are compatible."
)
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def content_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def turns(messages: Sequence[Message], kind: Kind = "verbatim", tools: Any = None) -> str:
    """All turns, each closed."""
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    asked = users[-1] if users else len(messages) - 1
    text = f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    for index, message in enumerate(messages):
        content = content_of(message)
        if message["role"] == "assistant":
            content = _answered(message, content, kind, index > asked, index == len(messages) - 1)
        text += f"<|im_start|>{message['role']}\n{content}{_calls(message)}<|im_end|>\n"
    return text


def _answered(message: Message, content: str, kind: Kind, since_asked: bool, last: bool) -> str:
    if kind == "verbatim":
        return content
    before, closed, after = content.rpartition("</think>")
    if kind == "r1":
        return after
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if not thought and closed:
        thought = before.rstrip("\n").rpartition("<think>")[2].lstrip("\n")
        content = after.lstrip("\n")
    if since_asked and (last or thought):
        stripped, answer = thought.strip("\n"), content.lstrip("\n")
        return f"<think>\n{stripped}\n</think>\n\n{answer}"
    return content


def _calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def header(opens: str, options: dict[str, Any]) -> str:
    """What makes the assistant's turn begin."""
    if (options.get("chat_template_kwargs") or {}).get("enable_thinking") is False:
        opens = NO_THOUGHT
    return f"<|im_start|>assistant\n{opens}"


def applied(messages: list[Message], kind: Kind, opens: str, options: dict[str, Any]) -> str:
    """Raises: ValueError with the text that the engine answers."""
    adds, tools = options.get("add_generation_prompt", True), options.get("tools")
    if not options.get("continue_final_message"):
        end = header(opens, options) if adds else ""
        return turns(messages, kind, tools) + end
    if adds:
        raise ValueError(NOT_BOTH if "add_generation_prompt" in options else INCOMPATIBLE)
    final = content_of(messages[-1])
    text = turns([*messages[:-1], {**messages[-1], "content": final + _TAG}], kind, tools)
    if final.strip() not in text or _TAG.strip() not in text:
        raise ValueError(NOT_FOUND)
    return text[: text.rindex(_TAG)]
