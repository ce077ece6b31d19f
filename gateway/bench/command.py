"""`relaygen bench`: runs the scenarios, tells a table, writes it as JSON beside."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.bench.scenarios import SCENARIOS, Row, Size
from gateway.settings import SettingsError


def run(options: argparse.Namespace) -> int:
    """Exit status 0, whatever was measured: `make bench-compare` judges."""
    size = Size(rounds=1, scale=0.2) if options.quick else Size(rounds=3, scale=0.5)
    rows = asyncio.run(_rows(_chosen(options.only), size))
    Console().print(_table(rows))
    if options.json:
        content = {"machine": machine(), "rows": [row.record() for row in rows]}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _chosen(only: str | None) -> list[str]:
    names = only.split(",") if only else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        known = ", ".join(SCENARIOS)
        raise SettingsError(f"bench: --only: unknown {', '.join(unknown)}; there are {known}")
    return names


async def _rows(names: list[str], size: Size) -> list[Row]:
    rows = []
    for name in names:
        rows += await SCENARIOS[name](size)
    return rows


def machine() -> dict[str, Any]:
    """Where it was measured: numbers of two machines are not to be compared."""
    packages = ("relaygen", "aiohttp", "httptools", "msgspec", "orjson", "uvloop")
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _table(rows: list[Row]) -> Table:
    table = Table(title="What the gateway costs, in one run")
    for column in ("scenario", "what"):
        table.add_column(column)
    for column in ("value", "unit", "direct", "ratio", "budget"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        direct = "" if row.direct is None else _number(row.direct)
        table.add_row(
            row.scenario, row.what, _number(row.value), row.unit, direct, ratio, row.budget
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
