"""The report in the terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from string import ascii_lowercase

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.calibrate.report import grids, summary
from gateway.calibrate.report.evidence import Evidence
from gateway.calibrate.report.grids import Column, Grid

_FIGURE = re.compile(r" \([^()]*=[^()]*\)$")  # "(p = 0.12 after Holm)", which has its own column
_NO = "no: "
_SHORT = {
    "difference to the whole, 95 %": "difference,\n95 %",
    "tokens a segment": "tokens\na seg-\nment",
    "segments": "seg-\nments",
    "handoffs a trace": "handoffs\na trace",
}


def tables(evidence: Evidence) -> list[RenderableType]:
    """The candidates, what the best of them bring, where it comes from, and it all in words.

    They keep all columns at 80 columns' width, with or without colours.
    """
    return [
        _drawn(_with_footnotes(grids.candidates(evidence.selection))),
        _drawn(grids.prefixes(evidence)),
        _drawn(grids.provenance(evidence), headed=False),
        Group(*(Text(line) for line in summary.sentences(evidence))),
    ]


def _drawn(grid: Grid, *, headed: bool = True) -> RenderableType:
    table = Table(
        title=Text(grid.title, "italic"), title_justify="left", box=None, padding=(0, 1, 0, 0),
        show_header=headed,
    )  # fmt: skip
    kept = [i for i in range(len(grid.columns)) if _told(grid, i)]
    for i in kept:
        column = grid.columns[i]
        table.add_column(
            Text(_head(column)),
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric,
            overflow="fold",
            min_width=_least(grid, i) if column.numeric else 3,
        )
    for number, row in enumerate(grid.rows):
        style = "bold" if number in grid.marked else ""
        table.add_row(*(Text(row[i]) for i in kept), style=style)
    notes = [Text(line, "dim") for line in grid.note.splitlines()]
    return Group(table, *notes, Text(""))


def _told(grid: Grid, column: int) -> bool:
    """Whether a column says anything: none hides another in many a run."""
    return not grid.rows or any(row[column] for row in grid.rows)


def _head(column: Column) -> str:
    return _SHORT.get(column.name, column.name.replace(" ", "\n"))


def _least(grid: Grid, column: int) -> int:
    return max((len(row[column]) for row in grid.rows), default=1)


def _with_footnotes(grid: Grid) -> Grid:
    """Reasons are said once, below the table: a row stays a line."""
    reasons: list[str] = []
    rows = [(row[0], _answer(row[1], reasons), *row[2:]) for row in grid.rows]
    notes = [f"no, {_letter(i)}: {reason}" for i, reason in enumerate(reasons)]
    return replace(grid, rows=tuple(rows), note="\n".join([*notes, grid.note]))


def _answer(cell: str, reasons: list[str]) -> str:
    if not cell.startswith(_NO):
        return cell
    reason = _FIGURE.sub("", cell.removeprefix(_NO))
    if reason not in reasons:
        reasons.append(reason)
    return f"no, {_letter(reasons.index(reason))}"


def _letter(index: int) -> str:
    return ascii_lowercase[index] if index < len(ascii_lowercase) else str(index)
