"""What a comparison found, and the arithmetic on it. Times are seconds unless a name says ms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from gateway.demo.ask import RelayUsage, Reply


class Mode(StrEnum):
    """Who answers."""

    LARGE = "large"
    SMALL = "small"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode's sums over all problems.

    `decode_s` is the time from each reply's first token to its end; `first_token_s` the mean time
    to the first token; `handoff_ms_p50` the median over the replies of each one's own median.
    """

    mode: Mode
    problems: int
    right: int
    large_tokens: int
    small_tokens: int
    discarded_tokens: int
    handoffs: int
    wall_s: float
    decode_s: float
    first_token_s: float
    handoff_ms_p50: float | None = None

    @property
    def tokens(self) -> int:
        return self.large_tokens + self.small_tokens

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0..1."""
        return self.right / self.problems

    @property
    def small_share(self) -> float:
        """Share of the tokens that the small model wrote, 0..1."""
        return self.small_tokens / self.tokens if self.tokens else 0.0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds between two tokens: the first tokens' own time is left out."""
        intervals = self.tokens - self.problems
        return 1000 * self.decode_s / intervals if intervals > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Graded:
    """One problem and which modes got it right."""

    question: str
    expected: int
    right: dict[Mode, bool]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Large alone, small alone and the relay on the same problems, in one run."""

    seed: int
    large: ModeResult
    small: ModeResult
    relay: ModeResult
    graded: tuple[Graded, ...] = ()

    @property
    def modes(self) -> tuple[ModeResult, ...]:
        return self.large, self.small, self.relay

    @property
    def ideal_s(self) -> float:
        """The relay's wall time if handing over cost nothing.

        One time to first token of the large model a problem (it brings the first token), then each
        role's tokens at that model's own speed when alone.
        """
        count = self.relay.problems
        decode_ms = (
            max(0, self.relay.large_tokens - count) * self.large.ms_per_token
            + self.relay.small_tokens * self.small.ms_per_token
        )
        return count * self.large.first_token_s + decode_ms / 1000

    @property
    def relay_to_large(self) -> float:
        """Relayed wall time / the large model's alone."""
        return self.relay.wall_s / self.large.wall_s

    @property
    def relay_to_ideal(self) -> float:
        """Relayed wall time / ideal."""
        return self.relay.wall_s / self.ideal_s

    def as_dict(self) -> dict[str, Any]:
        """The whole result as JSON data."""
        return {
            "seed": self.seed,
            "problems": self.relay.problems,
            "modes": {str(each.mode): _mode_dict(each) for each in self.modes},
            "ideal_s": self.ideal_s,
            "relay_to_large": self.relay_to_large,
            "relay_to_ideal": self.relay_to_ideal,
            "graded": [_graded_dict(each) for each in self.graded],
        }


def summed(mode: Mode, replies: Sequence[Reply], right: int) -> ModeResult:
    """One mode's result from its replies."""
    usages = [_by_role(mode, reply) for reply in replies]
    handoffs_ms = [u.handoff_ms_p50 for u in usages if u.handoff_ms_p50 is not None]
    return ModeResult(
        mode=mode,
        problems=len(replies),
        right=right,
        large_tokens=sum(u.large_tokens for u in usages),
        small_tokens=sum(u.small_tokens for u in usages),
        discarded_tokens=sum(u.discarded_tokens for u in usages),
        handoffs=sum(u.handoffs for u in usages),
        wall_s=sum(reply.wall_s for reply in replies),
        decode_s=sum(reply.decode_s for reply in replies),
        first_token_s=sum(reply.first_s for reply in replies) / len(replies),
        handoff_ms_p50=median(handoffs_ms) if handoffs_ms else None,
    )


def _by_role(mode: Mode, reply: Reply) -> RelayUsage:
    if reply.relay:
        return reply.relay
    small = reply.tokens if mode is Mode.SMALL else 0
    return RelayUsage(reply.tokens - small, small, 0, 0, None)


def _mode_dict(result: ModeResult) -> dict[str, Any]:
    return {
        "right": result.right,
        "accuracy": result.accuracy,
        "large_tokens": result.large_tokens,
        "small_tokens": result.small_tokens,
        "discarded_tokens": result.discarded_tokens,
        "small_share": result.small_share,
        "handoffs": result.handoffs,
        "wall_s": result.wall_s,
        "first_token_s": result.first_token_s,
        "ms_per_token": result.ms_per_token,
        "handoff_ms_p50": result.handoff_ms_p50,
    }


def _graded_dict(graded: Graded) -> dict[str, Any]:
    right = {str(mode): value for mode, value in graded.right.items()}
    return {"question": graded.question, "expected": graded.expected, "right": right}
