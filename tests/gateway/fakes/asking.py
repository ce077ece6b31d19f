"""Asks a fake directly, as its wire format is to be seen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.gateway.fakes.engines import FakeEngine

ASK = [{"role": "user", "content": "How many?"}]
BEGUN = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
"""The same, rendered."""


def after(content: str, **more: Any) -> list[dict[str, Any]]:
    """The question, and an answer begun."""
    return [*ASK, {"role": "assistant", "content": content, **more}]


class Asked:
    """An engine's answer."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status = status
        self.content = content

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def data(self) -> list[str]:
        lines = self.content.decode().split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]

    def text(self, field: str = "content") -> str:
        return "".join(choice["delta"].get(field) or "" for choice in self.choices)

    @property
    def finish(self) -> str:
        return [c["finish_reason"] for c in self.choices if c["finish_reason"]][-1]


class Asking:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def __call__(self, path: str, **body: Any) -> Asked:
        async with self.session.post(path, json=body) as response:
            return Asked(response.status, await response.read())

    async def stream(self, path: str, **body: Any) -> Asked:
        return await self(path, **body, stream=True)

    async def get(self, path: str) -> Asked:
        async with self.session.get(path) as response:
            return Asked(response.status, await response.read())


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[Asking]:
    await engine.start()
    async with aiohttp.ClientSession(engine.url.removesuffix("/v1")) as session:
        yield Asking(session)
    await engine.stop()
