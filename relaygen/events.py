"""What goes into a session and what comes out of it.

What comes with every read is not frozen: that takes a Python call for each of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from relaygen.state import Trigger
from relaygen.usage import Usage


class Role(StrEnum):
    """Which model of the pair."""

    LARGE = "large"
    SMALL = "small"

    @property
    def other(self) -> Role:
        return Role.SMALL if self is Role.LARGE else Role.LARGE


class TopLogprob(NamedTuple):
    """One alternative at a token position."""

    text: str
    logprob: float
    id: int | None = None


class Piece(NamedTuple):
    """The smallest run of tokens whose text the engine told: one token where it tells each token's.

    `text` may be empty while a character is incomplete; the piece that completes it carries it.
    `ids` is empty where the engine returned none. `logprob` is the natural log of the sampled
    token's probability, None where unknown; `top` are the alternatives, likeliest first.
    """

    text: str
    ids: tuple[int, ...] = ()
    tokens: int = 1
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


# ---- in -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class DecodeChunk:
    """Zero, one or many tokens, as one read of the stream brought them.

    `estimated` says that the engine told no counts, and that those of the pieces are a guess.
    `read` is how many tokens it was sent, and how many of them it had in its prefix cache; None
    where it has not told.
    """

    pieces: tuple[Piece, ...]
    estimated: bool = False
    read: tuple[int, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The engine ended the decode itself.

    `reason` is the engine's: "stop" (the model ended its turn), "length", or another.
    `tokens` counts all tokens of this decode, the end of turn with them; None where not told.
    `read` is as in DecodeChunk.
    """

    reason: str
    tokens: int | None = None
    read: tuple[int, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The decode broke: connection, time-out, error event, or a stream with no ending."""

    message: str


Event: TypeAlias = DecodeChunk | DecodeFinished | DecodeFailed


# ---- out ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """The next upstream generation call: the role's own prompt, then `prefix`, then go on.

    `prefix` is everything kept so far: token ids in a token handoff, else text.
    `max_tokens` is what is left of the generation's budget, None for no limit.
    """

    role: Role
    segment: int
    prefix: tuple[int, ...] | str
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None


class DeltaKind(StrEnum):
    """Where a piece of output text belongs."""

    REASONING = "reasoning"
    TAG = "tag"
    ANSWER = "answer"


@dataclass(slots=True)
class Delta:
    """Text for the client. All deltas of a generation, joined, are the text that was kept."""

    role: Role
    segment: int
    kind: DeltaKind
    text: str
    pieces: tuple[Piece, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Handoff:
    """The other role goes on. `text` is the cue or sentence end that caused it, if one did."""

    source: Role
    target: Role
    trigger: Trigger
    text: str
    segment: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation is complete."""

    reason: str
    usage: Usage
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Delegated:
    """The thinking is over: another writes what follows `text`, which is all that was kept.

    `text` is empty where the model did not think: then another writes the whole reply.
    """

    text: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """The generation can't go on; what was kept stays valid."""

    message: str
    usage: Usage


Output: TypeAlias = Delta | Handoff | Finished | Delegated | Failed
