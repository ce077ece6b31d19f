"""What a process holds, from /proc, and what a gateway in this process has left running."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from gateway.context import GATEWAY

_KIB = 1024
_WATCHING = 2
_OURS = ("/gateway/", "/aiohttp/")


@dataclass(frozen=True, slots=True)
class Sample:
    """`fds` are those that are no connection to an engine, `upstream` those that are."""

    rss_mib: float
    fds: int
    upstream: int
    threads: int

    def calm(self, replicas: int) -> bool:
        """Whether no more connections are open than it takes to watch the engines."""
        return self.upstream <= _WATCHING * replicas


def sample(pid: int, connections: int) -> Sample:
    """`connections` is how many the process keeps open to engines."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return Sample(
        rss_mib=int(status["VmRSS"][0]) / _KIB,
        fds=len(list(Path(f"/proc/{pid}/fd").iterdir())) - connections,
        upstream=connections,
        threads=int(status["Threads"][0]),
    )


def connections_in_use(app: web.Application) -> int:
    """Of a gateway in this process, to engines, but for those that are kept for later."""
    replica = app[GATEWAY].backends["large"].replicas[0]
    return replica.upstream.connections.in_use


def running_tasks() -> Counter[str]:
    """The tasks of a gateway in this process, by the coroutine that they run."""
    names = [_name(task) for task in asyncio.all_tasks()]
    return Counter(name for name in names if name)


def _name(task: asyncio.Task[object]) -> str:
    coroutine = task.get_coro()
    code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "ag_code", None)
    if code is None or "/tests/" in code.co_filename:
        return ""
    return code.co_qualname if any(part in code.co_filename for part in _OURS) else ""
