"""What the time of one generation went to, and what it would have taken with no gateway between."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from relaygen.events import Role
from relaygen.usage import Usage


@dataclass(slots=True)
class Spent:
    """Seconds, by role where a role's engine took them.

    `first` is from asking for a decode to its first token (prefill, and the network); `decoding`
    from there to the last token read, of which there were so many `tokens` after the first reads.
    """

    queue: float = 0.0
    """Until its turn came."""
    prepare: float = 0.0
    """From there until all prompts were rendered."""
    first: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
    decoding: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
    tokens: Counter[Role] = field(default_factory=Counter)
    decodes: Counter[Role] = field(default_factory=Counter)
    total: float = 0.0
    """From the first decode to the end of the last one."""
    lasted: float = 0.0
    """The same where it was cut."""
    _began: float = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        """The last decode came to its own end."""
        self.cut()
        self.total = self.lasted

    def cut(self) -> None:
        """There are no more decodes; after the end it changes nothing."""
        if self._began and not self.total:
            self.lasted = time.perf_counter() - self._began

    def since_asked(self, moment: float) -> float:
        """From the request to a moment of its decodes, by time.perf_counter()."""
        return self.queue + self.prepare + moment - self._began

    @property
    def own(self) -> float:
        """What no engine took of the time from the first decode on."""
        return max(0.0, self.lasted - sum(self.first.values()) - sum(self.decoding.values()))

    def phases(self) -> Iterator[tuple[str, float]]:
        """All of the time, by what it went to."""
        yield "queue", self.queue
        yield "prepare", self.prepare
        for role in Role:
            yield f"prefill_{role}", self.first[role]
            yield f"decode_{role}", self.decoding[role]
        yield "own", self.own

    def add(self, role: Role, first: float, tokens: int, seconds: float) -> None:
        """A decode is over."""
        self.first[role] += first
        self.decoding[role] += seconds
        self.tokens[role] += tokens
        self.decodes[role] += 1

    def ideal(self, usage: Usage) -> float:
        """The engines' own first-token times, and each kept token at its model's own speed."""
        kept = {Role.LARGE: usage.large_tokens, Role.SMALL: usage.small_tokens}
        seconds = sum(self.first.values())
        for role, count in kept.items():
            if self.tokens[role]:
                later = max(0, count - self.decodes[role])
                seconds += later * self.decoding[role] / self.tokens[role]
        return seconds

    def efficiency(self, usage: Usage) -> float | None:
        """Ideal over actual time, 0..1; None where it was cut."""
        return min(1.0, self.ideal(usage) / self.total) if self.total else None


def spent_object(spent: Iterable[tuple[Spent, Usage]]) -> dict[str, Any]:
    """`usage.relaygen.spent`, in milliseconds; of several choices, side by side, the sums."""
    found = list(spent)
    total = sum(one.total for one, _ in found)
    ideal = sum(min(one.total, one.ideal(usage)) for one, usage in found)
    first = {role: sum(one.first[role] for one, _ in found) for role in Role}
    decoding = {role: sum(one.decoding[role] for one, _ in found) for role in Role}
    own = total - sum(first.values()) - sum(decoding.values())
    return {
        "queue_ms": _ms(max((one.queue for one, _ in found), default=0.0)),
        "prepare_ms": _ms(max((one.prepare for one, _ in found), default=0.0)),
        "prefill_ms": {role.value: _ms(first[role]) for role in Role},
        "decode_ms": {role.value: _ms(decoding[role]) for role in Role},
        "other_ms": _ms(max(0.0, own)),
        "total_ms": _ms(total),
        "ideal_ms": _ms(ideal),
        "efficiency": round(ideal / total, 4) if total else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
