"""Whether calibrated cues beat chance: accuracy at equal small-model share on the tiny pair.

    .venv/bin/python benchmarks/calibrated_cues.py --policy FILE [--problems 200 --seed 77]

On two llama.cpp engines, temperature 0, fresh problems. All are thinned to the same share of tokens
by the small model (a cue that fires is heeded with a fixed chance), so that only the place of the
handoff differs:

  calibrated   the cues of the policy
  random cues  as many, drawn anew for each tenth of the problems from what sentences begin with
  random       after any sentence end, by chance
  worst        as many, from the end of the ranking
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.backends import ReplicaSet
from gateway.connections import Connections
from gateway.demo.problems import Problem, is_right, problems
from gateway.demo.processes import tiny_pair
from gateway.generation import Relaying, prepared
from gateway.openai_api import parse_chat
from gateway.policies import read_policy
from gateway.settings import Backend, HealthSettings, ResumeSettings, Timeouts
from gateway.tracing import ReplySpan
from relaygen.automaton import Automaton
from relaygen.boundaries import BoundaryMatcher, BoundarySet
from relaygen.cues import CueMatcher, CueSet, Cut
from relaygen.cutter import Cutter
from relaygen.events import Delta, Failed
from relaygen.policy import Policy
from relaygen.state import State

MAX_TOKENS = 1024
TENTHS = 10
DRAWS = 2000


class Thinned:
    """A cue matcher that heeds a cue with a fixed chance."""

    def __init__(self, inner: Any, chance: float, rng: random.Random) -> None:
        self._inner, self._chance, self._rng = inner, chance, rng

    def reset(self, before: str = "") -> None:
        self._inner.reset(before)

    def push(self, text: str, *, armed: bool = True) -> Cut | None:
        cut: Cut | None = self._inner.push(text, armed=armed)
        return cut if cut is not None and self._rng.random() < self._chance else None


class Switching(Cutter):
    """Ends large segments by another matcher, which reads every token."""

    def __init__(self, policy: Policy, cues: Any) -> None:
        super().__init__(policy)
        self._cues = cues

    def finder(self, state: State) -> tuple[Automaton, int] | None:
        return None if state is State.LARGE else super().finder(state)


class SentenceEnds:
    """Takes every sentence end of the large model's text for a cue."""

    def __init__(self, boundaries: BoundarySet) -> None:
        self._matcher = BoundaryMatcher(boundaries)

    def reset(self, before: str = "") -> None:
        self._matcher.reset(before)

    def push(self, text: str, *, armed: bool = True) -> Cut | None:
        cut = self._matcher.push(text)
        return Cut("", len(text)) if cut is not None and armed else None


Matchers = Callable[[int, random.Random], Any]
"""From a problem's number to the matcher of the inner cues."""


@dataclass
class Way:
    """One way to switch, and what came of it."""

    name: str
    matcher: Matchers
    chance: float = 1.0
    right: list[bool] = field(default_factory=list)
    large: int = 0
    small: int = 0
    handoffs: int = 0

    @property
    def share(self) -> float:
        return self.small / max(1, self.small + self.large)


class Bench:
    def __init__(self, policy: Policy, backends: dict[str, ReplicaSet], seed: int) -> None:
        self.policy, self.seed = policy, seed
        self.relaying = Relaying(backends, ResumeSettings(), first_token_s=60.0)

    async def ask(self, way: Way, number: int, problem: Problem) -> None:
        body = {
            "model": self.policy.name,
            "messages": [{"role": "user", "content": problem.question}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        rng = random.Random(f"{self.seed}/{way.name}/{number}")
        async with prepared(self.policy, parse_chat(body), self.relaying, ReplySpan({})) as [
            generation
        ]:
            session = generation.session
            thinned = Thinned(way.matcher(number, rng), way.chance, rng)
            session._cutter = Switching(self.policy, thinned)
            text = []
            async for outputs in generation.run():
                text += [o.text for o in outputs if isinstance(o, Delta)]
                if isinstance(outputs[-1], Failed):
                    raise RuntimeError(outputs[-1].message)
        usage = session.usage
        way.right.append(is_right(problem, "".join(text)))
        way.large += usage.large_tokens
        way.small += usage.small_tokens
        way.handoffs += usage.handoffs


async def tuned(bench: Bench, way: Way, target: float, trial: Sequence[Problem]) -> None:
    """Sets the chance that brings the share to `target` on some other problems, if one does."""
    low, high = 0.0, 1.0
    for _ in range(5):
        way.chance = (low + high) / 2 if (low, high) != (0.0, 1.0) or way.share else 1.0
        probe = replace(way, right=[], large=0, small=0, handoffs=0)
        for number, problem in enumerate(trial):
            await bench.ask(probe, number, problem)
        if way.chance == 1.0 and probe.share <= target:
            return
        low, high = (low, way.chance) if probe.share > target else (way.chance, high)
        way.large, way.small = probe.large, probe.small
    way.large = way.small = 0


def interval(right: Sequence[bool]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    rng = random.Random(0)
    means = sorted(sum(rng.choices(right, k=len(right))) / len(right) for _ in range(DRAWS))
    return means[int(0.025 * DRAWS)], means[int(0.975 * DRAWS)]


def ways(policy: Policy, begins: Sequence[str], ranked: Sequence[str], seed: int) -> list[Way]:
    count = len(policy.cues.words)
    boundaries = policy.boundary_set

    def drawn(number: int, _: random.Random) -> CueMatcher:
        tenth = random.Random(f"{seed}/cues/{number % TENTHS}")
        return CueMatcher(CueSet(tenth.sample(list(begins), min(count, len(begins)))))

    worst = CueSet(list(ranked)[-count:])
    return [
        Way("calibrated", lambda n, r: CueMatcher(policy.cue_set)),
        Way("random cues", drawn),
        Way("random", lambda n, r: SentenceEnds(boundaries)),
        Way("worst", lambda n, r: CueMatcher(worst)),
    ]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=200, metavar="N")
    parser.add_argument("--trial", type=int, default=20, metavar="N", help="to find shares by")
    parser.add_argument("--seed", type=int, default=77)
    options = parser.parse_args()
    policy = read_policy(options.policy)
    statistics = policy.calibration["cues"]
    ranked = list(statistics)
    singles = [cue for cue in ranked if " " not in cue and not cue.endswith(",")]
    asked = problems(options.problems, options.seed)
    trial = problems(options.trial, options.seed + 1)
    async with tiny_pair() as (large, small), Connections(Timeouts()) as session:
        backends = {
            role: ReplicaSet(role, Backend(urls=(f"{url}/v1",)), session, 5.0, HealthSettings())
            for role, url in (("large", large), ("small", small))
        }
        bench = Bench(policy, backends, options.seed)
        all_ways = ways(policy, singles, singles, options.seed)
        with Progress(console=Console(stderr=True)) as progress:
            await measured(bench, all_ways, asked, trial, progress)
    shown(all_ways)


async def measured(
    bench: Bench,
    all_ways: list[Way],
    asked: Sequence[Problem],
    trial: Sequence[Problem],
    progress: Progress,
) -> None:
    shares = {}
    for way in all_ways:  # what each brings unthinned: the least of them is the common share
        for number, problem in enumerate(trial):
            await bench.ask(way, number, problem)
        shares[way.name] = way.share
        way.right, way.large, way.small, way.handoffs = [], 0, 0, 0
    target = min(shares.values())
    for way in all_ways:
        if shares[way.name] > target * 1.02:
            way.chance = 0.5
            await tuned(bench, way, target, trial)
            way.right, way.large, way.small, way.handoffs = [], 0, 0, 0
    task = progress.add_task("problems", total=len(asked) * len(all_ways))
    for number, problem in enumerate(asked):
        for way in all_ways:
            await bench.ask(way, number, problem)
            progress.advance(task)


def shown(all_ways: list[Way]) -> None:
    table = Table()
    for column in ("way", "right", "95 %", "small share", "handoffs a reply", "heeded"):
        table.add_column(column)
    for way in all_ways:
        low, high = interval(way.right)
        table.add_row(
            way.name,
            f"{sum(way.right)}/{len(way.right)}",
            f"{low:.3f} to {high:.3f}",
            f"{way.share:.1%}",
            f"{way.handoffs / len(way.right):.1f}",
            f"{way.chance:.2f}",
        )
    Console().print(table)


asyncio.run(main())
