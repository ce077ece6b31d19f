"""What a client got, read from the raw bytes, and whether that is what it should have got."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_MESSAGE_FIELDS = ("reasoning_content", "content")


class Verdict(StrEnum):
    EQUAL = "equal"
    """Byte for byte the reference, its end included."""
    ERROR = "error"
    """Told to have failed, and nothing false before that."""
    WRONG = "wrong"
    """Anything else."""


@dataclass(slots=True)
class Got:
    """One reply. `problem` tells what is wrong with its form, whatever the reference."""

    status: int = 200
    reasoning: str = ""
    content: str = ""
    finishes: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    """It came to its proper end: [DONE], or a whole body."""
    cut: bool = False
    """The connection broke before the response was complete."""
    problem: str = ""

    @property
    def tokens(self) -> int | None:
        return self.usage.get("completion_tokens")

    @property
    def resumes(self) -> int:
        return int(self.usage.get("relaygen", {}).get("resumes", 0))

    @property
    def code(self) -> str:
        """Of the error, if it is one."""
        return str(self.errors[0].get("code")) if self.errors else ""


# ---- reading ------------------------------------------------------------------------------------


def read_stream(wire: bytes, *, cut: bool = False) -> Got:
    """An event stream as it came over the wire."""
    got = Got(cut=cut)
    *events, rest = wire.split(b"\n\n")
    if rest.strip():
        got.problem = f"half an event at the end: {rest[-80:]!r}"
    for event in events:
        if got.done or got.errors:
            got.problem = f"something after the end: {event[:80]!r}"
        _take(got, event)
    return got


def _take(got: Got, event: bytes) -> None:
    data = b"\n".join(line for line in event.split(b"\n") if not line.startswith(b":"))
    if not data:
        return
    if not data.startswith(b"data: "):
        got.problem = f"no event: {event[:80]!r}"
    elif data == b"data: [DONE]":
        got.done = True
    else:
        _take_chunk(got, json.loads(data[6:]))


def _take_chunk(got: Got, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        got.errors.append(chunk["error"])
        return
    got.usage = chunk.get("usage") or got.usage
    for choice in chunk["choices"]:
        if got.finishes:
            got.problem = "a choice goes on after its finish_reason"
        got.reasoning += choice["delta"].get("reasoning_content") or ""
        got.content += choice["delta"].get("content") or ""
        if choice["finish_reason"] is not None:
            got.finishes.append(choice["finish_reason"])


def read_whole(status: int, body: bytes) -> Got:
    """A reply in one piece, or an HTTP error."""
    got = Got(status)
    try:
        reply = json.loads(body)
    except ValueError:
        got.problem = f"status {status} with no JSON: {body[:80]!r}"
        return got
    if status != 200:
        got.errors.append(reply["error"])
        return got
    [choice] = reply["choices"]
    got.reasoning, got.content = (choice["message"].get(f) or "" for f in _MESSAGE_FIELDS)
    got.finishes, got.usage, got.done = [choice["finish_reason"]], reply["usage"], True
    return got


# ---- judging ------------------------------------------------------------------------------------


def judge(got: Got, reference: Got) -> tuple[Verdict, str]:
    """The verdict and, where it is WRONG, why."""
    if got.problem:
        return Verdict.WRONG, got.problem
    why = _of_error(got, reference) if got.errors else _of_reply(got, reference)
    if why:
        return Verdict.WRONG, why
    return (Verdict.ERROR if got.errors else Verdict.EQUAL), ""


def _of_error(got: Got, reference: Got) -> str:
    """What is false about a reply that says that it failed."""
    error = got.errors[0]
    begun = reference.reasoning.startswith(got.reasoning) if not got.content else (
        got.reasoning == reference.reasoning and reference.content.startswith(got.content)
    )  # fmt: skip
    checks = {
        f"status {got.status}: {error}": got.status == 200 or got.status >= 500,
        f"an error of a shape of its own: {error}": {"message", "type", "code"} <= set(error),
        "[DONE] after an error": not got.done,
        "a finish_reason and an error": not got.finishes,
        f"false text before the error: {_apart(got, reference)}": begun,
    }
    return _first_false(checks)


def _of_reply(got: Got, reference: Got) -> str:
    texts = got.reasoning == reference.reasoning and got.content == reference.content
    checks = {
        "the connection was cut, with no error told": not got.cut,
        "no [DONE], and no error either": got.done,
        f"status {got.status}": got.status == 200,
        f"another text: {_apart(got, reference)}": texts,
        f"finish_reason {got.finishes}, not {reference.finishes}": got.finishes
        == reference.finishes,
        f"{got.tokens} tokens counted, not {reference.tokens}": got.tokens == reference.tokens,
    }
    return _first_false(checks)


def _first_false(checks: dict[str, bool]) -> str:
    return next((what for what, holds in checks.items() if not holds), "")


def _apart(got: Got, reference: Got) -> str:
    one = f"{got.reasoning}</think>{got.content}"
    other = f"{reference.reasoning}</think>{reference.content}"
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    near = slice(max(0, at - 20), at + 20)
    return f"{one[near]!r} for {other[near]!r} at character {at}"
