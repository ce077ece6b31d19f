"""A policy's pair of engines for one generation, and how their handoffs are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gateway.backends import ReplicaSet
from gateway.engines.base import Engine, EngineInfo, Prompt, Sampling, Tokenization
from gateway.errors import GatewayError, RequestError, UnreachableError, UpstreamError
from gateway.openai_api import Ask
from gateway.tokenizers import LocalTokenizer
from relaygen.events import DecodeRequest, Event, Role
from relaygen.policy import Policy

HandoffForm = Literal["tokens", "text"]


@dataclass(frozen=True, slots=True)
class Side:
    """One role: its engine, model name, and whoever renders and tokenizes for it."""

    role: Role
    model: str
    engine: Engine
    info: EngineInfo
    tokens: Tokenization
    vocabulary: str | None
    replicas: ReplicaSet

    @property
    def note(self) -> str | None:
        """What a user should know of this side, though it works."""
        if self.model in self.info.models:
            return None
        served = ", ".join(self.info.models)
        return (
            f"{self.role}: asked for {self.model!r}, but llama.cpp serves its one model: {served}"
        )

    async def prompt(self, ask: Ask) -> Prompt:
        """The request's prompt as this role's model wants it."""
        if isinstance(ask.prompt, tuple):
            return Prompt(ask.prompt)
        with self._failing():
            if ask.chat:
                return await self.tokens.render(self.model, ask.template)
            ids = await self.tokens.tokenize(self.model, ask.prompt, special=True)
            return Prompt(ids, ask.prompt)

    async def tail(self, prompt: Prompt, ask: Ask, length: int) -> str:
        """The end of the prompt's text. RequestError for ids of the client's that are no tokens."""
        try:
            return await self.tokens.tail(self.model, prompt, length)
        except UnreachableError:
            raise
        except UpstreamError as error:
            if not isinstance(ask.prompt, tuple):
                raise
            message = f"`prompt` has token ids that the model does not know: {error.message}"
            raise RequestError(message, param="prompt") from None

    async def decode(
        self, prompt: Prompt, request: DecodeRequest, sampling: Sampling
    ) -> AsyncGenerator[Event]:
        decode = self.engine.decode(self.model, prompt, request, sampling)
        with self._failing():
            async with aclosing(decode) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Remembers which engine an error is of; one that can't be reached is down."""
        try:
            yield
        except UpstreamError as error:
            error.engine = self.engine.url
            if isinstance(error, UnreachableError):
                self.replicas.down(self.engine, error)
            raise


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides, or in a solo generation the one; `why` explains the form of the handoff."""

    sides: Mapping[Role, Side]
    handoff: HandoffForm
    why: str

    @property
    def context(self) -> int | None:
        """The smaller context window, in tokens; None where no engine tells."""
        known = [s.info.context for s in self.sides.values() if s.info.context]
        return min(known, default=None)


async def open_pair(
    policy: Policy,
    backends: Mapping[str, ReplicaSet],
    roles: Iterable[Role] = tuple(Role),
    avoid: Collection[str] = (),
) -> Pair:
    """Takes a replica for each role. Raises UpstreamError while the policy can't be served."""
    sides = await asyncio.gather(*(_side(policy, role, backends, avoid) for role in roles))
    handoff, why = _handoff(policy, [side.vocabulary for side in sides])
    return Pair({side.role: side for side in sides}, handoff, why)


async def _side(
    policy: Policy, role: Role, backends: Mapping[str, ReplicaSet], avoid: Collection[str]
) -> Side:
    spec = policy.spec(role)
    replicas = backends.get(spec.backend)
    if replicas is None:
        raise UpstreamError(
            f"Policy {policy.name!r}: {role}.backend is {spec.backend!r}, which the settings do "
            f"not have; known: {', '.join(backends)}",
            status=503,
        )
    engine, info = await replicas.choose(avoid)
    # llama.cpp serves its one model under any name.
    if spec.model not in info.models and info.dialect != "llamacpp":
        raise UpstreamError(
            f"Policy {policy.name!r}: {role}.model is {spec.model!r}, but the engine at "
            f"{engine.url} serves {', '.join(info.models)}",
            status=503,
        )
    if spec.tokenizer == "auto":
        return Side(role, spec.model, engine, info, engine, info.vocabulary, replicas)
    local = _local(spec.tokenizer)
    vocabulary = await local.vocabulary(spec.model)
    return Side(role, spec.model, engine, info, local, vocabulary, replicas)


@lru_cache(maxsize=16)
def _local(name: str) -> LocalTokenizer:
    return LocalTokenizer(name)


def _handoff(policy: Policy, vocabularies: list[str | None]) -> tuple[HandoffForm, str]:
    equal = None not in vocabularies and len(set(vocabularies)) == 1
    if policy.handoff == "text":
        return "text", "the policy says so"
    if equal:
        return "tokens", f"both vocabularies are equal ({vocabularies[0]})"
    shown = " and ".join(str(v) for v in vocabularies)
    if policy.handoff == "tokens":
        raise UpstreamError(
            f"Policy {policy.name!r}: handoff is `tokens`, but the vocabularies differ ({shown}); "
            "set handoff to auto or text",
            status=503,
        )
    return "text", f"the vocabularies differ ({shown})"


async def status(policy: Policy, backends: Mapping[str, ReplicaSet]) -> dict[str, object]:
    """For /readyz: whether the policy can be served, by which handoff and why."""
    try:
        pair = await open_pair(policy, backends)
    except GatewayError as error:
        return {"ready": False, "error": error.message}
    state: dict[str, object] = {
        "ready": True,
        "handoff": pair.handoff,
        "why": pair.why,
        "context": pair.context,
    }
    notes = [note for side in pair.sides.values() if (note := side.note)]
    return {**state, "notes": notes} if notes else state


def check_shared_ids(ask: Ask, pair: Pair) -> None:
    """A prompt of token ids means the same to both models only with one vocabulary."""
    if isinstance(ask.prompt, tuple) and pair.handoff != "tokens":
        raise RequestError(
            f"`prompt` is a list of token ids, but {pair.why}; send text instead", param="prompt"
        )
