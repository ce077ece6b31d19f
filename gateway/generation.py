"""One relayed generation: from what the client asked to the session's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gateway.backends import ReplicaSet
from gateway.engines.base import TAIL_CHARS, Engine, Prompt, Sampling
from gateway.openai_api import Ask
from gateway.pairs import Pair, Side, check_shared_ids, open_pair
from gateway.phase import own_words, phase_of_chat, phase_of_text
from gateway.relay import relay
from gateway.replies import HandoffTimes, usage_object
from relaygen.events import DecodeRequest, Event, Output, Role
from relaygen.policy import Policy, Thinking
from relaygen.session import RelaySession
from relaygen.thinking import Phase
from relaygen.usage import Usage


@dataclass(frozen=True, slots=True)
class Generation:
    """A session with all that its decodes need. `run` it once."""

    policy: Policy
    pair: Pair
    session: RelaySession
    prompts: Mapping[Role, Prompt]
    sampling: Mapping[Role, Sampling]
    handoffs: HandoffTimes

    async def run(self) -> AsyncGenerator[list[Output]]:
        run = relay(self.session, self._decode, self.handoffs)
        async with aclosing(run) as batches:
            async for outputs in batches:
                yield outputs

    def _decode(self, request: DecodeRequest) -> AsyncGenerator[Event]:
        side, role = self.pair.sides[request.role], request.role
        return side.decode(self.prompts[role], request, self.sampling[role])

    @property
    def writer(self) -> tuple[Role, int]:
        """The role that writes now, and the number of its segment."""
        return self.session.role, self.session.segment

    @property
    def engine(self) -> str:
        """The base URL of the engine that writes now."""
        return self.pair.sides[self.session.role].engine.url

    def usage(self, usage: Usage) -> dict[str, Any]:
        first = next(iter(self.prompts.values()))
        return usage_object(self.policy.name, usage, len(first.ids), self.handoffs)


@asynccontextmanager
async def prepared(
    policy: Policy, ask: Ask, backends: Mapping[str, ReplicaSet], avoid: Collection[str] = ()
) -> AsyncIterator[Generation]:
    """Takes the engines, until the block ends, and renders the prompts.

    Raises GatewayError for what stands against the generation.
    """
    pair = await open_pair(policy, backends, ask.roles, avoid)
    with ExitStack() as stack:
        for side in pair.sides.values():
            stack.enter_context(_in_use(side.engine))
        yield await _prepare(policy, ask, pair)


async def _prepare(policy: Policy, ask: Ask, pair: Pair) -> Generation:
    check_shared_ids(ask, pair)
    roles, sides = tuple(pair.sides), tuple(pair.sides.values())
    rendered = await asyncio.gather(*(side.prompt(ask) for side in sides))
    prompts = dict(zip(roles, rendered, strict=True))
    session = RelaySession(
        policy,
        replace(ask.limits, max_tokens=_budget(ask, pair, prompts.values())),
        handoff=pair.handoff,
        phase=await _phase(policy.thinking, sides[0], prompts[roles[0]], ask),
        solo=ask.solo,
        close_ids=await _close_ids(policy, pair),
    )
    sampling = {role: _sampling(policy, role, ask) for role in roles}
    return Generation(policy, pair, session, prompts, sampling, HandoffTimes())


def _budget(ask: Ask, pair: Pair, prompts: Iterable[Prompt]) -> int | None:
    """Tokens for the whole generation: what was asked, within the smaller context window.

    A prompt that leaves no room is sent as it is: the engine's own error says it best.
    """
    asked = ask.limits.max_tokens
    if pair.context is None:
        return asked
    room = max(1, pair.context - max(len(prompt.ids) for prompt in prompts))
    return room if asked is None else min(asked, room)


async def _phase(thinking: Thinking, side: Side, prompt: Prompt, ask: Ask) -> Phase:
    if not ask.chat:
        whole = len(prompt.ids) if prompt.text is None else len(prompt.text)
        return phase_of_text(thinking, await side.tail(prompt, ask, whole))
    own = own_words(ask.template["messages"][-1])
    return phase_of_chat(thinking, await side.tail(prompt, ask, len(own) + TAIL_CHARS), own)


async def _close_ids(policy: Policy, pair: Pair) -> tuple[int, ...]:
    """Ids of what ends an unclosed thinking; needed for handoffs by tokens alone."""
    if pair.handoff == "text":
        return ()
    side = next(iter(pair.sides.values()))
    return await side.tokens.fixed_ids(side.model, "\n" + policy.thinking.close)


def _sampling(policy: Policy, role: Role, ask: Ask) -> Sampling:
    fields = {**policy.sampling, **policy.spec(role).sampling, **ask.sampling}
    return Sampling(fields, ask.logprobs)


@contextmanager
def _in_use(engine: Engine) -> Iterator[None]:
    engine.active += 1
    try:
        yield
    finally:
        engine.active -= 1
