"""A policy's pair of engines for one generation, and how their handoffs are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gateway.backends import Replica, ReplicaSet
from gateway.engines.base import Engine, EngineInfo, Sampling, opened_by
from gateway.engines.chat import Chat, Prefill
from gateway.engines.tokenization import Prompt, Tokenization
from gateway.errors import GatewayError, RequestError, UnreachableError, UpstreamError
from gateway.openai_api import Ask, RawPrompt
from gateway.tokenizers import LocalTokenizer
from relaygen.events import DecodeRequest, Event, Role
from relaygen.policy import Policy

HandoffForm = Literal["tokens", "text"]
_NONE: Mapping[str, UpstreamError] = {}


@dataclass(frozen=True, slots=True)
class Side:
    """One role: its engine, model name, and whoever renders and tokenizes for it.

    `tokens` is None where nobody does. `prefill` is set where the engine's chat endpoint goes on
    with the generation, by an unfinished message of that form; `closed` after the thinking.
    """

    role: Role
    model: str
    replica: Replica
    engine: Engine
    info: EngineInfo
    tokens: Tokenization | None
    vocabulary: str | None
    prefill: Prefill | None = None
    closed: Prefill | None = None

    @property
    def ids(self) -> bool:
        """Whether handoffs to and from it can be by token ids."""
        return self.info.ids and self.prefill is None

    @property
    def note(self) -> str | None:
        """What a user should know of this side, though it works."""
        if self.model in self.info.models or self.info.dialect != "llamacpp":
            return None
        served = ", ".join(self.info.models)
        return (
            f"{self.role}: asked for {self.model!r}, but llama.cpp serves its one model: {served}"
        )

    async def prompt(self, policy: Policy, ask: Ask, raw: RawPrompt | None) -> Prompt:
        """The prompt as this role's model wants it: the request's chat, or a raw one."""
        with self.failing():
            if raw is None:
                return await self._chat_prompt(policy, ask)
            if isinstance(raw, tuple):
                return Prompt(raw)
            if self.tokens is None:
                raise RequestError(
                    f"The {self.role} model can't be sent a raw `prompt`: its server has no "
                    "tokenizer; use /v1/chat/completions",
                    param="prompt",
                )
            return await _begun_once(self.tokens, self.model, raw)

    async def _chat_prompt(self, policy: Policy, ask: Ask) -> Prompt:
        rendered = Prompt(None)
        if self.tokens is not None:
            rendered = await self.tokens.render(self.model, ask.template)
        if self.prefill is None:
            return rendered
        opened = ""
        if self.tokens is not None:
            opened = opened_by(await self.tokens.tail(self.model, rendered), policy.thinking)
        chat = Chat(ask.template, policy.thinking, opened, self.prefill, self.closed)
        return Prompt(rendered.ids, rendered.text, chat)

    async def tail(self, prompt: Prompt, length: int, *, given: bool) -> str:
        """The end of the prompt's text. RequestError for ids of the client's that are no tokens."""
        if self.tokens is None:
            return ""
        with self.failing():
            try:
                return await self.tokens.tail(self.model, prompt, length)
            except UnreachableError:
                raise
            except UpstreamError as error:
                if not given:
                    raise
                message = f"`prompt` has token ids that the model does not know: {error.message}"
                raise RequestError(message, param="prompt") from None

    def decode(
        self, prompt: Prompt, request: DecodeRequest, sampling: Sampling
    ) -> AsyncGenerator[Event]:
        return self.engine.decode(self.model, prompt, request, sampling)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Remembers which engine an error is of, and what it tells of its health."""
        try:
            yield
        except UpstreamError as error:
            if error.engine is None:  # else it was counted further in
                error.engine = self.engine.url
                self.replica.failed(error)
            raise


async def _begun_once(tokens: Tokenization, model: str, raw: str) -> Prompt:
    """A raw prompt after one BOS, if the model has one: also where its text begins with it."""
    begin = await tokens.begin(model)
    ids = await tokens.tokenize(model, raw)
    if not begin:
        return Prompt(ids, raw)
    bos = await tokens.detokenize(model, begin)
    if ids[: len(begin)] == begin:
        return Prompt(ids, raw, bos=bos)
    return Prompt(begin + ids, bos + raw, bos=bos)


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides, or in a solo generation the one; `why` explains the form of the handoff.

    `absent` is the role that the other stands in for, and why.
    """

    sides: Mapping[Role, Side]
    handoff: HandoffForm
    why: str
    absent: tuple[Role, UpstreamError] | None = None

    @property
    def context(self) -> int | None:
        """The smaller context window, in tokens; None where no engine tells."""
        known = [s.info.context for s in self.sides.values() if s.info.context]
        return min(known, default=None)


async def open_pair(
    policy: Policy,
    backends: Mapping[str, ReplicaSet],
    roles: Sequence[Role] = tuple(Role),
    avoid: Mapping[str, UpstreamError] = _NONE,
    opening: ExitStack | None = None,
) -> Pair:
    """Takes a replica for each role. Raises UpstreamError while the policy can't be served.

    `avoid` are the engines that failed already: they are asked again only where no other role can
    stand in for theirs. Until `opening` is closed, what is taken counts as load.
    """
    both = len(roles) > 1
    opened = await asyncio.gather(
        *(_opened(policy, role, backends, avoid, both, opening) for role in roles),
        return_exceptions=True,
    )
    sides = [side for side in opened if isinstance(side, Side)]
    absent: tuple[Role, UpstreamError] | None = None
    for role, error in zip(roles, opened, strict=True):
        if not isinstance(error, BaseException):
            continue
        # What the settings or the policy have wrong is not for another role to mend.
        down = isinstance(error, UpstreamError) and error.engine is not None
        if not down or not sides or not policy.stands_in(role):
            raise error
        assert isinstance(error, UpstreamError)
        absent = (role, error)
    handoff, why = _handoff(policy, sides)
    return Pair({side.role: side for side in sides}, handoff, why, absent)


async def _opened(
    policy: Policy,
    role: Role,
    backends: Mapping[str, ReplicaSet],
    avoid: Mapping[str, UpstreamError],
    both: bool,
    opening: ExitStack | None,
) -> Side:
    replicas = replicas_of(policy, role, backends)
    if avoid and both and policy.stands_in(role) and not replicas.beyond(avoid):
        raise next(error for url, error in avoid.items() if url in replicas.urls)
    replica = await replicas.choose(avoid, policy.spec(role).model)
    if opening is not None:  # before anything is awaited: who asks now must see it
        opening.enter_context(replica.in_use())
    return await side_of(policy, role, replica)


def replicas_of(policy: Policy, role: Role, backends: Mapping[str, ReplicaSet]) -> ReplicaSet:
    name = policy.spec(role).backend
    if name not in backends:
        raise UpstreamError(
            f"Policy {policy.name!r}: {role}.backend is {name!r}, which the settings do "
            f"not have; known: {', '.join(backends)}",
            status=503,
        )
    return backends[name]


async def side_of(policy: Policy, role: Role, replica: Replica) -> Side:
    """The role, played by this replica. Raises UpstreamError where it can't be."""
    spec = policy.spec(role)
    engine, info = await replica.ready()
    if not info.serves(spec.model):
        raise UpstreamError(
            f"Policy {policy.name!r}: {role}.model is {spec.model!r}, but the engine at "
            f"{engine.url} serves {', '.join(info.models)}",
            status=503,
        )
    tokens, vocabulary = await _tokens(spec.tokenizer, spec.model, engine, info)
    side = Side(role, spec.model, replica, engine, info, tokens, vocabulary)
    if info.continuation == "chat" or tokens is None:
        prefill, closed = await _prefills(policy, side)
        return replace(side, prefill=prefill, closed=closed)
    return side


async def _tokens(
    tokenizer: str, model: str, engine: Engine, info: EngineInfo
) -> tuple[Tokenization | None, str | None]:
    if tokenizer != "auto":
        local = _local(tokenizer)
        return local, await local.vocabulary(model)
    return (engine, info.vocabulary) if engine.renders else (None, None)


@lru_cache(maxsize=16)
def _local(name: str) -> LocalTokenizer:
    return LocalTokenizer(name)


async def _prefills(policy: Policy, side: Side) -> tuple[Prefill, Prefill]:
    """How the engine's chat endpoint is gone on with, inside the thinking and after it.

    Raises UpstreamError where it is not.
    """
    engine, thinking = side.engine, policy.thinking
    with side.failing():
        inside = await engine.goes_on(side.model, thinking, closed=False)
        after = await engine.goes_on(side.model, thinking, closed=True)
    if inside is None or after is None:
        where = "inside" if inside is None else "after"
        other = (
            "a `tokenizer` in the policy" if side.tokens is None else "continuation: completions"
        )
        raise UpstreamError(
            f"Policy {policy.name!r}: the chat endpoint at {engine.url} does not go on exactly "
            f"from an unfinished message that ends {where} the thinking of {side.role}'s model (it "
            f"opens a new turn, or its template rewrites the message); use {other}, or set "
            "`prefill` in its backend if it does",
            status=503,
        )
    return inside, after


def _handoff(policy: Policy, sides: list[Side]) -> tuple[HandoffForm, str]:
    form, why = _possible(sides)
    if policy.handoff == "text":
        return "text", "the policy says so"
    if policy.handoff == "tokens" and form != "tokens":
        raise UpstreamError(
            f"Policy {policy.name!r}: handoff is `tokens`, but {why}; set handoff to auto or text",
            status=503,
        )
    return form, why


def _possible(sides: list[Side]) -> tuple[HandoffForm, str]:
    for side in sides:
        if side.prefill is not None:
            return "text", f"{side.role} is gone on with by chat"
        if not side.ids:
            return "text", f"{side.info.dialect} ({side.role}) takes no token ids"
    vocabularies = [side.vocabulary for side in sides]
    if None not in vocabularies and len(set(vocabularies)) == 1:
        return "tokens", f"both vocabularies are equal ({vocabularies[0]})"
    return "text", f"the vocabularies differ ({' and '.join(str(v) for v in vocabularies)})"


async def tool_side(policy: Policy, pair: Pair) -> tuple[Side | None, str]:
    """Who can write what follows the thinking of a request with tools, or why nobody can."""
    if policy.tools == "whole":
        return None, "the policy says so (tools: whole)"
    side = pair.sides.get(Role(policy.tools))
    if side is None:
        return None, f"no engine of the {policy.tools} model is up"
    engine = side.engine
    form = None
    if engine.tools:
        with side.failing():
            form = await engine.goes_on(side.model, policy.thinking, closed=True)
    if form is None or form not in engine.form_prefills:
        return None, f"the chat endpoint of {engine.url} does not go on exactly from a thought"
    return side, f"{side.role} goes on by chat ({form})"


async def status(policy: Policy, backends: Mapping[str, ReplicaSet]) -> dict[str, object]:
    """For /readyz: whether the policy can be served, by which handoff and why."""
    try:
        pair = await open_pair(policy, backends)
        tools, why = await tool_side(policy, pair)
    except GatewayError as error:
        return {"ready": False, "error": error.message}
    state: dict[str, object] = {
        "ready": True,
        "handoff": pair.handoff,
        "why": pair.why,
        "context": pair.context,
        "tools": why if tools else f"whole to the large model: {why}",
    }
    notes = [note for side in pair.sides.values() if (note := side.note)]
    if pair.absent is not None:
        role, why_absent = pair.absent
        notes.append(f"the {role.other} model writes alone: {why_absent.message}")
    return {**state, "notes": notes} if notes else state


def check_shared_ids(ask: Ask, pair: Pair) -> None:
    """A prompt of token ids means the same to both models only with one vocabulary."""
    if any(isinstance(raw, tuple) for raw in ask.prompts) and pair.handoff != "tokens":
        raise RequestError(
            f"`prompt` is a list of token ids, but {pair.why}; send text instead", param="prompt"
        )
