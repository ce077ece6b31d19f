"""Starts simulated engines and a gateway in front of them, and runs load against either."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.bench.engine import NAMES
from gateway.bench.script import CUE
from gateway.demo.processes import HOST, child, free_port, ready, started

POLICY = "bench"
_STREAMS = 4096
_HANDOFF = "relaygen_handoff_seconds"
_PLAIN: Mapping[str, object] = {}
_RUN_S = 300.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A gateway before two engines; all URLs without /v1."""

    url: str
    large: str
    small: str
    pid: int

    def cpu_s(self) -> float:
        """Seconds of CPU that the gateway has used."""
        return sum(map(_ticks, self._pids())) / os.sysconf("SC_CLK_TCK")

    def rss_kib(self) -> int:
        """The gateway's resident memory."""
        return sum(_memory_kib(pid, "VmRSS") for pid in self._pids())

    def forget_peak(self) -> None:
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_kib(self) -> int:
        """The most memory that the gateway had since `forget_peak`."""
        return sum(_memory_kib(pid, "VmHWM") for pid in self._pids())

    def _pids(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [self.pid, *map(int, children.split())]

    async def engines(self) -> dict[str, Any]:
        """What the engines did since they were last asked."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.large}/stats") as answer,
        ):
            found: dict[str, Any] = await answer.json(content_type=None)
            return found

    async def handoffs(self) -> dict[str, tuple[float, float]]:
        """Handoffs to each role so far, and their seconds in all."""
        return (await handoffs_of(self.url)).get(POLICY, {})

    async def direct(self, **load: object) -> dict[str, Any]:
        """Load on the large engine itself."""
        return await loaded(self.large, NAMES[0], **load)

    async def passthrough(self, **load: object) -> dict[str, Any]:
        """Load on the large engine through the gateway, which passes it on unread."""
        return await loaded(self.url, NAMES[0], **load)

    async def relay(self, **load: object) -> dict[str, Any]:
        """Load on the pair."""
        return await loaded(self.url, POLICY, **load)


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _memory_kib(pid: int, name: str) -> int:
    told = Path(f"/proc/{pid}/status").read_text()
    return int(told.partition(f"{name}:")[2].split()[0])


async def handoffs_of(url: str) -> dict[str, dict[str, tuple[float, float]]]:
    """By policy and role handed to: how many there were, and their seconds in all."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    told = {
        (s.name, s.labels["policy"], s.labels["to"]): s.value
        for family in families
        for s in family.samples
        if family.name == _HANDOFF and "le" not in s.labels
    }
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for (name, policy, role), value in told.items():
        if name == f"{_HANDOFF}_count":
            found.setdefault(policy, {})[role] = (value, told[f"{_HANDOFF}_sum", policy, role])
    return found


async def loaded(url: str, model: str, **load: object) -> dict[str, Any]:
    """Runs the load generator in a process of its own; what it measured."""
    flags = [
        part for key, value in load.items() for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.bench.load", "--url", url, "--model", model, *flags,
        stdout=PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_RUN_S):
            told, _ = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"the load generator ended with status {process.returncode}")
    found: dict[str, Any] = json.loads(told)
    return found


@asynccontextmanager
async def staged(
    *, workers: int = 1, policy: Mapping[str, object] = _PLAIN, **engine: object
) -> AsyncIterator[Stage]:
    """Engines with these options (token_ms="25,4"), and a gateway as users run it.

    `policy` are keys of the policy.
    """
    flags = [p for k, v in engine.items() for p in (f"--{k.replace('_', '-')}", str(v))]
    async with child("the engines", "gateway.bench.engine", *flags) as engines:
        large, _, small = (await started(engines, engines.url)).partition(" ")
        with _files(policy) as (settings, policy_file):
            port = free_port()
            arguments = [
                "gateway", "serve", "--host", HOST, "--port", str(port), "--policy", policy_file,
                "--large", f"{large}/v1", "--small", f"{small}/v1", "--config", settings,
                "--workers", str(workers),
            ]  # fmt: skip
            async with child("the gateway", "gateway.demo.tether", *arguments) as gateway:
                url = await started(gateway, ready(gateway, f"http://{HOST}:{port}"))
                yield Stage(url, large, small, gateway.process.pid)


@contextmanager
def _files(changes: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Paths of settings and of a policy."""
    with TemporaryDirectory() as folder:
        settings, policy = Path(folder, "gateway.yaml"), Path(folder, "bench.yaml")
        settings.write_text(yaml.safe_dump({"limits": {"generations": _STREAMS}}))
        policy.write_text(yaml.safe_dump({**_policy(), **changes}))
        yield str(settings), str(policy)


def _policy() -> dict[str, Any]:
    return {
        "version": 1,
        "name": POLICY,
        "large": {"backend": "large", "model": NAMES[0]},
        "small": {"backend": "small", "model": NAMES[1]},
        "cues": {"words": [CUE.strip(), "Now", "Thus", "Hence", "Next", "Then", "However"]},
        "min_large_tokens": 0,
        "slow": {"hold": False},
    }
