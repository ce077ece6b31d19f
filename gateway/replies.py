"""OpenAI's wire format, the replies: deltas and usage to chunks and responses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway import sse
from relaygen.events import Delta, DeltaKind, Piece, Role
from relaygen.usage import Usage

DONE_EVENT = sse.event(sse.DONE)


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

    def role_event(self, role: Role, segment: int) -> bytes:
        """The first chunk of a chat stream."""
        extra = self._trace(role, segment)
        return self._event({"role": "assistant", "content": ""}, None, extra=extra)

    def delta_events(self, deltas: Iterable[Delta]) -> bytes:
        """The chunks of some deltas, ready to be written at once."""
        return b"".join(self._delta_event(delta) for delta in deltas if self._shows(delta))

    def finish_event(self, reason: str, role: Role, segment: int) -> bytes:
        return self._event({}, reason, extra=self._trace(role, segment))

    def usage_event(self, usage: dict[str, Any], role: Role, segment: int) -> bytes:
        chunk = {**self._head(chunk=True), "choices": [], "usage": usage}
        return sse.event(orjson.dumps(chunk | self._trace(role, segment)))

    def response(self, deltas: Sequence[Delta], reason: str, usage: dict[str, Any]) -> bytes:
        """The whole reply of a request that does not stream."""
        logprobs = [entry for delta in deltas for entry in self._entries(delta)]
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.chat:
            choice["message"] = {"role": "assistant", **self._message(deltas)}
            choice["logprobs"] = None if self.logprobs is None else {"content": logprobs}
        else:
            choice |= {"text": "".join(delta.text for delta in deltas), "logprobs": None}
        head = self._head(chunk=False)
        return orjson.dumps({**head, "choices": [choice], "usage": usage})

    def _message(self, deltas: Sequence[Delta]) -> dict[str, str]:
        texts: dict[str, list[str]] = {"content": []}
        for delta in deltas:
            for key in self._keys(delta.kind):
                texts.setdefault(key, []).append(delta.text)
        return {key: "".join(parts) for key, parts in texts.items()}

    def _shows(self, delta: Delta) -> bool:
        return not self.chat or bool(self._keys(delta.kind))

    def _keys(self, kind: DeltaKind) -> tuple[str, ...]:
        """The message fields that text of this kind goes to."""
        if kind is DeltaKind.ANSWER or self.field == "inline":
            return ("content",)
        if kind is DeltaKind.TAG:
            return ()
        return ("reasoning_content", "reasoning") if self.field == "both" else (self.field,)

    def _delta_event(self, delta: Delta) -> bytes:
        extra = self._trace(delta.role, delta.segment)
        if not self.chat:
            return self._event({}, None, text=delta.text, extra=extra)
        content = dict.fromkeys(self._keys(delta.kind), delta.text)
        entries = None if self.logprobs is None else {"content": self._entries(delta)}
        return self._event(content, None, logprobs=entries, extra=extra)

    def _trace(self, role: Role, segment: int) -> dict[str, Any]:
        return {"relaygen": {"role": role, "segment": segment}} if self.trace else {}

    def _entries(self, delta: Delta) -> list[dict[str, Any]]:
        if self.logprobs is None:
            return []
        return [
            {**_entry(piece, self.logprobs), "role": delta.role}
            for piece in delta.pieces
            if piece.logprob is not None
        ]

    def _event(
        self,
        delta: dict[str, str],
        reason: str | None,
        *,
        text: str = "",
        logprobs: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": delta} if self.chat else {"text": text}
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head(chunk=True), "choices": [choice], **(extra or {})}
        return sse.event(orjson.dumps(chunk))

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class HandoffTimes:
    """Milliseconds from the last token of a segment to the first of the next one."""

    values: list[float] = field(default_factory=list)

    def median(self) -> float | None:
        ordered = sorted(self.values)
        return round(ordered[len(ordered) // 2], 3) if ordered else None


def usage_object(
    policy: str, usage: Usage, prompt_tokens: int, handoffs: HandoffTimes
) -> dict[str, Any]:
    """`usage` of a relayed generation."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": prompt_tokens + usage.completion_tokens,
        "relaygen": {
            "policy": policy,
            "large_tokens": usage.large_tokens,
            "small_tokens": usage.small_tokens,
            "discarded_tokens": usage.discarded_tokens,
            "segments": usage.segments,
            "handoffs": usage.handoffs,
            "large_utilization": round(usage.large_utilization, 4),
            "handoff_ms_p50": handoffs.median(),
        },
    }


def _entry(piece: Piece, top: int) -> dict[str, Any]:
    alternatives = [_token(t.text, t.logprob) for t in piece.top[:top]]
    return {**_token(piece.text, piece.logprob), "top_logprobs": alternatives}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
