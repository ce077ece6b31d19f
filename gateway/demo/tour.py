"""The demo itself: starts two real engines and the gateway, shows one reply, compares, stays up."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

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

_STREAMS = 4  # that each engine serves at once


async def tour(options: argparse.Namespace, console: Console) -> int:
    """The whole demo; returns 0, or 1 with the reason shown."""
    try:
        await _tour(options, Screen(console))
    except (StartError, PolicyError, OpenAIError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


async def _tour(options: argparse.Namespace, screen: Screen) -> None:
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
