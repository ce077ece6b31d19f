"""What all scenes share: engines with a story, a gateway, a client, the log, the counters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Any, TypeAlias

import aiohttp
import pytest

from gateway import metrics, policies, reloading
from gateway.context import GATEWAY
from gateway.reloading import Source
from tests.gateway.fakes import FakeEngine, FakeVllm, Gate, Script, story
from tests.gateway.fakes.engines import CHAT
from tests.gateway.faults.rows import UNBROKEN, Broken, Cut, Refused, Row, Seen
from tests.gateway.support import (
    ANSWER,
    POLICY,
    REASONING,
    STORY,
    USER,
    WAIT_S,
    Served,
    Stage,
    gateway,
    get,
    policy_of,
    within,
)
from tests.gateway.test_metrics import Samples, samples

Scene: TypeAlias = Callable[["Play"], Awaitable[Seen]]
SCENES: dict[str, Scene] = {}

WHOLE = ((REASONING, ANSWER), ("", "".join(STORY)))
"""The thought and the answer of an unbroken reply: relayed, or as the engine itself wrote it."""
# Of these all that is added is compared, so that nothing is counted twice.
_COUNTERS = (
    "relaygen_upstream_failures_total",
    "relaygen_resumes_total",
    "relaygen_refused_total",
    "relaygen_internal_errors_total",
    'relaygen_generations_total{outcome="failed"',
    'relaygen_generations_total{outcome="cancelled"',
)


def scene(play: Scene) -> Scene:
    """Plays the row whose id is the function's name."""
    SCENES[play.__name__] = play  # type: ignore[attr-defined]
    return play


def big(script: Script | None = None) -> FakeVllm:
    return FakeVllm(script or story(*STORY), model="big")


def tiny(script: Script | None = None) -> FakeVllm:
    return FakeVllm(script or story(*STORY), model="tiny")


class Play:
    """One fault: `serve`, let it happen, `ask`; then the test looks at the log and the counters."""

    def __init__(
        self,
        stage: Stage,
        stack: AsyncExitStack,
        logs: list[MutableMapping[str, Any]],
        patch: pytest.MonkeyPatch,
    ) -> None:
        self.stage = stage
        self.stack = stack
        self.logs = logs
        self.patch = patch
        self.served: Served
        self.config: dict[str, Any] = {}
        self._before: Samples = {}

    # ---- the gateway ----------------------------------------------------------------------------

    async def serve(
        self,
        large: Sequence[FakeEngine],
        small: Sequence[FakeEngine] = (),
        /,
        settings: Mapping[str, Any] = {},
        **policy: Any,
    ) -> Served:
        """All engines up; the first of a role's is asked first."""
        small = small or [tiny()]
        backends = await self._started(large, small)
        written = policy_of(large[0], small[0], **policy)
        return await self.begin(
            await self.stage.gateway({"backends": backends, **settings}, written)
        )

    async def reloadable(self, large: Sequence[FakeEngine]) -> Served:
        """As `serve`, with a gateway.yaml (`configure`) that is looked at all the time."""
        for module in (reloading, policies):
            self.patch.setattr(module, "_LOOK_S", 0.02)
        small = tiny()
        policy = self.stage.write("policy.yaml", policy_of(large[0], small))
        backends = await self._started(large, [small])
        self.configure(backends=backends, policy_files=[str(policy)])
        source = Source({"port": 0}, self.stage.folder / "gateway.yaml")
        running = gateway(source.read(), source=source)
        return await self.begin(await self.stack.enter_async_context(running))

    def configure(self, **changes: Any) -> None:
        self.config |= changes
        self.stage.write("gateway.yaml", self.config)

    async def _started(
        self, large: Sequence[FakeEngine], small: Sequence[FakeEngine]
    ) -> dict[str, Any]:
        for engine in (*large, *small):
            await self.stage.engine(engine)
        return {
            "large": {"urls": [engine.url for engine in large]},
            "small": {"urls": [engine.url for engine in small]},
        }

    async def begin(self, served: Served) -> Served:
        """What comes from now on counts; all engines have been found."""
        self.served = served
        async with asyncio.timeout(WAIT_S):
            while "not probed yet" in str((await get(served, "/readyz"))[1]["backends"]):
                await asyncio.sleep(0.01)
        # Gauges of former tests in this process.
        metrics.small_held(POLICY, False)
        metrics.refused_files(0)
        self._before = await samples(served.url)
        self.logs.clear()
        return served

    # ---- the client -----------------------------------------------------------------------------

    async def ask(
        self,
        path: str = CHAT,
        /,
        key: str = "any",
        gates: Sequence[Gate] = (),
        **body: Any,
    ) -> Seen:
        """A streamed chat; what came of it. Each time that more of it came opens a gate."""
        given = {"model": POLICY, "messages": USER, "stream": True, **body}
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.served.url + path, json=given, headers=headers) as response,
        ):
            read, cut, shut = b"", False, iter(gates)
            try:
                while chunk := await response.content.readany():
                    read += chunk
                    for gate in islice(shut, 1):
                        gate.opened.set()
            except aiohttp.ClientPayloadError:
                cut = True
            return seen(response.status, read, cut=cut)

    @asynccontextmanager
    async def asked(self, gate: Gate) -> AsyncIterator[None]:
        """Another client's request is at the gate during the block, then goes on."""
        asking = asyncio.create_task(self.ask())
        await within(WAIT_S, gate.reached.wait())
        yield
        gate.opened.set()
        assert await within(WAIT_S, asking) == UNBROKEN

    def beside(self, happening: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """What happens while a client asks; the scene awaits it."""
        return asyncio.create_task(happening)

    # ---- what is seen of it ---------------------------------------------------------------------

    async def said(self, event: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not any(line["event"] == event for line in self.logs):
                await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """Every generation has ended, and so has been counted."""
        async with asyncio.timeout(WAIT_S):
            while self.served.app[GATEWAY].admission.taken:
                await asyncio.sleep(0.01)

    async def counted(self, row: Row) -> Samples:
        """What was added to the counters, and what the row's gauges show."""
        now = await samples(self.served.url)
        added = {
            name: value - self._before.get(name, 0)
            for name, value in now.items()
            if name.startswith(_COUNTERS) and value != self._before.get(name, 0)
        }
        gauges = [name for name in row.counted if not name.startswith(_COUNTERS)]
        return {**added, **{name: now[name] for name in gauges}}

    def told(self, row: Row) -> list[str]:
        """The row's lines that the log lacks."""
        return [
            str(told)
            for told in row.log
            if not any(
                line["event"] == told.event and _has(line, told.fields) for line in self.logs
            )
        ]


def _has(line: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    return all(line.get(name) == value for name, value in fields.items())


def seen(status: int, body: bytes, *, cut: bool) -> Seen:
    if status != 200:
        return Refused(status, json.loads(body)["error"].get("code"))
    data = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    done = data[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in (data[:-1] if done else data)]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    finishes = [c["finish_reason"] for c in choices if c["finish_reason"]]
    if done:
        texts = tuple(
            "".join(c["delta"].get(field) or "" for c in choices)
            for field in ("reasoning_content", "content")
        )
        assert (texts in WHOLE, finishes, cut) == (True, ["stop"], False), (texts, finishes)
        return UNBROKEN
    assert finishes == []
    if "error" in chunks[-1]:
        return Broken(chunks[-1]["error"].get("code"))
    assert cut
    return Cut()
