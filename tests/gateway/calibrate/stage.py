"""Runs one stage in a process of its own, to be killed: python -m tests.gateway.calibrate.stage."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from gateway.calibrate.scoring import ScoreSettings, score
from gateway.calibrate.sides import Side
from gateway.calibrate.tracing import TraceSettings, trace


def main() -> None:
    given = json.loads(sys.argv[1])
    side = Side(given["url"], "model")
    if given["stage"] == "trace":
        asyncio.run(
            trace(
                TraceSettings(
                    Path(given["work"]), given["prompts"], side, samples=2, temperature=0,
                    max_tokens=100, concurrency=2,
                ),
                lambda done, total: None,
            )
        )  # fmt: skip
    else:
        settings = ScoreSettings(Path(given["work"]), "small", side, concurrency=2)
        asyncio.run(score(settings, lambda done, total: None))


if __name__ == "__main__":
    main()
