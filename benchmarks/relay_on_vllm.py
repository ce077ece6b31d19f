"""The tiny pair on two real vLLM servers (CPU build): large alone, small alone, relay, ideal.

    make bench-vllm [ARGS="--problems 24 --seed 7"]

One run, the modes taking turns, each under its own cache salt, so that none reads the prefix cache
that another filled.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.demo.ask import Target
from gateway.demo.compare import Plan, compare
from gateway.demo.paths import bundled_policy
from gateway.demo.processes import gateway
from gateway.demo.report import markdown
from gateway.demo.screen import Screen
from tests.integration.vllm_server import vllm_engine


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=24, metavar="N")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    screen = Screen(Console())
    async with (
        vllm_engine("large", core=0) as large,
        vllm_engine("small", core=1) as small,
        gateway(bundled_policy("tiny-pair"), large, small) as url,
    ):
        plan = Plan(
            large=Target(f"{large}/v1", "tiny-large"),
            small=Target(f"{small}/v1", "tiny-small"),
            relay=Target(f"{url}/v1", "tiny-pair"),
            count=options.problems,
            seed=options.seed,
            cache_salt=True,
        )
        with screen.comparing(plan.count) as on_reply:
            found = await compare(plan, on_reply)
    screen.say(markdown(found))


asyncio.run(main())
