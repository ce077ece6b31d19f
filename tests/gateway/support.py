"""The gateway in this process on a real socket, a pair of fake engines, and an OpenAI client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohttp
import pytest
import yaml
from aiohttp import web
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gateway.ahead import Ahead
from gateway.app import build_app
from gateway.engines.base import ASKED
from gateway.extra import Extra
from gateway.listening import runner_of
from gateway.overlap import Decode
from gateway.pace import Pace
from gateway.reloading import Source
from gateway.settings import Settings, load_settings
from relaygen.events import DecodeRequest, Event
from relaygen.session import RelaySession
from tests.gateway.fakes import FakeEngine, FakeVllm, Script, Tokenizer
from tests.gateway.fakes.engines import CHAT
from tests.relaygen.support import make_policy

STORY = ("<think>", "Six", " plus", " six", ".", " Now", " it", " is", " twelve", ".", " Thus",
         " twelve", ".", "</think>", "\n\n", "It", " is", " 1", "2", ".")  # fmt: skip
"""What most engines of the tests write: two cues, two sentences for the small model, an answer."""
REASONING = "Six plus six. Now it is twelve. Thus twelve."
ANSWER = "\n\nIt is 12."
POLICY = "pair"
USER = [{"role": "user", "content": "How many?"}]
WAIT_S = 5.0
NO_RESUME = {"resume": {"attempts": 0}}
"""Settings with which an engine that breaks is the end."""
GONE_S = 1.0
"""How soon a client's leaving must have reached the engines."""


def policy_of(large: FakeEngine, small: FakeEngine, /, **changes: Any) -> dict[str, Any]:
    """A policy for two fakes, cutting as early as can be."""
    return {
        "version": 1,
        "name": POLICY,
        "large": {"backend": "large", "model": large.model},
        "small": {"backend": "small", "model": small.model},
        "cues": {"words": ["Now", "Thus"]},
        "min_large_tokens": 0,
        "slow": {"hold": False},  # a busy machine makes any of them slow
        **changes,
    }


def settings_of(**given: Any) -> Settings:
    return load_settings({"port": 0, **given}, None)


@dataclass(frozen=True)
class Served:
    """A running gateway."""

    url: str
    client: AsyncOpenAI
    app: web.Application


@asynccontextmanager
async def gateway(
    settings: Settings, api_key: str = "any", source: Source | None = None
) -> AsyncIterator[Served]:
    """As gateway/server.py runs it."""
    app = build_app(settings, source)
    runner = runner_of(app, settings)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with openai_client(url, api_key) as client:
            yield Served(url, client, app)
    finally:
        await runner.cleanup()


def openai_client(url: str, api_key: str = "any") -> AsyncOpenAI:
    # Reading the certificates takes longer than most tests, and http needs none.
    plain = DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, http_client=plain)


class Stage:
    """Starts engines and gateways, and stops them when the test ends."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self._stack = stack

    async def engine(self, engine: FakeEngine) -> FakeEngine:
        await engine.start()
        self._stack.push_async_callback(engine.stop)
        return engine

    async def gateway(
        self, settings: Mapping[str, Any], *policies: Mapping[str, Any], api_key: str = "any"
    ) -> Served:
        files = [self.write(f"policy{i}.yaml", policy) for i, policy in enumerate(policies)]
        given = {"policies": self.folder, **({"policy_files": files} if files else {}), **settings}
        return await self._stack.enter_async_context(gateway(settings_of(**given), api_key))

    async def pair(
        self,
        large: FakeEngine,
        small: FakeEngine,
        settings: Mapping[str, Any] = {},
        /,
        **policy: Any,
    ) -> Served:
        """Two engines, their policy and the gateway before them."""
        await self.engine(large)
        await self.engine(small)
        given = {"backends": backends_of(large, small), **settings}
        return await self.gateway(given, policy_of(large, small, **policy))

    def write(self, name: str, content: Mapping[str, Any] | str) -> Path:
        path = self.folder / name
        text = content if isinstance(content, str) else yaml.safe_dump(dict(content))
        path.write_text(text, encoding="utf-8")
        return path


def backends_of(large: FakeEngine, small: FakeEngine) -> dict[str, Any]:
    return {"large": {"urls": [large.url]}, "small": {"urls": [small.url]}}


async def scripted_pair(
    stage: Stage, large: Script, small: Script, dialect: type[FakeEngine] = FakeVllm, **policy: Any
) -> tuple[Served, FakeEngine, FakeEngine]:
    """The gateway before two engines of one vocabulary that do as their scripts say."""
    vocabulary = Tokenizer()
    engines = [
        dialect(script, model=model, tokenizer=vocabulary)
        for script, model in ((large, "big"), (small, "tiny"))
    ]
    return (await stage.pair(*engines, **policy), *engines)


async def two_large(
    stage: Stage, first: FakeVllm, second: FakeVllm, *, chats: bool = False
) -> Served:
    """Two replicas of the large model, the first of which is asked first; `chats` are served."""
    small = FakeVllm(model="tiny")
    for engine in (first, second, small):
        engine.chats = chats
        await stage.engine(engine)
    backends = {"large": {"urls": [first.url, second.url]}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": backends}, policy_of(first, small))
    await until_ready(served, 200)
    return served


# ---- what the gateway says of itself ------------------------------------------------------------


async def get(served: Served, path: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(served.url + path) as response:
        return response.status, await response.json()


async def until_ready(served: Served, wanted: int) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while (answer := await get(served, "/readyz"))[0] != wanted:
            pass
    return answer[1]


def nothing_ahead(session: RelaySession, decode: Decode) -> Ahead:
    """Opens a decode when it is asked for, and not before."""

    async def telling(request: DecodeRequest) -> AsyncGenerator[Event]:
        async with aclosing(decode(request)) as events:
            yield ASKED
            async for event in events:
                yield event

    return Ahead(make_policy(), session, telling, decode, Pace(), Extra())


async def within(seconds: float, awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


Leaving: TypeAlias = AbstractAsyncContextManager[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@asynccontextmanager
async def leaving(
    url: str, path: str = CHAT, **body: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has asked, and leaves at the end of the block."""
    content = json.dumps({"model": POLICY, "messages": USER, **body}).encode()
    host = urlsplit(url)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        yield reader, writer
    finally:
        writer.close()


# ---- what clients see -------------------------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """All chunks of a streamed chat reply, as dicts with every field the gateway sent."""

    chunks: Sequence[dict[str, Any]]

    def text(self, field: str) -> str:
        return "".join(delta.get(field) or "" for delta in self.deltas)

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [c["choices"][0]["delta"] for c in self.chunks if c["choices"]]

    @property
    def finishes(self) -> list[str]:
        reasons = [c["choices"][0]["finish_reason"] for c in self.chunks if c["choices"]]
        return [reason for reason in reasons if reason]

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [c["usage"] for c in self.chunks if c.get("usage")]


async def stream(served: Served, **request: Any) -> Streamed:
    """A streamed chat through the OpenAI SDK."""
    given = {"model": POLICY, "messages": USER, **request}
    chunks = await served.client.chat.completions.create(stream=True, **given)
    return Streamed([chunk.to_dict(mode="json") async for chunk in chunks])


async def ask(served: Served, **request: Any) -> dict[str, Any]:
    """A chat in one piece through the OpenAI SDK."""
    given = {"model": POLICY, "messages": USER, **request}
    reply = await served.client.chat.completions.create(**given)
    return reply.to_dict(mode="json")


def events(wire: bytes) -> list[Any]:
    """The data of an event stream; JSON but for [DONE]."""
    data = [part.removeprefix(b"data: ") for part in wire.split(b"\n\n") if part]
    return [d.decode() if d == b"[DONE]" else json.loads(d) for d in data]


def alive(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> WeakSet[object]:
    """The objects that the module makes of its class from now on, while something holds them."""
    made: WeakSet[object] = WeakSet()

    class Watched(getattr(module, name)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.add(self)

    monkeypatch.setattr(module, name, Watched)
    return made
