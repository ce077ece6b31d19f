"""The token ledger of one generation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. Kept tokens are in the text or ended the turn; discarded ones are neither.

    `estimated` says that an engine did not count some of them.
    """

    large_tokens: int = 0
    small_tokens: int = 0
    discarded_tokens: int = 0
    handoffs: int = 0
    resumes: int = 0
    """Decodes that broke, and that the generation outlived."""
    estimated: bool = False
    large_reasoning: int = field(default=0, compare=False)
    """Of `large_tokens`: those of the thinking."""
    small_reasoning: int = field(default=0, compare=False)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.large_tokens + other.large_tokens,
            self.small_tokens + other.small_tokens,
            self.discarded_tokens + other.discarded_tokens,
            self.handoffs + other.handoffs,
            self.resumes + other.resumes,
            self.estimated or other.estimated,
            self.large_reasoning + other.large_reasoning,
            self.small_reasoning + other.small_reasoning,
        )

    @property
    def completion_tokens(self) -> int:
        return self.large_tokens + self.small_tokens

    @property
    def segments(self) -> int:
        return self.handoffs + 1

    @property
    def large_utilization(self) -> float:
        """Share of the kept tokens that the large model decoded, 0..1 (0 where there are none)."""
        return self.large_tokens / self.completion_tokens if self.completion_tokens else 0.0


class Ledger:
    """Counts tokens by what became of them."""

    __slots__ = (
        "discarded",
        "estimated",
        "handoffs",
        "large",
        "large_reasoning",
        "resumes",
        "small",
        "small_reasoning",
    )

    def __init__(self) -> None:
        self.large = self.small = self.discarded = self.handoffs = self.resumes = 0
        self.large_reasoning = self.small_reasoning = 0
        self.estimated = False

    @property
    def kept(self) -> int:
        return self.large + self.small

    def keep(self, count: int, *, large: bool, reasoning: bool = False) -> None:
        if large:
            self.large += count
            self.large_reasoning += count * reasoning
        else:
            self.small += count
            self.small_reasoning += count * reasoning

    def withdraw(self) -> None:
        """What was kept is not, after all."""
        self.discarded += self.kept
        self.large = self.small = self.large_reasoning = self.small_reasoning = 0

    def usage(self) -> Usage:
        return Usage(
            self.large,
            self.small,
            self.discarded,
            self.handoffs,
            self.resumes,
            self.estimated,
            self.large_reasoning,
            self.small_reasoning,
        )
