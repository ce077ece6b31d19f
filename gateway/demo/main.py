"""The command `relaygen demo`: its flags, its exit status, and what Ctrl-C does."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

_INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `relaygen demo`."""
    add = parser.add_argument
    add("--once", action="store_true", help="exit after the comparison")
    add("--problems", type=_positive, default=24, metavar="N", help="to compare on (default 24)")
    add("--seed", type=int, default=1, help="of the problems (default 1)")
    add("--port", type=int, default=8080, help="of the gateway (default 8080, else a free one)")
    add("--policy", type=Path, metavar="FILE", help="default: the bundled tiny-pair")
    add("--json", type=Path, metavar="FILE", help="write the comparison there")
    add("--markdown", action="store_true", help="print the comparison as Markdown")
    add("--question", metavar="TEXT", help="for the first look (default: one of the problems)")
    add("--no-color", action="store_true", help="no colours (as with NO_COLOR set)")


async def run(options: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status: 0, 1 with a reason shown, 130 after Ctrl-C.

    However it ends, engines and gateway have ended before it returns.
    """
    from rich.console import Console  # here, as other commands need not wait for these

    from gateway.demo.tour import tour

    console = Console(no_color=True if options.no_color else None, highlight=False)
    interrupted, status = await _until_interrupted(tour(options, console))
    if interrupted:
        console.print("\nstopped")
        return _INTERRUPTED
    return status


async def _until_interrupted(work: Coroutine[Any, Any, int]) -> tuple[bool, int]:
    """(whether SIGINT or SIGTERM cancelled `work`, else its result)."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    signals = (signal.SIGINT, signal.SIGTERM)
    interrupts = 0

    def interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        task.cancel()

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        return False, await task
    except asyncio.CancelledError:
        if not interrupts:
            raise
        return True, _INTERRUPTED
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main() -> int:
    """Runs the demo on its own: `python -m gateway.demo.main`."""
    parser = argparse.ArgumentParser(prog="relaygen demo", description=__doc__)
    add_arguments(parser)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
