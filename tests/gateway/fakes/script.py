"""What a fake engine does with a prompt: tokens in order, and acts of misbehaviour between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

ASSISTANT = "assistant\n"


@dataclass(frozen=True)
class Reset:
    """The connection breaks: a TCP reset, SO_LINGER 0."""


@dataclass(frozen=True)
class Fin:
    """The reply ends like any other, only with no finish_reason and no [DONE]."""


@dataclass(frozen=True)
class Error:
    """An error event inside the stream."""

    message: str = "queue full"
    code: int = 429


@dataclass(frozen=True)
class Raw:
    """Bytes on the wire as they are, in a write of their own."""

    data: bytes


@dataclass(eq=False)
class Gate:
    """Nothing comes until the test opens it; `reached` tells the test that all before was sent."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: deltas where the endpoint parses tools, else its text.

    The defaults are OpenAI's deltas; engines differ in where ids and indices stand.
    """

    name: str
    arguments: tuple[str, ...] = ("{", "}")
    """Its JSON, a piece a delta, and a token each."""
    id: str | None = "call_1"
    index: int | None = 0
    """None leaves the field out."""
    repeats_id: bool = False
    """Whether every delta has the id, not only the first."""

    @property
    def pieces(self) -> list[str]:
        """Its text as models write it."""
        head = f'<tool_call>\n{{"name": "{self.name}", "arguments": '
        return [head, *self.arguments, "}\n</tool_call>"]


Act: TypeAlias = str | bytes | Reset | Fin | Error | Raw | Gate | ToolCall
Script: TypeAlias = Callable[[str], Iterable[Act]]
"""From the text that the engine was sent to what it does; text and bytes are one token each."""


def silence() -> Gate:
    """A gate that stays shut."""
    return Gate()


def writes(*acts: Act) -> Script:
    """The same acts, whatever the prompt."""
    return lambda prompt: acts


def story(*tokens: str | bytes) -> Script:
    """One transcript, gone on with from wherever the prompt's last turn has come to.

    A prompt that is not exactly a beginning of the transcript is an AssertionError: the engine
    answers 500 with it.
    """
    pieces = [token.encode() if isinstance(token, str) else token for token in tokens]

    def go_on(prompt: str) -> list[bytes]:
        written = prompt.rpartition(ASSISTANT)[2].encode()
        whole = b"".join(pieces)
        assert whole.startswith(written), f"{written!r} is no beginning of {whole!r}"
        left, rest = len(written), []
        for piece in pieces:
            if left < len(piece):
                rest.append(piece[left:])
            left = max(0, left - len(piece))
        return rest

    return go_on
