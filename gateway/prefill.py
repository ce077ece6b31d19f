"""How fast an engine reads: from what it takes to a first token, by how much it had not read."""

from __future__ import annotations

_MEMORY = 512
"""First tokens after which what was measured counts half."""
_APART = 4
"""Tokens, the standard deviation of what was unread, below which nothing follows."""
_ENOUGH = 16
"""First tokens before anything follows from them."""


class Prefill:
    """One model's. A line through (unread tokens, seconds), by least squares."""

    def __init__(self) -> None:
        self._count = 0
        self._sums = (0.0,) * 5  # weights, tokens, seconds, tokens squared, tokens times seconds

    def add(self, unread: int, seconds: float) -> None:
        """A first token came so long after it was asked for, and after reading so many."""
        keep = 0.5 ** (1 / _MEMORY)
        new = (1.0, unread, seconds, unread * unread, unread * seconds)
        self._sums = tuple(old * keep + one for old, one in zip(self._sums, new, strict=True))
        self._count += 1

    @property
    def line(self) -> tuple[float, float] | None:
        """Seconds that a first token takes in any case, and for each unread token; None while
        nothing is known."""
        weights, tokens, seconds, squares, products = self._sums
        spread = weights * squares - tokens * tokens
        if self._count < _ENOUGH or spread < (_APART * weights) ** 2:
            return None
        each = max(0.0, (weights * products - tokens * seconds) / spread)
        return max(0.0, (seconds - each * tokens) / weights), each
