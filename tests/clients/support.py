"""The tiny pair behind the gateway, gateways before scripted engines, and clients' own processes.

async with tiny_relay() as running, client("litellm") as step:
    told = await step("create", url=running.url, ...)
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.demo.paths import bundled_policy
from gateway.demo.processes import gateway, tiny_pair
from tests.gateway.fakes import FakeEngine
from tests.gateway.support import Served, Stage

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-clients"
SCRIPTS = Path(__file__).parent / "scripts"
POLICY = "tiny-pair"
QUESTION = "What is 47*6 + 82*5 - 19?"
ANSWER = "673"
GONE_S = 1.0
"""How soon a client's leaving must have reached the engines."""
_STEP_S = 60.0
_END_S = 10.0
_LINE_BYTES = 2**24
_OFFLINE = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
_SETTINGS_OF_CLIENTS = (
    "ANTHROPIC_", "HF_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "OPENAI_", "RELAYGEN_"
)  # fmt: skip


# ---- gateways -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """URLs without a path."""

    large: str
    small: str
    url: str


@asynccontextmanager
async def tiny_relay() -> AsyncIterator[Running]:
    """The bundled pair on llama.cpp engines and the gateway, all in processes of their own."""
    async with (
        tiny_pair() as (large, small),
        gateway(bundled_policy(POLICY), large, small) as url,
    ):
        yield Running(large, small, url)


@asynccontextmanager
async def scripted(
    folder: Path, large: FakeEngine, small: FakeEngine, **settings: Any
) -> AsyncIterator[Served]:
    """The gateway, in this process, before two fake engines; the policy's name is `pair`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RELAYGEN_")]:
            patch.delenv(name)
        async with AsyncExitStack() as stack:
            yield await Stage(folder, stack).pair(large, small, settings)


async def busy(engine: str) -> bool:
    """Whether a llama.cpp engine decodes or prefills."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine}/slots") as response:
        return any(slot["is_processing"] for slot in await response.json())


async def idle_soon(engine: str) -> None:
    """Returns when the engine is idle. Raises TimeoutError when it is busy for longer."""
    async with asyncio.timeout(GONE_S):
        while await busy(engine):
            await asyncio.sleep(0.01)


# ---- clients ------------------------------------------------------------------------------------


class Client:
    """A script that runs in its client's own environment and does one step after the other."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process

    async def __call__(self, step: str, **arguments: Any) -> Any:
        """What the step told; an exception that it raised as a dict with `raised`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"step": step, **arguments}).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), _STEP_S)
        assert line, f"the client ended in step {step}, with {await self._process.wait()}"
        return json.loads(line)


@asynccontextmanager
async def client(name: str) -> AsyncIterator[Client]:
    """The script with_NAME of tests/clients/scripts; it ends when its stdin closes."""
    script = next(SCRIPTS.glob(f"with_{name}.*"))
    process = await asyncio.create_subprocess_exec(
        *_command(script), stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES,
        cwd=FOLDER / "node", env=environment(),
    )  # fmt: skip
    try:
        yield Client(name, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _command(script: Path) -> list[str]:
    if not (FOLDER / ".installed").exists():
        pytest.fail("the clients are not installed; run: make test-clients")
    if script.suffix == ".py":
        return [str(program("python")), str(script)]
    # Given as a text, the module finds its packages from the working directory.
    return [str(program("node")), "--input-type=module", "--eval", script.read_text()]


def program(name: str) -> Path:
    """A program of the clients' environment, or of the PATH where the environment has none."""
    own = FOLDER / "python" / "bin" / name
    return own if own.exists() else Path(shutil.which(name) or name)


def environment(**more: str) -> dict[str, str]:
    """Ours, without what configures a client or leads it elsewhere, and with no way to a hub."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_SETTINGS_OF_CLIENTS) and not name.lower().endswith("_proxy")
    }
    return {**kept, **_OFFLINE, **more}
