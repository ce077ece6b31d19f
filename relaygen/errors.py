"""The core's error tree.

RelayGenError
├── LocalMisuseError    the caller broke the session's protocol: a bug on our side
└── PolicyError         a policy file is wrong: the user's to mend, every problem named
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RelayGenError(Exception):
    """Root of what this package raises."""


class LocalMisuseError(RelayGenError):
    """The session was driven wrongly. What an engine sends never raises this."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a policy: where, what, and what to do."""

    source: str
    field: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.source}: {self.field}: {self.message}{remedy}"


class PolicyError(RelayGenError):
    """A policy that can't be used; `problems` holds all that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
