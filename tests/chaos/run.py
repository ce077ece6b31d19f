"""Many generations while their engines break, and the proof that none is lost or falsified.

    python -m tests.chaos.run --generations 1000 --seed 1

Status 1 if anything was lost: the last lines say what.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.clients import Client, Outcome, generations, plain_session, references
from tests.chaos.growth import Sample, sample
from tests.chaos.outcomes import Verdict
from tests.chaos.proxy import Fired
from tests.chaos.schedule import Peace, Schedule, Scope
from tests.chaos.transcripts import Question
from tests.chaos.world import POLICY, RESUMES, Running, Setting, World, gateway_process, world

WARM = 100
"""Generations until growth counts."""
GONE_S = 1.0
_SETTLE_S = 15.0
"""Kept connections are let go after 4 s, looked for every 4 s."""
_POLL_S = 0.02
_RSS_MIB = 8.0
"""What the allocator may have kept of a burst; a leak of 10 KiB a generation would be more."""


@dataclass(frozen=True, slots=True)
class Run:
    generations: int = 1000
    seed: int = 1
    rate: float = 0.05
    scope: Scope = "decodes"
    at_once: int = 48
    questions: int = 60
    setting: Setting = field(default_factory=Setting)
    equal: float = 0.99 if RESUMES else 0.0
    """The share of generations that must come through."""


@dataclass(slots=True)
class Result:
    outcomes: list[Outcome]
    fired: list[tuple[Fired, int | None]]
    """Faults, and the trials that they struck."""
    left_open: int
    """Upstream connections with an unfinished decode, a second after the last generation."""
    strays: list[str]
    samples: list[Sample]
    replicas: int
    seconds: float

    def count(self, verdict: Verdict) -> int:
        return sum(outcome.verdict is verdict for outcome in self.outcomes)

    def problems(self, run: Run) -> list[str]:
        wrong = [o for o in self.outcomes if o.verdict is Verdict.WRONG]
        said = [f"WRONG: {o.question.text} {o.why}" for o in wrong]
        said += [f"an engine was asked to go on from {stray}" for stray in self.strays]
        if self.count(Verdict.EQUAL) < run.equal * len(self.outcomes):
            said.append(f"fewer than {run.equal:.0%} of the generations came through")
        if self.left_open:
            said.append(f"{self.left_open} unfinished decodes left open")
        return [*said, *self._growth()]

    def _growth(self) -> list[str]:
        if len(self.samples) < 2:
            return []
        early, late = self.samples[0], self.samples[-1]
        grown = {
            f"memory grew from {early.rss_mib:.1f} to {late.rss_mib:.1f} MiB": late.rss_mib
            - early.rss_mib
            > _RSS_MIB,
            f"{late.upstream} connections to engines kept for nothing": not late.calm(
                self.replicas
            ),
            f"file descriptors grew from {early.fds} to {late.fds}": late.fds > early.fds,
            f"threads grew from {early.threads} to {late.threads}": late.threads > early.threads,
        }
        return [what for what, holds in grown.items() if holds]


async def perform(run: Run, folder: Path, each: Callable[[Outcome], None]) -> Result:
    """The whole of it, against a gateway in a process of its own."""
    async with (
        world(run.setting) as made,
        gateway_process(folder, run.setting, made) as running,
    ):
        return await _perform(run, made, running, each)


async def _perform(
    run: Run, made: World, running: Running, each: Callable[[Outcome], None]
) -> Result:
    async with plain_session() as session:
        client = Client(session, running.url, POLICY)
        expected = await references(client, range(run.questions), run.at_once)
    made.plan(Schedule(run.seed, run.rate, run.scope))
    started = time.perf_counter()
    samples: list[Sample] = []
    outcomes: list[Outcome] = []
    for first, last in ((0, WARM), (WARM, run.generations)):
        trials = range(first, min(last, run.generations))
        asked = [Question(trial % run.questions, trial) for trial in trials]
        async with plain_session() as session:
            client = Client(session, running.url, POLICY)
            outcomes += await generations(client, asked, expected, run.at_once, each)
        left_open = await left_after(made, GONE_S)
        samples.append(await _settled(running.pid, made))
    seconds = time.perf_counter() - started
    made.plan(Peace())
    replicas = len(made.all_proxies)
    return Result(outcomes, struck(made), left_open, made.strays, samples, replicas, seconds)


def struck(made: World) -> list[tuple[Fired, int | None]]:
    fired = [one for proxy in made.all_proxies for one in proxy.fired]
    return [(one, made.trial_of(one.request)) for one in fired]


async def left_after(made: World, seconds: float) -> int:
    """Unfinished decodes on open connections, after at most `seconds`."""
    end = time.perf_counter() + seconds
    while made.unfinished and time.perf_counter() < end:
        await asyncio.sleep(_POLL_S)
    return made.unfinished


async def _settled(pid: int, made: World) -> Sample:
    """Once kept connections have outlived their time, and what is just closing has closed."""
    end = time.perf_counter() + _SETTLE_S
    now = sample(pid, made.open_connections)
    while not now.calm(len(made.all_proxies)) and time.perf_counter() < end:
        await asyncio.sleep(_POLL_S)
        now = sample(pid, made.open_connections)
    return now


# ---- the command --------------------------------------------------------------------------------


def main() -> int:
    from tests.chaos.report import Progress, print_report

    run = _run(_parser().parse_args())
    with tempfile.TemporaryDirectory() as folder, Progress(run.generations) as progress:
        result = asyncio.run(perform(run, Path(folder), progress))
    print_report(run, result)
    return 1 if result.problems(run) else 0


def _run(options: argparse.Namespace) -> Run:
    return Run(
        generations=options.generations,
        seed=options.seed,
        rate=options.rate,
        scope=options.scope,
        at_once=options.clients,
        setting=Setting(options.dialects, options.handoff),
        equal=options.equal,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.run", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--generations", type=int, default=1000, metavar="N", help="default %(default)s")
    add("--seed", type=int, default=1, metavar="N", help="of the faults (default %(default)s)")
    add("--rate", type=float, default=0.05, metavar="P", help="faults an answer (default 0.05)")
    add("--scope", choices=("decodes", "requests"), default="decodes", help="what faults strike")
    add("--clients", type=int, default=48, metavar="N", help="at once (default %(default)s)")
    add("--dialects", default="vllm", metavar="LARGE[:SMALL]", help="default %(default)s")
    add("--handoff", choices=("auto", "tokens", "text"), default="auto")
    add("--equal", type=float, default=Run().equal, metavar="SHARE", help="that must come through")
    return parser


if __name__ == "__main__":
    sys.exit(main())
