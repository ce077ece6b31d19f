"""What a calibration report is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relaygen.calibration.projection import Replayed, Speeds
from relaygen.calibration.segments import Span
from relaygen.calibration.selection import Selection
from relaygen.calibration.traces import Scored
from relaygen.events import Role


@dataclass(frozen=True, slots=True)
class Prefix:
    """The best so many of the chosen cues, and what the traces become with exactly these."""

    cues: tuple[str, ...]
    replayed: Replayed

    @property
    def added(self) -> str:
        """The cue that the prefix before it lacks, "" where there is none."""
        return self.cues[-1] if self.cues else ""

    @property
    def small_share(self) -> float:
        """Of all tokens, 0..1."""
        return 1.0 - self.replayed.large_share

    @property
    def handoffs(self) -> float:
        """A trace."""
        return self.replayed.handoffs / self.replayed.traces if self.replayed.traces else 0.0


@dataclass(frozen=True, slots=True)
class Example:
    """One trace to look at, and who would write which of its tokens (`projection.roles`)."""

    scored: Scored
    roles: tuple[tuple[Role, Span], ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a report shows. `prefixes` go from no cue to all that were chosen; `provenance` is
    shown in its own order; `policy` is the YAML that was written."""

    selection: Selection
    prefixes: tuple[Prefix, ...]
    speeds: Speeds
    policy: str
    examples: tuple[Example, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    title: str = "Calibration"

    @property
    def cues(self) -> tuple[str, ...]:
        return tuple(cue.cue for cue in self.selection.chosen)

    @property
    def expected(self) -> Prefix:
        """The prefix that the policy has: the one of the chosen cues, else the longest."""
        chosen = set(self.cues)
        for prefix in self.prefixes:
            if set(prefix.cues) == chosen:
                return prefix
        return max(self.prefixes, key=lambda prefix: len(prefix.cues), default=_NOTHING)


_NOTHING = Prefix((), Replayed())
