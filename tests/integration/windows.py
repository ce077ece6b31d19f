"""The windows in which a client may leave a stream, and policies that hold them open for long.

The tiny models never stop at `ignore_eos`: without the gateway's closing every generation here
would go on for thousands of tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.clients.support import QUESTION

Event = dict[str, Any]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
CUES = ["Now", "So", "Thus", "Hence", "Therefore"]
NEVER = "☃"
_WHOLE = {"stop_token_ids": [2]}  # of what only one model's own endpoint can serve
_UNUSED_TAGS = {"open": "<never>", "close": "</never>", "field": "inline"}
_ENDLESS = {"min_large_tokens": 0, "thinking": _UNUSED_TAGS, "plain": "relay"}
_POLICIES: dict[str, dict[str, Any]] = {
    "long-large": {**_ENDLESS, "cues": {"words": [NEVER]}},
    "long-small": {
        **_ENDLESS,
        "cues": {"words": ["I", "The", "We"]},
        "boundary": {"ends": [NEVER]},
        "max_small_tokens": 100_000,
    },
    "long-answer": {"cues": {"words": [NEVER]}},
    "handoffs": {"cues": {"words": CUES}},
}
"""A segment of the large model that lasts, one of the small model, an answer, and handoffs."""


def write_policies(folder: Path, small: str) -> list[Path]:
    """Files of all of them; `small` is the model that is served as the small one."""
    written = []
    for name, changes in _POLICIES.items():
        file = folder / f"{name}.yaml"
        policy = {
            "version": 1,
            "name": name,
            "large": {"backend": "large", "model": "tiny-large"},
            "small": {"backend": "small", "model": small},
            "sampling": {"temperature": 0},
            "slow": {"hold": False},  # the roles are equally fast, or nearly
            **changes,
        }
        file.write_text(yaml.safe_dump(policy), encoding="utf-8")
        written.append(file)
    return written


@dataclass(frozen=True, slots=True)
class Window:
    """What is asked, the event at which the client leaves, and which engine is busy then."""

    model: str
    path: str
    here: Callable[[Event], bool]
    busy: Literal["large", "small"] = "large"
    body: dict[str, Any] = field(default_factory=dict)
    mode: str = "relay"

    def request(self, max_tokens: int) -> dict[str, Any]:
        asked: dict[str, dict[str, Any]] = {
            CHAT: {"relaygen": {"trace": True}},
            COMPLETIONS: {"prompt": PROMPT},
            MESSAGES: {},
            RESPONSES: {"input": QUESTION, "max_output_tokens": max_tokens},
        }
        limit = {} if self.path == RESPONSES else {"max_tokens": max_tokens}
        messages = [{"role": "user", "content": QUESTION}]
        common = {"model": self.model, "messages": messages, "ignore_eos": True, "temperature": 0}
        if self.path in (COMPLETIONS, RESPONSES):
            del common["messages"]
        return {**common, **limit, **asked[self.path], **self.body}


def written_by(role: str) -> Callable[[Event], bool]:
    def here(event: Event) -> bool:
        return bool(text_of(event)) and event["relaygen"]["role"] == role

    return here


def text_of(event: Event) -> str:
    """The text of a chunk of the chat or completions API, thinking and answer alike."""
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return str(
        delta.get("reasoning_content") or delta.get("content") or choices[0].get("text") or ""
    )


def _answer(event: Event) -> bool:
    return bool((event.get("choices") or [{}])[0].get("delta", {}).get("content"))


def _delta(event: Event) -> bool:
    return str(event.get("type", "")).endswith("delta")


WINDOWS = {
    "large segment": Window("long-large", CHAT, written_by("large")),
    "small segment": Window("long-small", CHAT, written_by("small"), "small"),
    "answer": Window("long-answer", CHAT, _answer, "small"),
    "two choices": Window("long-large", CHAT, written_by("large"), body={"n": 2}),
    "completions": Window("long-large", COMPLETIONS, lambda event: bool(text_of(event))),
    "messages": Window("long-large", MESSAGES, _delta),
    "responses": Window("long-large", RESPONSES, _delta),
    "messages, small segment": Window("long-small", MESSAGES, _delta, "small"),
    "passed through, a chat": Window("tiny-large", CHAT, lambda e: bool(text_of(e)), mode=""),
    "passed through, completions": Window(
        "tiny-large", COMPLETIONS, lambda e: bool(text_of(e)), mode=""
    ),
    "passed through, a policy's": Window(
        "long-large", CHAT, lambda e: bool(text_of(e)), body=_WHOLE, mode="passthrough"
    ),
    "passed through, messages": Window(
        "long-large", MESSAGES, _delta, body=_WHOLE, mode="passthrough"
    ),
}


async def events(reader: asyncio.StreamReader) -> AsyncIterator[Event]:
    """The data of an event stream as it comes, on a connection that was just asked."""
    async for line in reader:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
