"""Real llama.cpp engines on ports of their own, killed with -9 and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from gateway.demo.paths import PairRole, bundled_model
from gateway.demo.processes import HOST, child, free_port

_START_S = 60.0


class Engine:
    """One engine of the bundled pair; the port stays the same over all its lives."""

    def __init__(self, role: PairRole, parallel: int = 4) -> None:
        self.role = role
        self.port = free_port()
        self.kills = 0
        self._parallel = parallel
        self._life = AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Listening. Raises StartError, or TimeoutError where it takes too long."""
        flags = {"model": bundled_model(self.role), "alias": f"tiny-{self.role}"}
        flags |= {"port": self.port, "parallel": self._parallel, "threads": 1, "context": 2048}
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        running = child(f"the {self.role} engine", "gateway.demo.llamacpp", *arguments)
        self._child = await self._life.enter_async_context(running)
        ended = asyncio.ensure_future(self._child.process.wait())
        waiting: set[asyncio.Future[object]] = {self._child.url, ended}
        await asyncio.wait(waiting, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not self._child.url.done():
            raise self._child.failure("did not start")

    async def kill(self) -> None:
        self.kills += 1
        self._child.process.kill()
        await self.stop()

    async def stop(self) -> None:
        await self._life.aclose()
        self._life = AsyncExitStack()


@asynccontextmanager
async def engines(replicas: int = 2) -> AsyncIterator[list[Engine]]:
    """All replicas of both roles, the large ones first."""
    roles: list[PairRole] = ["large", "small"]
    made = [Engine(role) for role in roles for _ in range(replicas)]
    async with AsyncExitStack() as stack:
        for engine in made:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield made


async def killing(made: list[Engine], seed: int, pause_s: tuple[float, float]) -> None:
    """Kills one after the other, the next once the last is back. Runs until cancelled."""
    rng = Random(seed)
    while True:
        await asyncio.sleep(rng.uniform(*pause_s))
        engine = rng.choice(made)
        await engine.kill()
        await engine.start()
