"""A real engine is killed in the middle of a segment: the client's stream is one, or ends in truth.

In both roles is the large model, with greedy sampling: what another replica goes on with is what
the killed one would have written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from gateway.demo.paths import bundled_model
from gateway.demo.processes import Child, child, gateway
from tests.clients.support import ANSWER, QUESTION, busy
from tests.gateway.support import WAIT_S, openai_client, within
from tests.integration.recorder import listening
from tests.integration.windows import CHAT, text_of, write_policies

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
KEPT = 8
"""Chunks of the segment that the client has when its engine dies; the segment has far more."""
Moment = Callable[[str, int, int], bool]
"""From the role and the segment of a chunk, and how many chunks of it there were, to whether now
is the time to kill."""


@dataclass(frozen=True)
class Engine:
    url: str
    child: Child

    async def kill(self) -> None:
        """SIGKILL: nothing is sent any more, the sockets are closed by the kernel."""
        self.child.process.kill()
        await self.child.process.wait()


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    flags = ["--model", str(bundled_model("large")), "--alias", "tiny-large", "--parallel", "2"]
    async with child("an engine", "gateway.demo.llamacpp", *flags) as run:
        yield Engine(await listening(run), run)


@dataclass(frozen=True)
class Running:
    url: str
    client: AsyncOpenAI
    large: list[Engine]
    small: list[Engine]

    async def writer(self, role: str) -> Engine:
        """The engine of the role that decodes now, by its own view."""
        engines = self.large if role == "large" else self.small
        async with asyncio.timeout(WAIT_S):
            while True:
                for one in engines:
                    if await busy(one.url):
                        return one


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """Starts the gateway before so many replicas of each role."""

    @asynccontextmanager
    async def run(large: int = 1, small: int = 1) -> AsyncIterator[Running]:
        policies = write_policies(tmp_path, "tiny-large")
        config = tmp_path / "gateway.yaml"
        config.write_text("resume: {seconds: 3}\n")  # what nobody can go on with ends soon
        flags = [part for policy in policies[1:] for part in ("--policy", str(policy))]
        flags += ["--config", str(config)]
        async with AsyncExitStack() as stack:
            begun = [await stack.enter_async_context(engine()) for _ in range(large + small)]
            larges, smalls = begun[:large], begun[large:]
            for one, flag in [(e, "--large") for e in larges[1:]] + [
                (e, "--small") for e in smalls[1:]
            ]:
                flags += [flag, f"{one.url}/v1"]
            serving = gateway(policies[0], larges[0].url, smalls[0].url, flags=flags)
            url = await stack.enter_async_context(serving)
            client = await stack.enter_async_context(openai_client(url))
            yield Running(url, client, larges, smalls)

    return run


@dataclass(slots=True)
class Told:
    """What a client of a stream saw."""

    text: str = ""
    roles: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    usage: Any = None

    @property
    def resumes(self) -> int:
        return int(self.usage["relaygen"].get("resumes", 0))


async def stream(running: Running, policy: str, kill: Moment | None = None) -> Told:
    """A streamed chat through the OpenAI SDK; at the moment the engine that writes is killed."""
    told, chunks = Told(), 0
    asked = await running.client.chat.completions.create(
        model=policy,
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"relaygen": {"trace": True}},
    )
    segment = 0
    async for chunk in asked:
        event = chunk.to_dict(mode="json")
        _take(event, told)
        traced: Any = event.get("relaygen") or {}
        chunks = chunks + 1 if traced.get("segment") == segment else 1
        segment = traced.get("segment", segment)
        if kill is not None and text_of(event) and kill(traced["role"], segment, chunks):
            await (await running.writer(traced["role"])).kill()
            kill = None
    assert kill is None, f"the moment did not come: {told}"
    return told


def _take(event: dict[str, Any], told: Told) -> None:
    told.text += text_of(event)
    told.usage = event.get("usage") or told.usage
    if event.get("choices"):
        told.finishes += filter(None, [event["choices"][0].get("finish_reason")])
    if text_of(event) and told.roles[-1:] != [event["relaygen"]["role"]]:
        told.roles.append(event["relaygen"]["role"])


def in_segment_of(role: str, *, first: int = 0, kept: int = KEPT) -> Moment:
    """Once `kept` chunks of a segment that this role writes have come, from segment `first` on."""
    return lambda by, segment, chunks: by == role and segment >= first and chunks >= kept


# ---- another replica goes on --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "role", "replicas"),
    [("long-answer", "large", (2, 1)), ("long-small", "small", (1, 2))],
    ids=["large", "small"],
)
async def test_another_replica_goes_on(
    start: Callable[..., Any], policy: str, role: str, replicas: tuple[int, int]
) -> None:
    async with start(*replicas) as running:
        unbroken = await stream(running, policy)
        broken = await stream(running, policy, in_segment_of(role))
    assert unbroken.text.rstrip(".").endswith(ANSWER)
    assert broken.text == unbroken.text
    assert broken.finishes == unbroken.finishes == ["stop"]
    assert unbroken.resumes == 0
    assert broken.resumes >= 1


async def test_handoffs_go_on_after_a_death(start: Callable[..., Any]) -> None:
    """In a later segment, with both models' text before it and after it."""
    async with start(large=2) as running:
        unbroken = await stream(running, "handoffs")
        broken = await stream(running, "handoffs", in_segment_of("large", first=2, kept=1))
        after = await stream(running, "handoffs")
    assert broken.text == unbroken.text == after.text
    assert broken.roles == unbroken.roles
    assert broken.finishes == ["stop"]


async def test_a_reply_in_one_piece_goes_on(start: Callable[..., Any]) -> None:
    async with start(large=2) as running:
        unbroken = await stream(running, "long-answer")
        asked = asyncio.create_task(
            running.client.chat.completions.create(
                model="long-answer", messages=MESSAGES, temperature=0
            )
        )
        await (await running.writer("large")).kill()
        reply = await within(60, asked)
    message = reply.choices[0].message
    assert message.reasoning_content + message.content == unbroken.text
    assert reply.choices[0].finish_reason == "stop"


async def test_the_large_model_goes_on_for_the_small_one(start: Callable[..., Any]) -> None:
    """The only small engine dies; the policy's default lets the large one write the rest."""
    async with start() as running:
        broken = await stream(running, "long-small", in_segment_of("small"))
    assert broken.text.rstrip(".").endswith(ANSWER)
    assert broken.roles[-1] == "large"
    assert broken.finishes == ["stop"]
    assert broken.resumes >= 1


# ---- nothing is left ----------------------------------------------------------------------------


async def test_with_nothing_left_the_stream_ends_in_an_error(start: Callable[..., Any]) -> None:
    """Never in [DONE], never with a finish: what was written is no whole reply."""
    body = {"model": "long-answer", "messages": MESSAGES, "stream": True, "temperature": 0}
    async with start() as running, aiohttp.ClientSession() as session:
        async with session.post(f"{running.url}{CHAT}", json=body) as response:
            events: list[dict[str, Any]] = []
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                assert b"[DONE]" not in line
                events.append(json.loads(line.removeprefix(b"data: ")))
                if len(events) == KEPT:
                    await (await running.writer("large")).kill()
        *written, last = events
        assert "engine" in last["error"]["message"]
        assert "".join(map(text_of, written))
        assert not [c for e in written for c in e["choices"] if c.get("finish_reason")]


async def test_with_nothing_left_the_sdk_raises(start: Callable[..., Any]) -> None:
    async with start() as running:
        with pytest.raises(openai.APIError):
            await stream(running, "long-answer", in_segment_of("large"))
        with pytest.raises(openai.APIStatusError) as caught:  # and the next is told at once
            await stream(running, "long-answer")
    assert caught.value.status_code in (502, 503)
