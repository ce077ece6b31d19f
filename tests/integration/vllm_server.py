"""vLLM's server on the CPU, from the environment that install_vllm.py made."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from gateway.demo.paths import PAIR
from gateway.demo.processes import free_port

ROOT = Path(__file__).parents[2]
_START_S = 300.0
_BLOCK = "32"  # tokens; only whole blocks are cached, and the CPU build's 128 are half a reply here
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}


@asynccontextmanager
async def vllm_engine(role: str, core: int) -> AsyncIterator[str]:
    """Serves the pair's model of that role as `tiny-ROLE`; yields the URL, without a path.

    Left to itself every server on a machine binds its worker to the same first core.
    """
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        str(ROOT / ".venv-vllm" / "bin" / "python"),
        *("-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
        *("--model", str(PAIR / f"{role}-hf"), "--served-model-name", f"tiny-{role}"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "2048", "--block-size", _BLOCK),
        env=os.environ | _ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": str(core)},
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await _healthy(process, url)
        yield url
    finally:
        # The server has children of its own: the whole group goes.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _healthy(process: asyncio.subprocess.Process, url: str) -> None:
    async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"vLLM ended with status {process.returncode} while starting")
            with suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
