"""The report of a calibration: one HTML page, PNG pictures, tables in the terminal."""

from __future__ import annotations

from pathlib import Path

from gateway.calibrate.report.evidence import Evidence, Example, Prefix
from gateway.calibrate.report.page import html
from gateway.calibrate.report.plots import MissingExtraError, plots
from gateway.calibrate.report.tables import tables

__all__ = ["Evidence", "Example", "MissingExtraError", "Prefix", "tables", "write_report"]


def write_report(evidence: Evidence, folder: Path) -> list[Path]:
    """Writes report.html and the pictures; returns their paths, the page first.

    The folder is made where there is none. MissingExtraError, after the page is written, where
    matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(html(evidence), encoding="utf-8")
    return [page, *plots(evidence, folder)]
