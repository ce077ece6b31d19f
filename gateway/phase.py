"""Where a rendered prompt leaves the model: before, inside or after its thinking. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaygen.policy import Thinking
from relaygen.thinking import Phase


def phase_of_chat(thinking: Thinking, rendered: str, own: str) -> Phase:
    """From the end of the rendered text, and what the client wrote of the model's own turn.

    `own` counts only where the prompt really ends in it: many templates close a last assistant
    message and open a new turn.
    """
    end, own = rendered.rstrip(), own.rstrip()
    if own and end.endswith(own):
        opened, closed = own.rfind(thinking.open), own.rfind(thinking.close)
        if opened != closed:
            return Phase.THINKING if opened > closed else Phase.ANSWER
        end = end.removesuffix(own).rstrip()
    return _by_ending(thinking, end)


def phase_of_text(thinking: Thinking, prompt: str) -> Phase:
    """From a raw prompt, which may hold earlier turns with thinking of their own."""
    if prompt.rfind(thinking.open) > prompt.rfind(thinking.close):
        return Phase.THINKING
    return _by_ending(thinking, prompt.rstrip())


def own_words(message: Mapping[str, Any]) -> str:
    """What a last message lets the model go on from: its content, else its reasoning."""
    if message.get("role") != "assistant":
        return ""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return content or message.get("reasoning_content") or message.get("reasoning") or ""


def _by_ending(thinking: Thinking, end: str) -> Phase:
    if end.endswith(thinking.open):
        return Phase.THINKING
    return Phase.ANSWER if end.endswith(thinking.close) else Phase.UNDECIDED
