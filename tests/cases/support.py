"""What the cases over sockets share: engines side by side, and clients that see every byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.gateway.fakes import FakeEngine, Tokenizer, story
from tests.gateway.fakes.engines import CHAT
from tests.gateway.fakes.script import ASSISTANT
from tests.gateway.support import POLICY, STORY, USER, Served, Stage, events, policy_of

Dialect = Callable[..., FakeEngine]

BY_CHAT = {"continuation": "chat"}


def pair_of(
    dialect: Dialect, *tokens: str, vocabularies: int = 1, **options: Any
) -> tuple[FakeEngine, FakeEngine]:
    """A large and a small engine that write the same story, from wherever it has come to."""
    script, one = story(*(tokens or STORY)), Tokenizer()
    other = one if vocabularies == 1 else Tokenizer(offset=50_000)
    large = dialect(script, model="big", tokenizer=one, **options)
    return large, dialect(script, model="tiny", tokenizer=other, **options)


async def served_by(
    stage: Stage,
    large: FakeEngine,
    small: FakeEngine,
    backend: Mapping[str, Any] = {},
    /,
    **policy: Any,
) -> Served:
    """A gateway before two engines, with more said of their backends."""
    engines = {"large": large, "small": small}
    for engine in engines.values():
        await stage.engine(engine)
        engine.chats = engine.chats or "continuation" in backend
    backends = {name: {"urls": [e.url], **backend} for name, e in engines.items()}
    return await stage.gateway({"backends": backends}, policy_of(large, small, **policy))


def written(prompt: str) -> str:
    """What of a prompt the models wrote."""
    return prompt.rpartition(ASSISTANT)[2]


# ---- clients that see every byte ----------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    wire: bytes

    @property
    def events(self) -> list[Any]:
        return events(self.wire)

    @property
    def error(self) -> dict[str, Any]:
        """Of a reply that is no stream."""
        error: dict[str, Any] = json.loads(self.wire)["error"]
        return error

    def text(self, field: str) -> str:
        choices = [c for e in self.events if "choices" in e for c in e["choices"]]
        return "".join(choice["delta"].get(field) or "" for choice in choices)

    @property
    def looks_complete(self) -> bool:
        return b"[DONE]" in self.wire or b'"finish_reason":"stop"' in self.wire


async def post(served: Served, path: str = CHAT, **body: Any) -> Answer:
    content = {"model": POLICY, "messages": USER, **body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + path, json=content) as response,
    ):
        return Answer(response.status, response.headers, await response.read())
