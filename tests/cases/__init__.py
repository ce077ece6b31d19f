"""Faults that were reported of other streaming proxies and engines, each as a test of ours.

A test carries its case's number and the public reports (repository#number) by `case`; its docstring
says which shortcut it catches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])

NUMBERS = frozenset({1, 3, 4, 5, 6, 7, 9, *range(14, 27), *range(29, 34), *range(35, 39)})


@dataclass(frozen=True)
class Case:
    number: int
    reports: tuple[str, ...]


def case(number: int, *reports: str) -> Callable[[Test], Test]:
    """Marks a test as one of this case, first reported there. May be given more than once."""

    def mark(test: Test) -> Test:
        test.cases = (*getattr(test, "cases", ()), Case(number, reports))  # type: ignore[attr-defined]
        return test

    return mark
