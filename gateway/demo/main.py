"""`relaygen demo`: starts two real engines and the gateway, shows one reply, compares, stays up."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from openai import OpenAIError
from rich.console import Console

from gateway.demo.ask import Target
from gateway.demo.compare import Plan, compare
from gateway.demo.paths import bundled_policy
from gateway.demo.problems import problems
from gateway.demo.processes import StartError, gateway, llamacpp_engine, port_is_taken
from gateway.demo.report import markdown, summary, table
from gateway.demo.result import Comparison
from gateway.demo.screen import Screen
from relaygen.errors import PolicyError
from relaygen.policy import load_policy

_INTERRUPTED = 130  # 128 + SIGINT, as shells say it
_STREAMS = 4


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
    console = Console(no_color=True if options.no_color else None, highlight=False)
    interrupted, status = await _until_interrupted(_reported(options, console))
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


async def _reported(options: argparse.Namespace, console: Console) -> int:
    try:
        await _demo(options, Screen(console))
    except (StartError, PolicyError, OpenAIError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


async def _demo(options: argparse.Namespace, screen: Screen) -> None:
    path = options.policy or bundled_policy("tiny-pair")
    policy = load_policy(path.read_text(encoding="utf-8"), str(path))
    async with AsyncExitStack() as stack:
        with screen.doing("starting the large engine (llama.cpp, tiny-large)"):
            large = await stack.enter_async_context(llamacpp_engine("large", parallel=_STREAMS))
        with screen.doing("starting the small engine (llama.cpp, tiny-small)"):
            small = await stack.enter_async_context(llamacpp_engine("small", parallel=_STREAMS))
        port = _port(options.port, screen)
        with screen.doing("starting the gateway"):
            url = await stack.enter_async_context(gateway(path, large, small, port=port))
        screen.say(f"gateway {url}   large engine {large}   small engine {small}")
        plan = Plan(
            large=Target(f"{large}/v1", policy.large.model),
            small=Target(f"{small}/v1", policy.small.model),
            relay=Target(f"{url}/v1", policy.name),
            count=options.problems,
            seed=options.seed,
        )
        question = options.question or problems(1, options.seed)[0].question
        await screen.first_look(plan.relay, question)
        await _show_comparison(plan, options, screen)
        if not options.once:
            screen.hint(url, policy.name)
            await asyncio.Event().wait()


async def _show_comparison(plan: Plan, options: argparse.Namespace, screen: Screen) -> None:
    with screen.comparing(plan.count) as on_reply:
        found = await compare(plan, on_reply)
    if options.json:
        _write_json(options.json, found)
    if options.markdown:
        screen.say(markdown(found))
    else:
        screen.show(table(found))
        for line in summary(found):
            screen.say(line)


def _port(wanted: int, screen: Screen) -> int:
    """`wanted`, or 0 (a free one) with a notice where something listens there."""
    if wanted and port_is_taken(wanted):
        screen.say(f"port {wanted} is taken: the gateway takes a free one")
        return 0
    return wanted


def _write_json(path: Path, found: Comparison) -> None:
    path.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")


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
