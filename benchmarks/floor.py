"""The least that a relay in Python can cost on this machine, beside what the gateway does.

    python benchmarks/floor.py

A bare loop stands where the gateway would: it renders the prompt at both engines, decodes, and at
each scripted end goes on with the other engine. It parses no more than it must, checks nothing, has
no client, and one generation at a time: what it takes is sockets, processes that take turns on the
cores, and the interpreter. One run, the gateway before the same kind of engines in turn.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import orjson
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.bench.engine import NAMES
from gateway.bench.script import CUE
from gateway.bench.stage import Stage, staged

ROUNDS = 3
REQUESTS = 100


class Bare(asyncio.Protocol):
    """A connection to an engine; its answers go to `take`, as they come."""

    def __init__(self) -> None:
        self.take: Callable[[bytes], None] = lambda data: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.take(data)

    def ask(self, path: str, body: dict[str, Any]) -> None:
        content = orjson.dumps(body)
        head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        self.transport.write(
            head % path.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
        )


async def connected(url: str) -> Bare:
    address = urlsplit(url)
    _, bare = await asyncio.get_running_loop().create_connection(
        Bare, address.hostname, address.port
    )
    return bare


async def rendered(bare: Bare, model: str, question: str) -> list[int]:
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    bare.take = came.set_result
    bare.ask("/tokenize", {"model": model, "messages": [{"role": "user", "content": question}]})
    ids: list[int] = orjson.loads((await came).partition(b"\r\n\r\n")[2])["tokens"]
    return ids


class Relay:
    """One generation, from rendered prompts on; `first_s` is when its first token came."""

    def __init__(self, stage: Stage, ids: list[int], spare: list[list[Bare]]) -> None:
        self._urls = (stage.large, stage.small)
        self._ids = list(ids)
        self._spare = spare
        self._role = 0
        self.first_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self) -> None:
        self._engine = self._spare[self._role].pop()
        self._engine.take = self._took
        self._engine.ask(
            "/v1/completions",
            {
                "model": NAMES[self._role],
                "prompt": self._ids,
                "stream": True,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )

    def _took(self, data: bytes) -> None:
        self.first_s = self.first_s or time.perf_counter()
        for event in data.split(b"data: ")[1:]:
            if event.startswith(b"[DONE]"):
                self.done.set_result(None)
                return
            choices = orjson.loads(event.partition(b"\n")[0])["choices"]
            if not choices:
                continue
            self._ids += choices[0]["token_ids"]
            if choices[0]["text"] == (CUE, ".")[self._role]:
                left, self._role = self._engine, 1 - self._role
                self.go_on()
                left.take = lambda data: None
                left.transport.close()
                return


async def spare_connections(stage: Stage, count: int) -> list[list[Bare]]:
    """Opened beforehand: a floor opens none."""
    urls = (stage.large, stage.small)
    return [[await connected(url) for _ in range(count)] for url in urls]


async def bare_first_ms(stage: Stage) -> float:
    """Median from the question to the first token."""
    found = []
    for number in range(REQUESTS):
        spare = await spare_connections(stage, 2)
        asked = time.perf_counter()
        question = f"Question {number}"
        ids, _ = await asyncio.gather(
            *(rendered(spare[role].pop(), NAMES[role], question) for role in range(2))
        )
        relay = Relay(stage, ids, spare)
        relay.go_on()
        await relay.done
        found.append((relay.first_s - asked) * 1e3)
    return median(found)


async def bare_handoffs(stage: Stage, count: int) -> float:
    """Median of a handoff, at the engines."""
    await stage.engines()
    spare = await spare_connections(stage, count)
    ids = await rendered(spare[0].pop(), NAMES[0], "Question")
    relay = Relay(stage, ids, spare)
    relay.go_on()
    await relay.done
    return median((await stage.engines())["handoff_ms"])


async def measured() -> list[tuple[str, float, float]]:
    first: dict[str, list[float]] = {"bare": [], "gateway": []}
    async with staged(tokens=4) as stage:
        direct = median((await stage.direct(requests=REQUESTS))["first_ms"])
        for _ in range(ROUNDS):
            first["bare"].append(await bare_first_ms(stage) - direct)
            told = await stage.relay(requests=REQUESTS)
            first["gateway"].append(median(told["first_ms"]) - direct)
    handoff: dict[str, list[float]] = {"bare": [], "gateway": []}
    async with staged(tokens=400, large_run=20, small_run=20, token_ms="25,4") as stage:
        await stage.relay()
        for _ in range(ROUNDS):
            handoff["bare"].append(await bare_handoffs(stage, 40))
            await stage.engines()
            await stage.relay()
            handoff["gateway"].append(median((await stage.engines())["handoff_ms"]))
    return [
        ("first token, relayed, added", median(first["bare"]), median(first["gateway"])),
        ("handoff, at the engines", median(handoff["bare"]), median(handoff["gateway"])),
    ]


def main() -> None:
    rows = asyncio.run(measured())
    table = Table("what", "bare loop, ms", "gateway, ms")
    for what, bare, gateway in rows:
        table.add_row(what, f"{bare:.2f}", f"{gateway:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
