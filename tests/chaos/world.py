"""Two replicas of each role behind their proxies, and the gateway before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import yaml

from gateway.demo.processes import HOST, Child, child, free_port
from gateway.settings import Settings
from relaygen.policy import Policy
from tests.chaos.engines import Writer, engine
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import Plan
from tests.chaos.transcripts import CUES
from tests.gateway.fakes import Tokenizer

POLICY = "chaos"
RESUMES = "resume" in Settings.model_fields
"""Whether this gateway goes on with a generation whose engine died in the middle."""
_START_S = 60.0
_POLL_S = 0.05
_IDLE_S = 1.5
"""What a stalled engine costs. Far more than a token takes, even on a busy machine."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is put to the test: dialects such as "vllm" or, large and small, "vllm:llamacpp"."""

    dialects: str = "vllm"
    handoff: Literal["auto", "tokens", "text"] = "auto"
    replicas: int = 2

    def dialect(self, role: str) -> str:
        large, _, small = self.dialects.partition(":")
        return large if role == "large" else small or large

    def __str__(self) -> str:
        return f"{self.dialects}, handoff: {self.handoff}"


@dataclass(slots=True)
class World:
    """The engines and their proxies, by role."""

    engines: dict[str, list[Writer]] = field(default_factory=dict)
    proxies: dict[str, list[Proxy]] = field(default_factory=dict)

    @property
    def all_proxies(self) -> list[Proxy]:
        return [proxy for proxies in self.proxies.values() for proxy in proxies]

    def plan(self, plan: Plan) -> None:
        for proxy in self.all_proxies:
            proxy.plan = plan

    def hurry(self) -> None:
        """No pauses between the tokens."""
        for engines in self.engines.values():
            for one in engines:
                one.pace_s = 0.0

    @property
    def open_connections(self) -> int:
        """That the gateway keeps to engines."""
        return sum(len(proxy.passages) for proxy in self.all_proxies)

    @property
    def unfinished(self) -> int:
        """Connections with a decode that nobody waits for any more, or still does."""
        return sum(len(proxy.unfinished) for proxy in self.all_proxies)

    @property
    def strays(self) -> list[str]:
        return [s for engines in self.engines.values() for one in engines for s in one.strays]

    def trial_of(self, request: bytes) -> int | None:
        return self.engines["large"][0].trial_of(request)

    def backends(self) -> dict[str, Any]:
        return {role: {"urls": [p.url for p in ps]} for role, ps in self.proxies.items()}


@asynccontextmanager
async def world(setting: Setting) -> AsyncIterator[World]:
    made, vocabulary = World(), Tokenizer()
    async with AsyncExitStack() as stack:
        for role in ("large", "small"):
            made.engines[role], made.proxies[role] = [], []
            for number in range(setting.replicas):
                one = engine(setting.dialect(role), role, vocabulary)
                await one.start()
                stack.push_async_callback(one.stop)
                proxy = Proxy(f"{role}{number}", one.port, one.is_decode)
                await proxy.start()
                stack.push_async_callback(proxy.stop)
                made.engines[role].append(one)
                made.proxies[role].append(proxy)
        yield made


# ---- the gateway --------------------------------------------------------------------------------


def settings(backends: Mapping[str, Any], idle_s: float = _IDLE_S) -> dict[str, Any]:
    given = {
        "backends": backends,
        "timeouts": {"idle": idle_s, "connect": 2.0, "probe": 2.0},
        "log": {"level": "warning"},
        "resume": {"attempts": 10, "seconds": 30},
        "health": {"failures": 3, "cooldown": 1, "slow_start": 1},
    }
    return {key: value for key, value in given.items() if key in Settings.model_fields}


def policy(setting: Setting) -> dict[str, Any]:
    given = {
        "version": 1,
        "name": POLICY,
        "large": {"backend": "large", "model": "large"},
        "small": {"backend": "small", "model": "small"},
        "cues": {"words": list(CUES)},
        "handoff": setting.handoff,
        "min_large_tokens": 2,
        "on_failure": {"large": "fail", "small": "large"},
        "slow": {"hold": False},
    }
    return {key: value for key, value in given.items() if key in Policy.model_fields}


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway in a process of its own."""

    url: str
    pid: int


@asynccontextmanager
async def gateway_process(folder: Path, setting: Setting, made: World) -> AsyncIterator[Running]:
    """`relaygen serve`, ready. Raises StartError where it does not come up."""
    port = free_port()
    config, policy_file = folder / "gateway.yaml", folder / "policy.yaml"
    config.write_text(yaml.safe_dump({"host": HOST, "port": port, **settings(made.backends())}))
    policy_file.write_text(yaml.safe_dump(policy(setting)))
    arguments = ["gateway", "serve", "--config", str(config), "--policy", str(policy_file)]
    async with child("the gateway", "gateway.demo.tether", *arguments) as server:
        url = f"http://{HOST}:{port}"
        await _ready(server, url)
        yield Running(url, server.process.pid)


async def _ready(server: Child, url: str) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
            while not server.ended:
                with suppress(aiohttp.ClientConnectionError):
                    async with session.get(f"{url}/readyz") as response:
                        if response.status == 200:
                            return
                        server.status = await response.text()
                await asyncio.sleep(_POLL_S)
    raise server.failure("did not get ready")
