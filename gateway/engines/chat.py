"""Going on with a generation through a chat endpoint, where there is no other way. Pure.

The text so far is sent as an unfinished assistant message. How a server is told that it is
unfinished, and where it wants the thinking, differs: see `Prefill`. What comes back may be split
into reasoning and content; the reader joins it to the one text that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    request = {k: v for k, v in chat.request.items() if (k, v) != ("add_generation_prompt", True)}
    if not prefix:
        return request
    messages, own = _before(chat)
    turn, flags = _unfinished(chat, own + prefix)
    return {**request, **flags, "messages": [*messages, {"role": "assistant", **turn}]}


def _before(chat: Chat) -> tuple[list[Any], str]:
    """The messages before the reply, and what a last one of the assistant's has begun of it."""
    *before, last = chat.request["messages"]
    by_flag = chat.prefill in (Prefill.CONTINUE, Prefill.APPENDED)
    closed = by_flag and not chat.request.get("continue_final_message")
    if last.get("role") != "assistant" or closed:
        return [*before, last], ""
    content = last.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return before, str(content)


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


@dataclass(slots=True)
class Parser:
    """What is known of a server's parser of thoughts.

    `close` are the ids of the closing tag, where the server tells ids: a parser swallows its text.
    `splits` tells whether it was seen to tell a thought that it went on with from an answer,
    `repeats` whether it may repeat the message: what servers do is often not documented.
    """

    close: tuple[int, ...] = ()
    splits: bool = False
    repeats: bool = False


class ChatReader(ChunkReader):
    """Joins reasoning and content to the text that the model wrote, tags and all.

    Where in it the model stands is known from the text, not from the server's fields: servers
    misjudge a continuation. Content after reasoning closes the thinking; content alone may be
    thinking too, on a server that doesn't split.
    """

    def __init__(
        self,
        chat: Chat,
        prefix: str,
        parser: Parser | None = None,
        count: Callable[[str], int] = estimate_tokens,
    ) -> None:
        super().__init__()
        self._tags = chat.thinking
        self._count = count
        message = _before(chat)[1] + prefix
        begun = chat.opened + message
        self._splitter = ThinkingSplitter(chat.thinking.open, chat.thinking.close)
        self._splitter.push(begun)
        self._parser = parser or Parser(repeats=True)
        self._apart = chat.prefill is Prefill.PREFIX_REASONING
        """Whether this API surely has thoughts in a field of their own."""
        self._inside = self._splitter.phase is Phase.THINKING
        self._splits = self._apart or (self._inside and self._parser.splits)
        repeats = self._parser.repeats and bool(message)
        self._repeats = _repeats(chat.thinking, begun, message) if repeats else set()
        """What a server that repeats the message would send first."""
        self._held = ("", "")
        self._last: tuple[int, ...] = ()
        self._predicted = 0

    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        delta = choice.get("delta") or {}
        reasoning, content = self._new(
            delta.get("reasoning_content") or delta.get("reasoning") or "",
            delta.get("content") or "",
            ends=bool(choice.get("finish_reason")),
        )
        texts = self._joined(reasoning, content, choice.get("token_ids") or ())
        self._splitter.push("".join(texts))
        count = self._tokens(choice, chunk, "".join(texts))
        if not texts and not count:
            return []
        # Pieces of their own, to be cut between; which of them the tokens are of is not told.
        *tags, last = texts or [""]
        logprob, top = _logprob(choice)
        return [*(Piece(text, (), 0) for text in tags), Piece(last, (), count, logprob, top)]

    def _joined(self, reasoning: str, content: str, ids: Sequence[int]) -> list[str]:
        phase, swallowed = self._splitter.phase, self._swallowed(reasoning + content, ids)
        if self._apart and phase is Phase.ANSWER:
            reasoning = ""  # a thought taken up again: no part of the answer
        opened = self._tags.open if reasoning and phase is Phase.UNDECIDED else ""
        thinks = phase is Phase.THINKING or bool(opened)
        if reasoning and thinks:
            self._splits = True
            self._parser.splits |= self._inside
        closes = swallowed or (bool(content) and self._splits)
        closed = self._tags.close if thinks and closes else ""
        return [text for text in (opened, reasoning, closed, content) if text]

    def _swallowed(self, text: str, ids: Sequence[int]) -> bool:
        """Whether the closing tag was among the tokens, but not in their text."""
        close = self._parser.close
        if not close or not ids:
            return False
        seen = (*self._last, *ids)
        self._last = seen[len(seen) - len(close) + 1 :]
        found = any(seen[i : i + len(close)] == close for i in range(len(seen)))
        return found and self._splitter.closes_at(text) is None

    def _new(self, reasoning: str, content: str, *, ends: bool) -> tuple[str, str]:
        """A delta without what repeats the message."""
        reasoning, content = self._held[0] + reasoning, self._held[1] + content
        seen = reasoning + content
        if not ends and any(r.startswith(seen) and r != seen for r in self._repeats):
            self._held = (reasoning, content)
            return "", ""
        cut = max((len(r) for r in self._repeats if seen.startswith(r)), default=0)
        self._held, self._repeats = ("", ""), set()
        return reasoning[cut:], content[max(0, cut - len(reasoning)) :]

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


def _repeats(thinking: Thinking, begun: str, message: str) -> set[str]:
    """How a server may repeat a message: as it is, or told apart, with or without its blanks."""
    before, _, after = begun.partition(thinking.close)
    thought = before.removeprefix(thinking.open)
    apart = {thought + after, thought.strip() + after.lstrip()}
    return {text for text in {begun, message, *apart} if text}


def _logprob(choice: dict[str, Any]) -> tuple[float | None, tuple[TopLogprob, ...]]:
    entries = (choice.get("logprobs") or {}).get("content") or []
    if len(entries) != 1:
        return None, ()
    tops = entries[0].get("top_logprobs") or ()
    return entries[0]["logprob"], tuple(TopLogprob(t["token"], t["logprob"]) for t in tops)
