"""One model of the pair, as calibration speaks with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from gateway.connections import Connections
from gateway.engines.base import Engine, EngineInfo
from gateway.engines.chat import Chat
from gateway.engines.detect import detect
from gateway.engines.tokenization import Prompt, Tokenization
from gateway.errors import RequestError
from gateway.settings import Backend, Timeouts
from gateway.tokenizers import LocalTokenizer
from gateway.upstream import Upstream
from relaygen.policy import Thinking

EngineName = Literal["auto", "vllm", "sglang", "tgi", "llamacpp", "openai"]
_IDLE_S = 1800.0  # a scorer's answer comes whole, after all of a long trace was read


@dataclass(frozen=True, slots=True)
class Side:
    """Where a model is served. `url` ends in /v1, or has no path.

    `tokenizer`: `auto` (the engine's), a Hugging Face id or a folder. `template` are fields for the
    chat template (`chat_template_kwargs`), `thinking` the tags around the reasoning.
    """

    url: str
    model: str
    engine: EngineName = "auto"
    api_key: str | None = field(default=None, repr=False)
    tokenizer: str = "auto"
    template: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)


class Connected:
    """A side that answered, and what it is."""

    def __init__(self, side: Side, engine: Engine, info: EngineInfo) -> None:
        self.side = side
        self.engine = engine
        self.info = info
        self.model = side.model
        self.tokens: Tokenization | None = None
        if side.tokenizer != "auto":
            self.tokens = LocalTokenizer(side.tokenizer)
        elif engine.renders:
            self.tokens = engine

    async def vocabulary(self) -> str | None:
        """The fingerprint of the vocabulary; None where it can't be known."""
        if isinstance(self.tokens, LocalTokenizer):
            return await self.tokens.vocabulary(self.model)
        return self.info.vocabulary

    async def prompt(self, question: str) -> Prompt:
        """The question as the model wants to be asked it."""
        request = {
            "messages": [{"role": "user", "content": question}],
            "add_generation_prompt": True,
            **self.side.template,
        }
        if self.tokens is None or self.info.continuation == "chat":
            return Prompt(None, question, Chat(request, self.side.thinking))
        return await self.tokens.render(self.model, request)

    async def text(self, prompt: Prompt) -> str:
        """The text of a prompt."""
        if prompt.text is not None or self.tokens is None:
            return prompt.text or ""
        return await self.tokens.text(self.model, prompt)

    async def described(self) -> dict[str, Any]:
        """For meta.json: which engine this was."""
        return {
            "model": self.model,
            "engine": self.info.dialect,
            "version": self.info.version,
            "context": self.info.context,
            "vocabulary": await self.vocabulary(),
        }


@asynccontextmanager
async def connected(side: Side) -> AsyncIterator[Connected]:
    """The engine at the side's URL. Raises GatewayError where it does not answer as one."""
    backend = _backend(side)
    url = backend.urls[0]
    bare = side.engine == "openai" and not url.endswith("/v1")
    async with Connections(Timeouts(idle=_IDLE_S)) as connections:
        upstream = Upstream(connections, url.removesuffix("/v1"), side.api_key, bare=bare)
        engine = await detect(upstream, backend)
        info = await engine.probe(await engine.identify())
        if not info.serves(side.model):
            raise RequestError(
                f"{side.url} serves no model {side.model!r}, but: {', '.join(info.models)}",
                status=404,
            )
        try:
            yield Connected(side, engine, info)
        finally:
            await asyncio.gather(*getattr(engine, "_aborts", ()), return_exceptions=True)


def _backend(side: Side) -> Backend:
    try:
        return Backend(urls=(side.url,), engine=side.engine)
    except ValidationError as error:
        raise RequestError("; ".join(problem["msg"] for problem in error.errors())) from None
