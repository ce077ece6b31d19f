"""OpenAI's wire format, the replies: deltas and usage to chunks, chunks to whole replies. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import orjson

from gateway import sse
from gateway.extra import Extra
from relaygen.events import Delta, DeltaKind, Output, Piece, Role
from relaygen.usage import Usage

Chunk: TypeAlias = dict[str, Any]
_TEXT, _QUOTED_TEXT = "\0", b'"\\u0000"'
"""Stand for the text in a chunk of which all else is known."""
_FRAMES = 64


@dataclass(slots=True)
class TextChunk:
    """A chunk that is not spelt out yet: in a stream they differ in little but their text."""

    reply: Reply
    index: int
    delta: Delta

    def spelt(self) -> Chunk:
        return self.reply.delta_chunk(self.index, self.delta)

    def event(self) -> bytes:
        """Its wire form in OpenAI's stream."""
        return self.reply.delta_event(self.index, self.delta)


AnyChunk: TypeAlias = "Chunk | TextChunk"


def spelt(chunk: AnyChunk) -> Chunk:
    return chunk.spelt() if isinstance(chunk, TextChunk) else chunk


@dataclass(frozen=True, slots=True)
class Reply:
    """What all chunks of one reply share. `field` is the policy's `thinking.field`."""

    id: str
    created: int
    model: str
    chat: bool
    field: str
    trace: bool
    logprobs: int | None
    _frames: dict[tuple[object, ...], list[bytes]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def role_chunk(self, index: int, writer: tuple[Role, int]) -> Chunk:
        """The first chunk of a choice in a chat."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, writer=writer)

    def text_chunk(self, index: int, text: str, writer: tuple[Role, int]) -> Chunk:
        """Text that no model wrote: the prompt, echoed."""
        return self._chunk(index, {}, None, text=text, writer=writer)

    def delta_chunks(self, index: int, outputs: Iterable[Output]) -> list[AnyChunk]:
        """The chunks of those outputs that are text to be shown."""
        return [
            TextChunk(self, index, output)
            for output in outputs
            if type(output) is Delta and self._shows(output)
        ]

    def delta_event(self, index: int, delta: Delta) -> bytes:
        """The chunk of `delta` as the event of a stream."""
        if self.logprobs is not None:
            return sse.event(orjson.dumps(self.delta_chunk(index, delta)))
        writer = (delta.role, delta.segment) if self.trace else ()
        key = (index, delta.kind, *writer)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self._frame(index, replace(delta, text=_TEXT))
        return orjson.dumps(delta.text).join(frame)

    def _frame(self, index: int, delta: Delta) -> list[bytes]:
        """What is around the text."""
        if len(self._frames) >= _FRAMES:
            self._frames.clear()
        return sse.event(orjson.dumps(self.delta_chunk(index, delta))).split(_QUOTED_TEXT)

    def finish_chunk(
        self, index: int, reason: str, stop: str | None, writer: tuple[Role, int]
    ) -> Chunk:
        """`stop` is the client's stop string that was found: told as vLLM does."""
        chunk = self._chunk(index, {}, reason, writer=writer)
        if stop is not None:
            chunk["choices"][0]["stop_reason"] = stop
        return chunk

    def usage_chunk(self, usage: dict[str, Any], writer: tuple[Role, int]) -> Chunk:
        return {**self._head(), "choices": [], "usage": usage, **self._trace(*writer)}

    def taken_over(self, index: int, chunk: Chunk, writer: tuple[Role, int]) -> Chunk:
        """A chunk of an engine's own, made one of this reply; its choice stays as it is."""
        choices = [{**choice, "index": index} for choice in chunk["choices"]]
        return {**self._head(), "choices": choices, **self._trace(*writer)}

    def _shows(self, delta: Delta) -> bool:
        return not self.chat or bool(self._keys(delta.kind))

    def _keys(self, kind: DeltaKind) -> tuple[str, ...]:
        """The message fields that text of this kind goes to."""
        if kind is DeltaKind.ANSWER or self.field == "inline":
            return ("content",)
        if kind is DeltaKind.TAG:
            return ()
        return ("reasoning_content", "reasoning") if self.field == "both" else (self.field,)

    def delta_chunk(self, index: int, delta: Delta) -> Chunk:
        writer = (delta.role, delta.segment)
        logprobs = None if self.logprobs is None else self._logprobs(delta)
        if not self.chat:
            return self._chunk(index, {}, None, text=delta.text, logprobs=logprobs, writer=writer)
        content = dict.fromkeys(self._keys(delta.kind), delta.text)
        return self._chunk(index, content, None, logprobs=logprobs, writer=writer)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert self.logprobs is not None
        pieces = [piece for piece in delta.pieces if piece.logprob is not None]
        if self.chat:
            entries = [{**_entry(p, self.logprobs), "role": delta.role} for p in pieces]
            return {"content": entries}
        return {
            "tokens": [piece.text for piece in pieces],
            "token_logprobs": [piece.logprob for piece in pieces],
            "top_logprobs": [_legacy_top(piece, self.logprobs) for piece in pieces],
            "roles": [delta.role for _ in pieces],
        }

    def _trace(self, role: Role, segment: int) -> dict[str, Any]:
        return {"relaygen": {"role": role, "segment": segment}} if self.trace else {}

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        reason: str | None,
        *,
        writer: tuple[Role, int],
        text: str = "",
        logprobs: dict[str, Any] | None = None,
    ) -> Chunk:
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": delta} if self.chat else {"text": text}
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        return {**self._head(), "choices": [choice], **self._trace(*writer)}

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _entry(piece: Piece, top: int) -> dict[str, Any]:
    alternatives = [_token(t.text, t.logprob) for t in piece.top[:top]]
    return {**_token(piece.text, piece.logprob), "top_logprobs": alternatives}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _legacy_top(piece: Piece, top: int) -> dict[str, float] | None:
    """As OpenAI's completions have it: the likeliest, and the sampled token in any case."""
    if not top:
        return None
    found = {t.text: t.logprob for t in piece.top[:top]}
    assert piece.logprob is not None
    return {**found, piece.text: piece.logprob}


# ---- the whole reply ----------------------------------------------------------------------------


class Folded:
    """Folds the chunks of a stream to what the same request gets without `stream`."""

    def __init__(self) -> None:
        self._head: Chunk = {}
        self._choices: dict[int, _Choice] = {}
        self._usage: dict[str, Any] | None = None

    def add(self, given: AnyChunk) -> None:
        chunk = spelt(given)
        if not self._head:
            self._head = {key: chunk[key] for key in ("id", "object", "created", "model")}
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._choices.setdefault(choice["index"], _Choice()).add(choice)

    def whole(self) -> dict[str, Any]:
        chat = self._head["object"] == "chat.completion.chunk"
        choices = [
            {"index": index, **(choice.chat() if chat else choice.text())}
            for index, choice in sorted(self._choices.items())
        ]
        kind = "chat.completion" if chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage}


class _Choice:
    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[dict[str, Any]] = []
        self._by_index: dict[int, dict[str, Any]] = {}
        self._logprobs: dict[str, list[Any]] | None = None
        self._finish: dict[str, Any] = {}

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {"text": choice.get("text")}
        for key, value in delta.items():
            if isinstance(value, str) and key != "role":
                self._texts.setdefault(key, []).append(value)
        for call in delta.get("tool_calls") or ():
            self._tool(call)
        for key, values in (choice.get("logprobs") or {}).items():
            self._logprobs = self._logprobs or {}
            self._logprobs.setdefault(key, []).extend(values or ())
        if choice.get("finish_reason") is not None:
            known = ("index", "delta", "text", "logprobs", "token_ids")
            self._finish = {k: v for k, v in choice.items() if k not in known}

    def _tool(self, call: dict[str, Any]) -> None:
        """Some engines send no index, or the same for all calls: a name with another id begins one.

        Some repeat the id in every delta, some the name.
        """
        index, given = call.get("index"), call.get("id")
        function = call.get("function") or {}
        last = next(reversed(self._calls), None)
        known = last if index is None else self._by_index.get(index)
        new = given != known["id"] if known and given else index is None
        if known is None or (function.get("name") and new):
            known = {"id": given, "type": "function", "function": {"name": "", "arguments": ""}}
            self._calls.append(known)
        if index is not None:
            self._by_index[index] = known
        known["id"] = known["id"] or given
        known["function"]["name"] = known["function"]["name"] or function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""

    def chat(self) -> dict[str, Any]:
        texts = {key: "".join(parts) for key, parts in self._texts.items()}
        message: dict[str, Any] = {"role": "assistant", "content": "", **texts}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self._calls
        return {"message": message, "logprobs": self._logprobs, **self._finish}

    def text(self) -> dict[str, Any]:
        logprobs = self._logprobs
        if logprobs is not None:
            logprobs["text_offset"] = _offsets(logprobs.get("tokens", []))
        text = "".join(self._texts.get("text", ()))
        return {"text": text, "logprobs": logprobs, **self._finish}


def _offsets(tokens: Iterable[str]) -> list[int]:
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    return offsets


# ---- usage --------------------------------------------------------------------------------------


@dataclass(slots=True)
class HandoffTimes:
    """Milliseconds from the last token of a segment to the first of the next one, and whose."""

    values: list[tuple[Role, float]] = field(default_factory=list)

    def median(self) -> float | None:
        ordered = sorted(milliseconds for _, milliseconds in self.values)
        return round(ordered[len(ordered) // 2], 3) if ordered else None


def usage_object(
    policy: str,
    usage: Usage,
    prompt_tokens: int,
    handoffs: HandoffTimes,
    extra: Extra | None,
    segments: int,
) -> dict[str, Any]:
    """`usage` of a relayed generation; says so where a number is an estimate."""
    ours: dict[str, Any] = {
        "policy": policy,
        "large_tokens": usage.large_tokens,
        "small_tokens": usage.small_tokens,
        "discarded_tokens": usage.discarded_tokens,
        "segments": segments,
        "handoffs": usage.handoffs,
        "resumes": usage.resumes,
        "large_utilization": round(usage.large_utilization, 4),
        "handoff_ms_p50": handoffs.median(),
    }
    if extra is not None:
        ours["extra"] = asdict(extra)
    if usage.estimated:
        ours["estimated"] = True
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": prompt_tokens + usage.completion_tokens,
        "relaygen": ours,
    }
