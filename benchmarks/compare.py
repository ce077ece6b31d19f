"""Fails where the gateway became slower than in a recorded run, as a ratio to the engines alone.

    make bench-compare [ARGS="--quick"]
    python benchmarks/compare.py --record    # keeps this run as the base

Ratios to the direct run are compared, as those of one run hardly depend on the machine. Exit status
1 where one is over 15 % worse than in benchmarks/base.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.cli import main as relaygen

BASE = Path(__file__).with_name("base.json")
WORSE = 1.15
SCENARIOS = "first_token,throughput,growth"


def ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """By row, the higher the worse: a rate's is turned round."""
    found = {}
    for row in report["rows"]:
        if row["ratio"]:
            rate = row["unit"] == "tokens/s"
            found[f"{row['scenario']}: {row['what']}"] = 1 / row["ratio"] if rate else row["ratio"]
    return found


def regressions(base: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """What became worse than it may, and what is no longer measured."""
    lost = [f"{name}: not measured" for name in base if name not in now]
    return lost + [
        f"{name}: {now[name]:.3g} times the direct run, {base[name]:.3g} in the base"
        for name in base
        if name in now and now[name] > WORSE * base[name]
    ]


def measured(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        relaygen(["bench", "--json", str(path), "--only", SCENARIOS, *arguments])
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="keep this run as the base")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    options = parser.parse_args()
    report = measured(["--quick"] if options.quick else [])
    if options.record:
        BASE.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return 0
    if not BASE.exists():
        print(f"{BASE} is not there: record a run on this machine first, with --record")
        return 2
    base = json.loads(BASE.read_text(encoding="utf-8"))
    worse = regressions(ratios(base), ratios(report))
    for line in worse:
        print(f"slower: {line}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
