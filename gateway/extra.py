"""Work of engines that no reply shows."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(slots=True)
class Extra:
    """Asked for so that handoffs wait less; a generation would have done without."""

    overlaps: int = 0
    """Segments that had begun when they were handed over."""
    overlaps_dropped: int = 0
    """Begun, and not handed over."""
    warm_ups: int = 0
    warm_ups_cut: int = 0
    """By a handoff, a failure or the end."""
    tokens: int = 0
    """Decoded for nothing, as far as they were read."""

    def __add__(self, other: Extra) -> Extra:
        return Extra(*map(sum, zip(astuple(self), astuple(other), strict=True)))
