"""The client leaves in every window there is; the engines' own view is idle within a second."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from gateway.demo.processes import gateway, llamacpp_engine
from tests.clients.support import busy, idle_soon
from tests.gateway.support import GONE_S, WAIT_S, leaving, within
from tests.integration.recorder import Hold, Recorder, recording
from tests.integration.vllm_server import vllm_engine
from tests.integration.windows import (
    CHAT,
    COMPLETIONS,
    CUES,
    WINDOWS,
    Window,
    events,
    text_of,
    write_policies,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 4096
MAX_TOKENS = 3500  # ten seconds and more, at the large model's pace
CUE_AT_END = re.compile(rf"\b({'|'.join(CUES)})$")


@dataclass(frozen=True)
class Running:
    """URLs with no path. The small role has the large model too: the small one is too fast."""

    large: str
    small: str
    url: str
    policies: list[Path]

    def engine(self, role: str) -> str:
        return self.large if role == "large" else self.small

    async def is_busy(self, window: Window) -> None:
        """Returns when the window's engine is; by the model's name alone it may be either."""
        engines = [self.engine(window.busy)] if window.mode else [self.large, self.small]
        await until(lambda: _any(engines))

    async def idle_soon(self) -> None:
        await idle_soon(self.large)
        await idle_soon(self.small)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    policies = write_policies(tmp_path_factory.mktemp("policies"), "tiny-large")
    async with (
        llamacpp_engine("large", context=CONTEXT) as large,
        llamacpp_engine("large", context=CONTEXT) as small,
        gateway(policies[0], large, small, flags=_also(policies)) as url,
    ):
        yield Running(large, small, url, policies)


def _also(policies: list[Path]) -> list[str]:
    return [part for policy in policies[1:] for part in ("--policy", str(policy))]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = WAIT_S) -> None:
    """Polls an engine's own view."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


async def _any(engines: list[str]) -> bool:
    return any([await busy(engine) for engine in engines])


async def arrives(reader: asyncio.StreamReader, window: Window) -> None:
    """Returns at the event at which the client is to leave."""
    head = await within(60, reader.readuntil(b"\r\n\r\n"))
    assert b" 200 " in head.split(b"\r\n")[0], await reader.read(2000)
    mode = f"x-relaygen-mode: {window.mode}".encode()
    assert not window.mode or mode in head.lower()
    async for event in events(reader):
        assert "error" not in event, event
        if window.here(event):
            return
    raise AssertionError("the stream ended before")


# ---- mid-stream ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWS)
async def test_leaving_a_stream(running: Running, name: str) -> None:
    window = WINDOWS[name]
    body = window.request(MAX_TOKENS)
    async with leaving(running.url, window.path, **_only(body), stream=True) as (reader, _):
        await within(60, arrives(reader, window))
        await running.is_busy(window)
    await running.idle_soon()


def _only(body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": None, **body} if "messages" not in body else body


@pytest.mark.parametrize("handoff", range(6))
async def test_leaving_at_a_handoff(running: Running, handoff: int) -> None:
    """At the cue, or where the large model has just taken over again."""
    body = Window("handoffs", CHAT, bool).request(MAX_TOKENS)
    async with leaving(running.url, CHAT, **body, stream=True) as (reader, _):
        await within(60, _cue(reader, handoff))
    await running.idle_soon()


async def _cue(reader: asyncio.StreamReader, segment: int) -> None:
    """Until a cue has ended the large segment that comes next, or the small one has ended."""
    text = ""
    async for event in events(reader):
        written = event.get("relaygen") or {}
        text += text_of(event)
        if written.get("segment", 0) > segment:
            return
        if written.get("segment") == segment and CUE_AT_END.search(text):
            return
    raise AssertionError("the stream ended before")


# ---- replies in one piece -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["large segment", "small segment", "answer", "two choices", "messages", "responses"]
)
async def test_leaving_before_a_whole_reply(running: Running, name: str) -> None:
    window = WINDOWS[name]
    async with leaving(running.url, window.path, **_only(window.request(MAX_TOKENS))):
        await running.is_busy(window)
    await running.idle_soon()


# ---- before the first token ---------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_leaving_during_the_prefill(running: Running, streaming: bool) -> None:
    """llama.cpp looks at its client only when it has a token: at the end of the prefill."""
    question = f"{streaming}? " + "What is 47*6? " * 100
    alone = await _prefill_s(running.large, question)
    body = Window("long-large", CHAT, bool).request(2000)
    body["messages"] = [{"role": "user", "content": f"Once more: {question}"}]
    async with leaving(running.url, CHAT, **body, stream=streaming) as (reader, _):
        first = asyncio.create_task(reader.read(1))
        await until(lambda: busy(running.large))
        assert not first.done()
        first.cancel()
    await until(lambda: _idle(running.large), GONE_S + 2 * alone)
    await running.idle_soon()


async def _prefill_s(engine: str, question: str) -> float:
    """How long the engine takes until the first token."""
    body = {"prompt": f"Alone: {question}", "max_tokens": 1}
    started = time.perf_counter()
    url = f"{engine}{COMPLETIONS}"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        await response.read()
    return time.perf_counter() - started


async def _idle(engine: str) -> bool:
    return not await busy(engine)


# ---- held where it is: rendering, and between two segments --------------------------------------


@dataclass(frozen=True)
class Held:
    url: str
    large: Recorder
    small: Recorder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def held(running: Running) -> AsyncIterator[Held]:
    """The same engines, behind recorders that can keep requests from them."""
    async with (
        recording("large", running.large) as (large_url, large),
        recording("small", running.small) as (small_url, small),
        gateway(running.policies[0], large_url, small_url, flags=_also(running.policies)) as url,
    ):
        yield Held(url, large, small)


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("path", ["/apply-template", "/tokenize"])
async def test_leaving_while_the_prompt_is_rendered(
    running: Running, held: Held, path: str, streaming: bool
) -> None:
    asked = len(held.large.exchanges)
    body = Window("long-large", CHAT, bool).request(MAX_TOKENS)
    body["messages"] = [{"role": "user", "content": f"What is {time.time_ns()}?"}]
    hold = held.large.holds[path] = Hold()
    try:
        async with leaving(held.url, CHAT, **body, stream=streaming):
            await within(WAIT_S, hold.reached.wait())
        await within(GONE_S, hold.left.wait())
    finally:
        held.large.holds.clear()
    await running.idle_soon()
    assert len(held.large.exchanges) == asked


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
async def test_leaving_between_two_segments(running: Running, held: Held, streaming: bool) -> None:
    """The large model's decode is cut, the small one's asked for and not begun."""
    body = Window("long-small", CHAT, bool).request(MAX_TOKENS)
    hold = held.small.holds[COMPLETIONS] = Hold()
    try:
        async with leaving(held.url, CHAT, **body, stream=streaming):
            await within(WAIT_S, hold.reached.wait())
            await running.idle_soon()  # the cut itself
        await within(GONE_S, hold.left.wait())
    finally:
        held.small.holds.clear()
    await running.idle_soon()
    assert not held.small.exchanges


async def test_who_stays_is_served(running: Running) -> None:
    """After all of them: every slot of the engines is of use again."""
    body = {"model": "handoffs", "messages": [{"role": "user", "content": "What is 2*3?"}]}
    async with aiohttp.ClientSession() as session:

        async def reply() -> Any:
            async with session.post(f"{running.url}{CHAT}", json=body) as response:
                return await response.json()

        replies = await asyncio.gather(*(reply() for _ in range(4)))
    assert [r["choices"][0]["finish_reason"] for r in replies] == ["stop"] * 4


# ---- vLLM ---------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    policies = write_policies(tmp_path_factory.mktemp("policies"), "tiny-small")
    async with (
        vllm_engine("large", core=0) as large,
        vllm_engine("small", core=1) as small,
        gateway(policies[0], large, small, flags=_also(policies)) as url,
    ):
        yield Running(large, small, url, policies)


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("name", WINDOWS)
async def test_leaving_vllm(vllm: Running, name: str, streaming: bool) -> None:
    window = WINDOWS[name]
    body = _only(window.request(1900))
    engine = vllm.engine(window.busy)
    async with leaving(vllm.url, window.path, **body, stream=streaming) as (reader, _):
        if streaming:
            await within(60, arrives(reader, window))
        await until(lambda: _runs(engine), 60)
    for url in (vllm.large, vllm.small):
        await until(lambda url=url: _rests(url), GONE_S)


async def _requests(engine: str) -> float:
    """Those that run or wait, as the server counts them."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine}/metrics") as response:
        text = await response.text()
    counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.M)
    assert len(counts) >= 2, text[:2000]
    return sum(map(float, counts))


async def _runs(engine: str) -> bool:
    return await _requests(engine) > 0


async def _rests(engine: str) -> bool:
    return await _requests(engine) == 0
