"""The report's tables in a terminal, and where there is none."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from gateway.calibrate.report import Evidence, tables
from gateway.calibrate.report.wording import decimal, interval, probability
from tests.gateway.calibrate.reporting import by_hand, evidence, statistic


def printed(found: Evidence, width: int = 80, *, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    for table in tables(found):
        console.print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_candidate_keeps_all_its_columns(width: int) -> None:
    found = evidence()
    lines = printed(found, width).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    for cue in found.selection.cues:
        line = next(line for line in lines if line.startswith(f"{cue.cue} "))
        for fact in (
            "yes" if cue.chosen else "no, ",
            str(cue.count),
            str(cue.traces),
            decimal(cue.tokens, 1),
            decimal(cue.compared.mean),
            interval(cue.compared.low, cue.compared.high),
            probability(cue.corrected),
        ):
            assert f" {fact}" in line


def test_every_prefix_keeps_all_its_columns() -> None:
    found = by_hand(statistic("Thus"), statistic("So"))
    text = " ".join(printed(found).split())
    assert "0 (none) 40.0 % 100.0 % 8.0" in text
    assert "2 So 42.0 % 100.0 % 8.0" in text


def test_reasons_are_told_once_below_the_table() -> None:
    chance = "may be chance (p = 0.{} after Holm)"
    text = printed(
        by_hand(
            statistic("Wait", chosen=False),
            statistic("Hmm", chosen=False),
            statistic("Oh", chosen=False, why=chance.format(123), corrected=0.123),
            statistic("Ah", chosen=False, why=chance.format(456), corrected=0.456),
        )
    )
    assert text.count("too often wrong (below 0.95)") == 1
    assert text.count("may be chance") == 1 and "0.123" in text and "0.456" in text


def test_hidden_cues_have_a_column_where_there_are_some() -> None:
    assert "hides" not in printed(by_hand(statistic("Thus"))).split("A cue hides")[0]
    text = printed(by_hand(statistic("Let me double-check", hides=("Let me double-check that,",))))
    assert "hides" in text.split("A cue hides")[0]


def test_the_result_in_words_comes_last() -> None:
    text = " ".join(printed(by_hand(statistic("Thus"))).split())
    assert "1 of 1 candidate cues are chosen: “Thus”." in text
    assert text.endswith("(break-even).")


def test_nothing_in_a_cue_acts_on_the_terminal() -> None:
    odd = by_hand(statistic("[red]x[/red]\x1b[2J\n"))
    text = printed(replace(odd, provenance={"[b]k": "\x1b]0;t\x07"}), 200, terminal=True)
    assert r"[red]x[/red]\x1b[2J\n" in text and r"[b]k" in text
    assert "\x1b[2J" not in text and "\x1b]" not in text


def test_unknown_intervals() -> None:
    assert "n/a" in printed(by_hand(statistic("Oh", chosen=False, known=False)))
