"""What the client asked of the whole generation."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """What the client asked of the whole generation. Token counts; None means not asked."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    include_stop: bool = False

    def after(self, kept: int, decodes: int) -> Limits:
        """The limits of what is still to be written, after so many tokens and decodes."""
        return replace(
            self,
            max_tokens=None if self.max_tokens is None else self.max_tokens - kept,
            min_tokens=None if self.min_tokens is None else max(0, self.min_tokens - kept),
            seed=None if self.seed is None else self.seed + decodes,
        )

    def spent(self, kept: int) -> bool:
        """Whether so many tokens are all that was asked for."""
        return self.max_tokens is not None and kept >= self.max_tokens
