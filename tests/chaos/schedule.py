"""Which connection and which answer of which replica suffers what: a pure function of the seed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Literal, Protocol

Scope = Literal["decodes", "requests"]


class Kind(StrEnum):
    REFUSE = "refuse"
    """A connection is reset as soon as it is accepted."""
    DOWN = "down"
    """The replica dies: every connection is reset, and for a while nothing listens."""
    DELAY = "delay"
    CUT = "cut"
    """FIN in the middle."""
    RESET = "reset"
    """RST in the middle."""
    HALF_CLOSE = "half-close"
    """FIN towards the client, but the socket stays open."""
    GARBAGE = "garbage"
    """Bytes that belong to no protocol, and then the answer goes on."""
    DRIP = "drip"
    """A few bytes at a time."""
    STALL = "stall"
    """Nothing more, until the client closes."""


HARMLESS = frozenset({Kind.DELAY, Kind.DRIP})
"""Faults that every client must outlast: nothing is lost."""
_OF_ANSWERS = tuple(kind for kind in Kind if kind is not Kind.REFUSE)
_WEIGHTS = {Kind.DOWN: 0.3}
_HEAD_BYTES = 120  # an answer's status line and headers
_BODY_BYTES = 3000  # most segments of the simulated transcripts are about as long


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes before byte `offset` of an answer, headers counted; `seconds` where it lasts."""

    kind: Kind
    offset: int = 0
    seconds: float = 0.0


class Plan(Protocol):
    """What a proxy asks. Numbers count from 0, in the order of arrival at the replica."""

    def of_connection(self, replica: str, number: int) -> Fault | None: ...

    def of_answer(self, replica: str, number: int, decode: bool) -> Fault | None:
        """`number` is among the replica's decodes, or among its other requests."""


class Peace:
    """No fault at all."""

    def of_connection(self, replica: str, number: int) -> Fault | None:
        return None

    def of_answer(self, replica: str, number: int, decode: bool) -> Fault | None:
        return None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Faults at `rate` (0..1, of answers and of connections), on decodes alone or on anything.

    Each decision has a generator of its own, so it depends on no other one, and on no clock.
    """

    seed: int
    rate: float
    scope: Scope = "decodes"
    kinds: tuple[Kind, ...] = tuple(Kind)

    def of_connection(self, replica: str, number: int) -> Fault | None:
        rng = self._random(replica, "connection", number)
        if Kind.REFUSE not in self.kinds or rng.random() >= self.rate / len(self.kinds):
            return None
        return Fault(Kind.REFUSE)

    def of_answer(self, replica: str, number: int, decode: bool) -> Fault | None:
        if not decode and self.scope == "decodes":
            return None
        rng = self._random(replica, "decode" if decode else "other", number)
        kinds = [kind for kind in _OF_ANSWERS if kind in self.kinds]
        if not kinds or rng.random() >= self.rate:
            return None
        kind = rng.choices(kinds, [_WEIGHTS.get(kind, 1.0) for kind in kinds])[0]
        return Fault(kind, _offset(rng, decode), rng.uniform(0.05, 0.3))

    def _random(self, replica: str, what: str, number: int) -> Random:
        return Random(f"{self.seed}/{replica}/{what}/{number}")


def _offset(rng: Random, decode: bool) -> int:
    """Before the first byte, within the head, and mostly within the body."""
    match rng.random():
        case share if share < 0.2:
            return 0
        case share if share < 0.3:
            return rng.randrange(1, _HEAD_BYTES)
        case _:
            return _HEAD_BYTES + rng.randrange(_BODY_BYTES if decode else _HEAD_BYTES)
