"""The table of cases: none without a test, no test without its reports and what it catches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from tests.cases import NUMBERS, Case

REPORT = re.compile(r"[\w.-]+/[\w.-]+(#\d+| [\w./]+\.py)")  # a thread, or the source itself


def cases() -> Iterator[tuple[Case, Callable[..., object]]]:
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = import_module(f"tests.cases.{file.stem}")
        for test in vars(module).values():
            for found in getattr(test, "cases", ()):
                yield found, test


def test_every_case_has_a_test() -> None:
    assert {found.number for found, _ in cases()} == NUMBERS


def test_every_test_of_a_case_names_its_reports_and_what_it_catches() -> None:
    for found, test in cases():
        assert found.reports, test
        assert all(REPORT.fullmatch(report) for report in found.reports), test
        assert (test.__doc__ or "").startswith("Catches "), test
