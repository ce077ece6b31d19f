"""The one text that simulated engines write, and the frames of its tokens, made once."""

from __future__ import annotations

import re
from typing import Any

import orjson

_WORDS = (" we", " add", " the", " next", " two", " of", " them", " up", " so", " far")
CUE = " Therefore"
ANSWER = 16
"""Tokens after the thinking."""
_TOKENS = re.compile(r" ?[^\s]+|\s")


class Vocabulary:
    """A token for every word that turns up; ids in the order of their coming."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def id(self, text: str) -> int:
        found = self._ids.setdefault(text, len(self._texts))
        if found == len(self._texts):
            self._texts.append(text)
        return found

    def encode(self, text: str) -> list[int]:
        return [self.id(part) for part in _TOKENS.findall(text)]

    def decode(self, ids: list[int]) -> str:
        return "".join(self._texts[i] for i in ids)


class Script:
    """Thinking of `tokens` tokens, then an answer.

    The large model's segments have `large` tokens, the small one's `small`; 0: no handoffs. With
    `numbers` sentences end in one, and have another inside: one token more tells them apart.
    """

    def __init__(self, tokens: int, large: int, small: int, *, numbers: bool = False) -> None:
        self.vocabulary = vocabulary = Vocabulary()
        thinking = [_WORDS[i % len(_WORDS)] for i in range(tokens)]
        self.ends: frozenset[int] = frozenset()
        """Indices of the tokens that end a segment."""
        if large:
            self.ends = self._cut(thinking, large, small, numbers=numbers)
        self.texts = ["<think>", *thinking, "</think>", *[" answer"] * ANSWER]
        self.ids = [vocabulary.id(text) for text in self.texts]
        self.completions = [self._frame(i) for i in range(len(self.texts))]
        self.chats = [_event(_chat(text)) for text in self.texts]

    def _cut(self, thinking: list[str], large: int, small: int, *, numbers: bool) -> frozenset[int]:
        ends, at, role = [], -1, 0
        while (at := at + (large, small)[role]) < len(thinking):
            thinking[at] = (CUE, " 7." if numbers else ".")[role]
            if numbers and role:
                thinking[at - small // 2 : at - small // 2 + 2] = [" 3.", "14"]
            ends.append(at + 1)  # after <think>
            role = 1 - role
        return frozenset(ends)

    def _frame(self, index: int) -> bytes:
        text = self.texts[index]
        logprobs = {
            "text_offset": [index],
            "token_logprobs": [-0.1],
            "tokens": [text],
            "top_logprobs": [{text: -0.1}],
        }
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}
        choice |= {"stop_reason": None, "token_ids": [self.ids[index]], "prompt_token_ids": None}
        return _event({**_HEAD, "object": "text_completion", "choices": [choice], "usage": None})


_HEAD = {"id": "cmpl-0a1b2c3d4e5f", "created": 1764547200, "model": "simulated"}


def _chat(text: str) -> dict[str, object]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}


def ending(*, chat: bool, tokens: int, reason: str) -> bytes:
    """The frames after the last token."""
    own: dict[str, Any] = {"delta": {}} if chat else {"text": "", "token_ids": []}
    kind = "chat.completion.chunk" if chat else "text_completion"
    last = {**_HEAD, "object": kind, "choices": [{"index": 0, **own, "finish_reason": reason}]}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    told = {**_HEAD, "object": kind, "choices": [], "usage": usage}
    return _event(last) + _event(told) + b"data: [DONE]\n\n"


def _event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
