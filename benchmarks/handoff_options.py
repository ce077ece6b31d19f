"""What `overlap` and `warm_every_tokens` bring, and cost, with the tiny pair on real engines.

    python benchmarks/handoff_options.py [--vllm] [--problems 24] [--seed 7] [--warm-every 8]

One run: the large model alone and the policy with each of the options, taking turns problem by
problem. A slot of llama.cpp keeps its last reply: each way asks a problem long after the others.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from openai import AsyncOpenAI
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.bench.stage import handoffs_of
from gateway.demo.paths import bundled_policy
from gateway.demo.problems import Problem, is_right, problems
from gateway.demo.processes import gateway, tiny_pair
from tests.integration.vllm_server import vllm_engine

LARGE = "large alone"


@dataclass
class Way:
    """One policy, and what came of it."""

    name: str
    options: dict[str, Any]
    wall_s: list[float] = field(default_factory=list)
    right: int = 0
    extra: Counter[str] = field(default_factory=Counter)
    handoff_ms: dict[str, float] = field(default_factory=dict)


def ways(every: int) -> list[Way]:
    overlap, warm = {"overlap": True}, {"warm_every_tokens": every}
    return [
        Way(LARGE, {}),
        Way("relay", {}),
        Way("overlap", overlap),
        Way(f"warm_every_tokens: {every}", warm),
        Way("both", overlap | warm),
    ]


@asynccontextmanager
async def engines(*, vllm: bool) -> AsyncIterator[tuple[str, str]]:
    async with AsyncExitStack() as stack:
        if vllm:
            large = await stack.enter_async_context(vllm_engine("large", core=0))
            yield large, await stack.enter_async_context(vllm_engine("small", core=1))
        else:
            yield await stack.enter_async_context(tiny_pair())


def policy_files(folder: Path, found: list[Way]) -> list[Path]:
    """A policy for each way, of its name."""
    base = yaml.safe_load(bundled_policy("tiny-pair").read_text())
    files = []
    for number, way in enumerate(found):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump({**base, "name": way.name, **way.options}))
    return files


async def ask(client: AsyncOpenAI, way: Way, problem: Problem, salt: dict[str, str]) -> None:
    mode = {"relaygen": {"mode": "large"}} if way.name == LARGE else {}
    loop = asyncio.get_running_loop()
    began = loop.time()
    reply = await client.chat.completions.create(
        model=way.name,
        messages=[{"role": "user", "content": problem.question}],
        temperature=0,
        max_tokens=1024,
        extra_body={**mode, **salt},
    )
    way.wall_s.append(loop.time() - began)
    way.right += is_right(problem, reply.choices[0].message.content or "")
    assert reply.usage is not None
    way.extra.update((reply.usage.model_extra or {})["relaygen"].get("extra", {}))


async def run(options: argparse.Namespace) -> list[Way]:
    found, asked = ways(options.warm_every), problems(options.problems, options.seed)
    with TemporaryDirectory() as folder:
        first, *others = policy_files(Path(folder), found)
        flags = [part for file in others for part in ("--policy", str(file))]
        async with (
            engines(vllm=options.vllm) as (large, small),
            gateway(first, large, small, flags=flags) as url,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client,
        ):
            for way in found:
                await ask(client, Way(way.name, {}), asked[-1], {})
            for turn in range(len(asked)):
                for place in range(len(found)):
                    number = (turn + place) % len(found)
                    index = (turn + number * max(1, len(asked) // len(found))) % len(asked)
                    salt = {"cache_salt": found[number].name} if options.vllm else {}
                    await ask(client, found[number], asked[index], salt)
            for name, by_role in (await handoffs_of(url)).items():
                [way] = [way for way in found if way.name == name]
                way.handoff_ms = {role: s / count * 1e3 for role, (count, s) in by_role.items()}
    return found


_COLUMNS = ("", "right", "wall s, mean", "of large", "of relay", "to large ms", "to small ms",
            "overlaps", "dropped", "warm-ups", "cut", "tokens")  # fmt: skip
_EXTRA = ("overlaps", "overlaps_dropped", "warm_ups", "warm_ups_cut", "tokens")


def table(found: list[Way]) -> Table:
    shown = Table(*_COLUMNS, box=box.MARKDOWN)
    bases = [mean(way.wall_s) for way in found[:2]]
    for way in found:
        wall = mean(way.wall_s)
        times = [way.handoff_ms.get(role) for role in ("large", "small")]
        shown.add_row(
            way.name,
            str(way.right),
            f"{wall:.3f}",
            *(f"{wall / base:.3f}" for base in bases),
            *("" if ms is None else f"{ms:.2f}" for ms in times),
            *(str(way.extra[key]) for key in _EXTRA),
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm", action="store_true", help="on vLLM (CPU build) and not llama.cpp")
    parser.add_argument("--problems", type=int, default=24, metavar="N")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--warm-every", type=int, default=8, metavar="TOKENS")
    Console().print(table(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
