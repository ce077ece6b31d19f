"""Going on with a generation through a chat endpoint, where there is no other way. Pure.

The text so far is sent as an unfinished assistant message. How a server is told that it is
unfinished, and where it wants the thinking, differs: see `Prefill`. What comes back may be split
into reasoning and content; the reader joins it to the one text that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.engines.reading import ChunkReader
from gateway.estimate import estimate_tokens
from relaygen.events import Piece, TopLogprob
from relaygen.policy import Thinking
from relaygen.thinking import Phase, ThinkingSplitter


class Prefill(StrEnum):
    """The form of an unfinished assistant message."""

    TRAILING = "trailing"
    """A last message of the assistant is gone on with as it is."""
    CONTINUE = "continue"
    """vLLM: `continue_final_message`, and no new turn opened."""
    APPENDED = "appended"
    """SGLang: the same, but put after what the template has opened."""
    REASONING = "reasoning"
    """llama.cpp: `continue_final_message` names the field, the thinking has one of its own."""
    REASONING_LINES = "reasoning_lines"
    """The same, where the template writes a line end after the opening tag and before the other."""
    PREFIX = "prefix"
    """Mistral: `prefix: true` on the message."""
    PREFIX_REASONING = "prefix_reasoning"
    """DeepSeek: the same, the thinking in `reasoning_content`."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request to be gone on with: its messages and template fields.

    `opened` is what the template has written of the reply itself ("<think>\\n" in R1's), "" where
    nothing or where it can't be known.
    `prefill` is the form of a message that ends inside the thinking, `closed` of one after it.
    """

    request: Mapping[str, Any]
    thinking: Thinking
    opened: str = ""
    prefill: Prefill | None = None
    closed: Prefill | None = None


def chat_body(chat: Chat, prefix: str) -> dict[str, Any]:
    """Messages and template fields for a reply that goes on after `prefix`."""
    if not prefix:
        return dict(chat.request)
    messages = list(chat.request["messages"])
    if messages[-1].get("role") == "assistant":
        prefix = _own(messages.pop()) + prefix
    turn, flags = _unfinished(chat, prefix)
    return {**chat.request, **flags, "messages": [*messages, {"role": "assistant", **turn}]}


def _own(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return str(content)


def _unfinished(chat: Chat, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The assistant message, and the fields that say it is unfinished."""
    text = chat.opened + prefix
    whole = {"content": text}
    goes_on: dict[str, Any] = {"add_generation_prompt": False}
    form = chat.closed if chat.thinking.close in text else chat.prefill
    match form:
        case Prefill.CONTINUE:
            return whole, {**goes_on, "continue_final_message": True}
        case Prefill.APPENDED:
            return {"content": prefix}, {**goes_on, "continue_final_message": True}
        case Prefill.REASONING | Prefill.REASONING_LINES:
            thought, closed, answer = _split(chat.thinking, text)
            if thought is None:
                return whole, {**goes_on, "continue_final_message": "content"}
            if form is Prefill.REASONING_LINES:
                thought = thought.removeprefix("\n")
                thought = thought.removesuffix("\n") if closed else thought
            field = "content" if closed else "reasoning_content"
            turn = {"content": answer, "reasoning_content": thought}
            return turn, {**goes_on, "continue_final_message": field}
        case Prefill.PREFIX:
            return {**whole, "prefix": True}, {}
        case Prefill.PREFIX_REASONING:
            thought, _, answer = _split(chat.thinking, text)
            beside = {} if thought is None else {"reasoning_content": thought}
            return {"content": answer, **beside, "prefix": True}, {}
        case _:
            return whole, {}


def _split(thinking: Thinking, text: str) -> tuple[str | None, bool, str]:
    """The thought (None without one), whether it is closed, and the answer."""
    start = text.lstrip()
    if not start.startswith(thinking.open):
        return None, False, text
    thought, close, answer = start.removeprefix(thinking.open).partition(thinking.close)
    return thought, bool(close), answer


class ChatReader(ChunkReader):
    """Joins reasoning and content to the text that the model wrote, tags and all.

    Where in it the model stands is known from the prefix, not from the server's fields: servers
    misjudge a continuation. Content after reasoning of the same stream closes the thinking; content
    alone may be thinking too, on a server that doesn't split.
    """

    def __init__(
        self, chat: Chat, prefix: str, count: Callable[[str], int] = estimate_tokens
    ) -> None:
        super().__init__()
        self._chat = chat
        self._count = count
        splitter = ThinkingSplitter(chat.thinking.open, chat.thinking.close)
        splitter.push(chat.opened + prefix)
        self._phase = splitter.phase
        self._splits = False
        self._repeated = prefix
        """What a server that repeats the prefix would send first."""
        self._predicted = 0

    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        delta = choice.get("delta") or {}
        text = self._joined(
            delta.get("reasoning_content") or delta.get("reasoning") or "",
            delta.get("content") or "",
        )
        count = self._tokens(choice, chunk, text)
        text = self._new(text)
        if not text and not count:
            return []
        logprob, top = _logprob(choice)
        return [Piece(text, (), count, logprob, top)]

    def _joined(self, reasoning: str, content: str) -> str:
        tags, text = self._chat.thinking, ""
        if reasoning:
            if self._phase is Phase.UNDECIDED:
                text, self._phase = tags.open, Phase.THINKING
            self._splits = True
            text += reasoning
        if content:
            if self._splits and self._phase is Phase.THINKING:
                text, self._phase = text + tags.close, Phase.ANSWER
            text += content
        return text

    def _new(self, text: str) -> str:
        """`text` without what repeats the prefix: whether servers do is often not documented."""
        if not self._repeated or not text:
            return text
        if self._repeated.startswith(text):
            self._repeated = self._repeated[len(text) :]
            return ""
        if text.startswith(self._repeated):
            text = text[len(self._repeated) :]
        self._repeated = ""
        return text

    def _tokens(self, choice: dict[str, Any], chunk: dict[str, Any], text: str) -> int:
        """How many tokens a chunk brought: told by the server, or estimated."""
        if ids := choice.get("token_ids"):
            return len(ids)
        predicted = (chunk.get("timings") or {}).get("predicted_n")
        if predicted is not None:
            new, self._predicted = int(predicted) - self._predicted, int(predicted)
            return new
        if entries := (choice.get("logprobs") or {}).get("content"):
            return len(entries)
        if not text:
            return 0
        self.estimated = True
        return self._count(text)


def _logprob(choice: dict[str, Any]) -> tuple[float | None, tuple[TopLogprob, ...]]:
    entries = (choice.get("logprobs") or {}).get("content") or []
    if len(entries) != 1:
        return None, ()
    tops = entries[0].get("top_logprobs") or ()
    return entries[0]["logprob"], tuple(TopLogprob(t["token"], t["logprob"]) for t in tops)
