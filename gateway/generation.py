"""The generations of one request: from what the client asked to the sessions' outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from gateway.backends import ReplicaSet
from gateway.engines.base import Engine, Sampling
from gateway.engines.tokenization import TAIL_CHARS, Prompt
from gateway.estimate import estimate_tokens
from gateway.openai_api import Ask, RawPrompt
from gateway.pairs import Pair, Side, check_shared_ids, open_pair, tool_side
from gateway.phase import own_words, phase_of_chat, phase_of_text
from gateway.relay import relay
from gateway.replies import HandoffTimes
from relaygen.events import DecodeRequest, Event, Output, Role
from relaygen.policy import Policy, Thinking
from relaygen.session import Limits, RelaySession
from relaygen.thinking import Phase

_SEEDS_APART = 2**16
"""Between the seeds of two choices: more than a generation has segments."""


class ServedWholeError(Exception):
    """The request can't be relayed faithfully by this pair: the large model serves all of it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """One prompt as each role's model wants it. `tokens` is its length, `estimated` if a guess."""

    by_role: Mapping[Role, Prompt]
    phase: Phase
    tokens: int
    estimated: bool
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice: a session with all that its decodes need. `run` it once."""

    index: int
    policy: Policy
    pair: Pair
    session: RelaySession
    prompts: Prompts
    sampling: Mapping[Role, Sampling]
    handoffs: HandoffTimes
    tools: Side | None
    """Who writes what follows the thinking, where the session does not."""

    async def run(self) -> AsyncGenerator[list[Output]]:
        run = relay(self.session, self._decode, self.handoffs)
        async with aclosing(run) as batches:
            async for outputs in batches:
                yield outputs

    def _decode(self, request: DecodeRequest) -> AsyncGenerator[Event]:
        side, role = self.pair.sides[request.role], request.role
        return side.decode(self.prompts.by_role[role], request, self.sampling[role])

    @property
    def writer(self) -> tuple[Role, int]:
        """The role that writes now, and the number of its segment."""
        return self.session.role, self.session.segment

    @property
    def engine(self) -> str:
        """The base URL of the engine that writes now."""
        return self.pair.sides[self.session.role].engine.url


@asynccontextmanager
async def prepared(
    policy: Policy, ask: Ask, backends: Mapping[str, ReplicaSet], avoid: Collection[str] = ()
) -> AsyncIterator[list[Generation]]:
    """Takes the engines, until the block ends, and renders the prompts: one entry a choice.

    Raises GatewayError for what stands against the generation, ServedWholeError where another way
    of serving it is called for.
    """
    pair = await open_pair(policy, backends, ask.roles, avoid)
    with ExitStack() as stack:
        for side in pair.sides.values():
            stack.enter_context(_in_use(side.engine))
        yield await _prepare(policy, ask, pair)


async def _prepare(policy: Policy, ask: Ask, pair: Pair) -> list[Generation]:
    check_shared_ids(ask, pair)
    if ask.ids and pair.handoff != "tokens" and ask.solo is None:
        raise ServedWholeError(f"{ask.ids}, and {pair.why}")
    tools = await _tools(policy, ask, pair)
    raws: tuple[RawPrompt | None, ...] = ask.prompts or (None,)
    prompts = await asyncio.gather(*(_prompts(policy, ask, pair, raw) for raw in raws))
    if ask.form and prompts[0].phase is Phase.ANSWER:
        raise ServedWholeError(f"{ask.form}, and the template leaves no thinking to relay")
    close_ids = await _close_ids(policy, pair)
    sampling = {role: _sampling(policy, role, ask) for role in pair.sides}
    choices = [prompt for prompt in prompts for _ in range(ask.n)]
    return [
        Generation(
            index=index,
            policy=policy,
            pair=pair,
            session=RelaySession(
                policy,
                _limits(ask, pair, prompt, index),
                handoff=pair.handoff,
                phase=prompt.phase,
                solo=ask.solo,
                close_ids=close_ids,
                delegate=tools is not None,
            ),
            prompts=prompt,
            sampling=sampling,
            handoffs=HandoffTimes(),
            tools=tools,
        )
        for index, prompt in enumerate(choices)
    ]


async def prompt_tokens(
    policy: Policy, ask: Ask, backends: Mapping[str, ReplicaSet]
) -> tuple[int, bool]:
    """How long the prompt is, in tokens, and whether that is an estimate."""
    pair = await open_pair(policy, backends, [Role.LARGE])
    prompt = await _prompts(policy, ask, pair, None)
    return prompt.tokens, prompt.estimated


async def _tools(policy: Policy, ask: Ask, pair: Pair) -> Side | None:
    if ask.form is None:
        return None
    if ask.solo is not None:
        raise ServedWholeError(f"{ask.form}, and one model writes all")
    side, why = await tool_side(policy, pair)
    if side is None:
        raise ServedWholeError(f"{ask.form}: {why}")
    return side


async def _prompts(policy: Policy, ask: Ask, pair: Pair, raw: RawPrompt | None) -> Prompts:
    roles, sides = tuple(pair.sides), tuple(pair.sides.values())
    rendered = await asyncio.gather(*(side.prompt(policy, ask, raw) for side in sides))
    first, side = rendered[0], sides[0]
    counted = [len(prompt.ids) for prompt in rendered if prompt.ids is not None]
    echo = ""
    if ask.echo and side.tokens is not None:
        echo = raw if isinstance(raw, str) else await side.tokens.text(side.model, first)
    return Prompts(
        by_role=dict(zip(roles, rendered, strict=True)),
        phase=await _phase(policy.thinking, side, first, ask, raw),
        tokens=max(counted) if counted else _estimate(ask),
        estimated=not counted,
        echo=echo,
    )


def _estimate(ask: Ask) -> int:
    """About how many tokens the messages have, for a server that renders nothing."""
    return sum(estimate_tokens(str(message)) for message in ask.template["messages"])


def _limits(ask: Ask, pair: Pair, prompt: Prompts, index: int) -> Limits:
    """What the client asked, for one choice: its own seed, a budget within the context window."""
    seed = ask.limits.seed
    return replace(
        ask.limits,
        max_tokens=_budget(ask, pair, prompt),
        seed=None if seed is None else seed + index * _SEEDS_APART,
    )


def _budget(ask: Ask, pair: Pair, prompt: Prompts) -> int | None:
    """Tokens for the whole generation: what was asked, within the smaller context window.

    A prompt that leaves no room is sent as it is: the engine's own error says it best.
    """
    asked = ask.limits.max_tokens
    if pair.context is None:
        return asked
    room = max(1, pair.context - prompt.tokens)
    return room if asked is None else min(asked, room)


async def _phase(
    thinking: Thinking, side: Side, prompt: Prompt, ask: Ask, raw: RawPrompt | None
) -> Phase:
    given = isinstance(raw, tuple)
    if raw is not None:
        whole = len(prompt.ids or ()) if prompt.text is None else len(prompt.text)
        return phase_of_text(thinking, await side.tail(prompt, whole, given=given))
    own = own_words(ask.template["messages"][-1])
    tail = await side.tail(prompt, len(own) + TAIL_CHARS, given=given)
    return phase_of_chat(thinking, tail or own, own)


async def _close_ids(policy: Policy, pair: Pair) -> tuple[int, ...]:
    """Ids of what ends an unclosed thinking; needed for handoffs by tokens alone."""
    side = next(iter(pair.sides.values()))
    if pair.handoff == "text" or side.tokens is None:
        return ()
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
