"""Five times more clients than limits.generations allows: what those that are served notice of it.

    make bench-overload [ARGS="--clients 500 --limit 100"]

The gateway, two simulated engines and the clients run in three processes. As many clients as the
limit allows are the measure; then far more come, at the same rate, to a gateway that refuses those
beyond (429) and to one that lets them wait. Exit status 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timed_engines import TRANSCRIPT
from gateway.demo.processes import HOST, child, free_port
from gateway.settings import Limits

BOUND = 1.2
"""Times and ratios to the unloaded run stay below this."""
FDS = 8
MEMORY_MIB = 48
HUNG_S = 120.0
POLICY = "pair"
QUEUES = "queue" in Limits.model_fields
TEXT = "".join(TRANSCRIPT).replace("<think>", "").replace("</think>", "")


# ---- clients ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    """One request: seconds from its being sent to the first text and to the end."""

    status: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    retry_after: str | None = None
    content: bytearray = field(default_factory=bytearray)

    @property
    def whole(self) -> bool:
        """Whether all of the text came, with its end."""
        events = self.content.split(b"\n\n")
        chunks = [json.loads(e[6:]) for e in events if e.startswith(b"data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ())]
        texts = [d.get("reasoning_content") or d.get("content") or "" for d in deltas]
        return b"data: [DONE]" in events and "".join(texts) == TEXT

    @property
    def refused(self) -> bool:
        return self.status == 429 and int(self.retry_after or 0) >= 1


async def _ask(session: aiohttp.ClientSession, url: str, wait_s: float, number: int) -> Sample:
    await asyncio.sleep(wait_s)
    sample = Sample()
    messages = [{"role": "user", "content": f"Question {number}"}]
    body = {"model": POLICY, "messages": messages, "stream": True}
    started = time.perf_counter()
    with suppress(TimeoutError, aiohttp.ClientError):
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            sample.retry_after = response.headers.get("Retry-After")
            async for part in response.content.iter_any():
                if not sample.first_s and b'content":"' in part:
                    sample.first_s = time.perf_counter() - started
                sample.content += part
            sample.status = response.status
    sample.total_s = time.perf_counter() - started
    return sample


async def crowd(url: str, clients: int, rate: float) -> tuple[list[Sample], float]:
    """So many clients, `rate` of them a second, each with one question; and the seconds of all."""
    timeout = aiohttp.ClientTimeout(total=HUNG_S)
    started = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        waits = (number / rate for number in range(clients))
        asked = [_ask(session, url, wait_s, number) for number, wait_s in enumerate(waits)]
        samples = await asyncio.gather(*asked)
    return samples, time.perf_counter() - started


# ---- the gateway --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    pid: int

    @property
    def fds(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @property
    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        return int(kib) / 1024

    async def fds_settled(self, wanted: int) -> int:
        """Open descriptors, once they are down to what is wanted, or after ten seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while self.fds > wanted:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.1)
        return self.fds


@asynccontextmanager
async def serving(
    folder: Path, engines: tuple[str, str], limits: dict[str, Any]
) -> AsyncIterator[Serving]:
    """The gateway as a process, ready."""
    policy = {
        "version": 1,
        "name": POLICY,
        "large": {"backend": "large", "model": "big"},
        "small": {"backend": "small", "model": "tiny"},
        "cues": {"words": ["Now"]},
        "slow": {"hold": False},  # both are as fast
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    (folder / "gateway.yaml").write_text(yaml.safe_dump({"limits": limits}))
    port = free_port()
    arguments = ["--config", str(folder / "gateway.yaml"), "--policy", str(folder / "policy.yaml")]
    arguments += ["--large", engines[0], "--small", engines[1]]
    arguments += ["--host", HOST, "--port", str(port)]
    async with child("the gateway", "gateway.demo.tether", "gateway", "serve", *arguments) as run:
        url = f"http://{HOST}:{port}"
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while not await _ready(session, url):
                if run.ended:
                    raise run.failure("ended while starting")
                await asyncio.sleep(0.05)
        yield Serving(url, run.process.pid)


async def _ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


# ---- what is found ------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """All rounds of one kind. Times in seconds."""

    clients: int
    served: int = 0
    refused: int = 0
    broken: int = 0
    walls: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    writing: list[float] = field(default_factory=list)

    def add(self, samples: Iterable[Sample], wall_s: float) -> None:
        self.walls.append(wall_s)
        for sample in samples:
            if sample.refused:
                self.refused += 1
            elif sample.status == 200 and sample.whole:
                self.served += 1
                self.first.append(sample.first_s)
                self.total.append(sample.total_s)
                self.writing.append(sample.total_s - sample.first_s)
            else:
                self.broken += 1

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "clients": self.clients,
            "rounds": len(self.walls),
            "served": self.served,
            "refused": self.refused,
            "broken": self.broken,
            "wall_s": statistics.median(self.walls),
        }
        for name in ("first", "total", "writing"):
            for part, value in _spread(getattr(self, name)).items():
                found[f"{name}_s_{part}"] = value
        return found


def _spread(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": 0.0, "p95": 0.0}
    return {"p50": statistics.median(values), "p95": statistics.quantiles(values, n=20)[-1]}


@dataclass(slots=True)
class Found:
    """Figures by run, the process's own, and every bound with whether it holds."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    process: dict[str, float] = field(default_factory=dict)
    bounds: list[tuple[str, float, float]] = field(default_factory=list)
    """What, the value, and the most that it may be."""

    def bound(self, what: str, value: float, most: float) -> None:
        self.bounds.append((what, value, most))

    def ratios(self, run: str, figures: Iterable[str]) -> None:
        for name in figures:
            base = self.runs["unloaded"][name]
            ratio = self.runs[run][name] / base if base else float("inf")
            self.bound(f"{run}: {name}, ratio to unloaded", ratio, BOUND)

    @property
    def holds(self) -> bool:
        return all(value <= most for _, value, most in self.bounds)


async def measure(options: argparse.Namespace, engines: tuple[str, str], folder: Path) -> Found:
    found = Found()
    limits = {"generations": options.limit, **({"queue": 0} if QUEUES else {})}
    async with serving(folder, engines, limits) as server:
        await _refusing(server, options, found)
    if QUEUES:
        limits |= {"queue": options.clients, "queue_seconds": HUNG_S}
        async with serving(folder, engines, limits) as server:
            await _queueing(server, options, found)
    return found


async def _refusing(server: Serving, options: argparse.Namespace, found: Found) -> None:
    """Unloaded and overloaded rounds take turns; a round of each goes before, unmeasured."""
    unloaded, refusing = Run(options.limit), Run(options.clients)
    for run in (unloaded, refusing):
        await crowd(server.url, run.clients, options.rate)
    fds = await server.fds_settled(FDS + 12)
    memory = server.memory_mib
    for _ in range(options.rounds):
        for run in (unloaded, refusing):
            run.add(*await crowd(server.url, run.clients, options.rate))
    settled = await server.fds_settled(fds)
    found.runs |= {"unloaded": unloaded.figures(), "refusing": refusing.figures()}
    _process(found, "refusing", (fds, settled), (memory, server.memory_mib))
    beyond = (options.clients - options.limit) * options.rounds
    found.bound("unloaded: not served", options.limit * options.rounds - unloaded.served, 0)
    found.bound("refusing: broken or hung", refusing.broken, 0)
    found.bound("refusing: |429 - those beyond|", abs(refusing.refused - beyond), 0)
    found.ratios("refusing", ("first_s_p50", "first_s_p95", "total_s_p50", "total_s_p95"))


async def _queueing(server: Serving, options: argparse.Namespace, found: Found) -> None:
    queueing = Run(options.clients)
    await crowd(server.url, 2 * options.limit, options.rate)
    fds, memory = await server.fds_settled(FDS + 12), server.memory_mib
    queueing.add(*await crowd(server.url, options.clients, options.rate))
    settled = await server.fds_settled(fds)
    figures = found.runs["queueing"] = queueing.figures()
    _process(found, "queueing", (fds, settled), (memory, server.memory_mib))
    found.bound("queueing: not served", options.clients - queueing.served, 0)
    found.ratios("queueing", ("writing_s_p50", "writing_s_p95"))
    turns = options.clients / options.limit * found.runs["unloaded"]["total_s_p50"]
    found.bound("queueing: wall, ratio to its turns", figures["wall_s"] / turns, BOUND)


def _process(found: Found, run: str, fds: tuple[int, int], memory_mib: tuple[float, float]) -> None:
    for name, (before, after) in (("fds", fds), ("memory_mib", memory_mib)):
        found.process |= {f"{run}_{name}_before": before, f"{run}_{name}_after": after}
    found.bound(f"{run}: file descriptors left open", fds[1] - fds[0], FDS)
    found.bound(f"{run}: memory grown, MiB", memory_mib[1] - memory_mib[0], MEMORY_MIB)


# ---- telling it ---------------------------------------------------------------------------------


def tell(console: Console, found: Found) -> None:
    names = list(found.runs["unloaded"])
    table = Table("", *found.runs, title="Overload")
    for name in names:
        table.add_row(name, *(_figure(run[name]) for run in found.runs.values()))
    console.print(table)
    table = Table("bound", "is", "at most", "")
    for what, value, most in found.bounds:
        table.add_row(what, _figure(value), _figure(most), "ok" if value <= most else "[red]NO[/]")
    console.print(table)
    console.print(", ".join(f"{k} {_figure(v)}" for k, v in found.process.items()))
    if not QUEUES:
        console.print("This gateway has no queue (limits.queue): that run was left out.")


def _figure(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


# ---- the command --------------------------------------------------------------------------------


@asynccontextmanager
async def timed_engines(options: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    flags = ["--token-ms", str(options.token_ms), "--prefill-ms", str(options.prefill_ms)]
    async with child("the engines", "benchmarks.timed_engines", *flags) as run:
        async with asyncio.timeout(60):
            large, small = (await run.url).split()
        yield large, small


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--clients", type=int, default=500, metavar="N", help="in the overloaded runs")
    add("--limit", type=int, default=100, metavar="N", help="limits.generations")
    add("--rounds", type=int, default=3, metavar="N")
    add("--rate", type=float, default=100.0, metavar="N", help="clients that arrive in a second")
    add("--token-ms", type=float, default=40.0, metavar="MS")
    add("--prefill-ms", type=float, default=300.0, metavar="MS")
    add("--json", type=Path, metavar="FILE", help="where the figures go as well")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        async with timed_engines(options) as engines:
            found = await measure(options, engines, Path(folder))
    tell(Console(), found)
    if options.json:
        told = {"runs": found.runs, "process": found.process, "bounds": found.bounds}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
