"""The generations of one request: from what the client asked to the sessions' outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import structlog

from gateway import metrics
from gateway.ahead import Ahead
from gateway.backends import ReplicaSet
from gateway.engines.base import Sampling
from gateway.engines.tokenization import TAIL_CHARS, Prompt
from gateway.errors import GatewayError, UpstreamError
from gateway.estimate import estimate_tokens
from gateway.extra import Extra
from gateway.observed import Observed
from gateway.openai_api import Ask, RawPrompt
from gateway.pace import Pace, Paces, Timed
from gateway.pairs import Pair, Side, check_shared_ids, open_pair, replicas_of, tool_side
from gateway.phase import own_words, phase_of_chat, phase_of_text
from gateway.relay import relay
from gateway.resuming import EARLY_S, Resuming, Rounds
from gateway.seats import Seats
from gateway.settings import ResumeSettings
from gateway.spent import Spent
from gateway.tracing import ReplySpan, Tracing
from relaygen.events import DecodeRequest, Event, Output, Role
from relaygen.policy import Policy, Thinking
from relaygen.session import Limits, RelaySession
from relaygen.thinking import Phase

log = structlog.get_logger()

_SEEDS_APART = 2**16
"""Between the seeds of two choices: more than a generation has segments."""


class ServedWholeError(Exception):
    """The request can't be relayed faithfully by this pair: the large model serves all of it."""


@dataclass(frozen=True, slots=True)
class Relaying:
    """What all generations of a gateway share."""

    backends: Mapping[str, ReplicaSet]
    resume: ResumeSettings
    first_token_s: float
    paces: Paces = field(default_factory=Paces)
    tracing: Tracing = field(default_factory=Tracing)


def _ids_in(prefix: tuple[int, ...] | str) -> int:
    return 0 if isinstance(prefix, str) else len(prefix)


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
    why: str
    """Of the form in which its handoffs are sent."""
    session: RelaySession
    seats: Seats
    prompts: Prompts
    sampling: Mapping[Role, Sampling]
    pace: Pace
    first_token_s: float
    resuming: Resuming
    observed: Observed
    spent: Spent
    extra: Extra
    span: ReplySpan
    tools: Role | None
    """Who writes what follows the thinking, where the session does not."""
    held: frozenset[Role]
    """Roles that it does without from its beginning."""

    def run(self) -> AsyncGenerator[list[Output]]:
        self.session.holds = self._held
        self.spent.begin()
        decodes = (self._decode, self._aside)
        ahead = Ahead(self.policy, self.session, *decodes, self.pace, self.extra)
        return relay(self.session, ahead, self.resuming.after, self.observed)

    async def _decode(self, request: DecodeRequest) -> AsyncGenerator[Event]:
        role = request.role
        seat = self.seats.seat(role)
        side = seat.side
        seen = self.observed
        gaps = seen.gaps[role]
        timed = Timed(role, self.policy, self.first_token_s, self.resuming.can_leave, gaps)
        seen.sent[role] += len(seat.prompt.ids or ()) + _ids_in(request.prefix)
        traced = self.span.decode(side, request, self.index, timed)
        failed = False
        try:
            with side.failing(), traced as headers:
                decode = side.decode(seat.prompt, request, self._sampling(role, headers))
                async with aclosing(decode):
                    yield await timed.asked(decode)
                    event = await timed.first(decode, side.engine.url)
                    yield event
                    timed.taken()
                    async for event in decode:
                        timed.came(event)
                        yield event
                        timed.taken()
        except GatewayError:
            failed = True
            raise
        finally:  # a decode that was cut has come this far
            self.pace.add(role, *timed.measured)
            if timed.began:
                seen.read(role, timed.event)
                self.spent.add(role, timed.first_s, *timed.measured)
            if timed.began and not failed:
                side.replica.succeeded()

    def _aside(self, request: DecodeRequest) -> AsyncGenerator[Event]:
        """A decode that the generation does not read: nor does it tell of the engine's health."""
        seat = self.seats.seat(request.role)
        sampling = replace(self._sampling(request.role, self.span.headers), tells=False)
        return seat.side.decode(seat.prompt, request, sampling)

    def _sampling(self, role: Role, headers: Mapping[str, str]) -> Sampling:
        given = self.sampling[role]
        return replace(given, headers=headers) if headers else given

    def _held(self) -> frozenset[Role]:
        """The role that is better not handed to now: its engines are down, fail or are slow."""
        other, held = self.session.role.other, self.held | self.resuming.given_up
        if not self.policy.stands_in(other) or self.seats.up(other):
            return held
        return held | {other}

    @property
    def writer(self) -> tuple[Role, int]:
        """The role that writes now, and the number of its segment."""
        return self.session.role, self.session.segment


@asynccontextmanager
async def prepared(
    policy: Policy, ask: Ask, relaying: Relaying, span: ReplySpan
) -> AsyncIterator[list[Generation]]:
    """Takes the engines, until the block ends, and renders the prompts: one entry a choice.

    An engine that fails here is passed over for another. Raises GatewayError for what stands
    against the generation, ServedWholeError where another way of serving it is called for.
    """
    failed: dict[str, UpstreamError] = {}
    rounds = Rounds(EARLY_S if relaying.resume.attempts else 0.0, patient=False)
    while True:
        try:
            generations = await _prepare(policy, ask, relaying, failed, span)
            break
        except UpstreamError as error:
            if not await _passed_over(error, failed, policy, ask, relaying.backends, rounds):
                metrics.never_began(policy.name, ask.choices)
                raise
            log.warning("trying another replica", policy=policy.name, error=error.message)
    try:
        yield generations
    finally:
        for generation in generations:
            generation.session.holds = frozenset  # else the two would hold each other
            generation.seats.leave()


async def _passed_over(
    error: UpstreamError,
    failed: dict[str, UpstreamError],
    policy: Policy,
    ask: Ask,
    backends: Mapping[str, ReplicaSet],
    rounds: Rounds,
) -> bool:
    """Notes which engine failed; whether it can be done without, or asked again."""
    if error.engine is None or not ask.resume:
        return False
    again = error.engine in failed
    failed[error.engine] = error
    if not again and _spare(policy, ask, backends, failed):
        return True
    sets = [replicas_of(policy, role, backends) for role in ask.roles]
    if not all(replicas.lately_up for replicas in sets) or not await rounds.another(error):
        return False
    failed.clear()
    return True


def _spare(
    policy: Policy, ask: Ask, backends: Mapping[str, ReplicaSet], failed: Collection[str]
) -> bool:
    """Whether each role has a replica that has not failed yet, or another role for it."""
    alone = [role for role in ask.roles if not replicas_of(policy, role, backends).beyond(failed)]
    mended = ask.solo is None and all(policy.stands_in(role) for role in alone)
    return not alone or (mended and len(alone) == 1)


async def _prepare(
    policy: Policy,
    ask: Ask,
    relaying: Relaying,
    avoid: Mapping[str, UpstreamError],
    span: ReplySpan,
) -> list[Generation]:
    with ExitStack() as opening:
        pair = await open_pair(policy, relaying.backends, ask.roles, avoid, opening)
        return await _choices(policy, ask, relaying, pair, span)


async def _choices(
    policy: Policy, ask: Ask, relaying: Relaying, pair: Pair, span: ReplySpan
) -> list[Generation]:
    check_shared_ids(ask, pair)
    if ask.ids and pair.handoff != "tokens" and ask.solo is None:
        raise ServedWholeError(f"{ask.ids}, and {pair.why}")
    tools = await _tools(policy, ask, pair)
    raws: tuple[RawPrompt | None, ...] = ask.prompts or (None,)
    prompts = await asyncio.gather(*(_prompts(policy, ask, pair, raw) for raw in raws))
    if ask.form and prompts[0].phase is Phase.ANSWER:
        raise ServedWholeError(f"{ask.form}, and the template leaves no thinking to relay")
    close_ids = await _close_ids(policy, pair)
    choices = [found for found in zip(raws, prompts, strict=True) for _ in range(ask.n)]
    build = _Building(policy, ask, relaying, pair, span, close_ids, tools)
    return [build.generation(index, raw, prompt) for index, (raw, prompt) in enumerate(choices)]


@dataclass(frozen=True, slots=True)
class _Building:
    """What the choices of one request share."""

    policy: Policy
    ask: Ask
    relaying: Relaying
    pair: Pair
    span: ReplySpan
    close_ids: tuple[int, ...]
    tools: Role | None

    def generation(self, index: int, raw: RawPrompt | None, prompts: Prompts) -> Generation:
        policy, ask, pair, relaying = self.policy, self.ask, self.pair, self.relaying
        session = RelaySession(
            policy,
            _limits(ask, pair, prompts, index),
            handoff=pair.handoff,
            phase=prompts.phase,
            solo=ask.solo,
            close_ids=self.close_ids,
            delegate=self.tools is not None,
        )
        seats = Seats(policy, ask, raw, relaying.backends, pair, prompts.by_role)
        settings = relaying.resume
        pace = relaying.paces[policy.name]
        return Generation(
            index=index,
            policy=policy,
            why=pair.why,
            session=session,
            seats=seats,
            prompts=prompts,
            sampling={role: _sampling(policy, role, ask) for role in ask.roles},
            pace=pace,
            first_token_s=relaying.first_token_s,
            resuming=Resuming(policy.name, session, seats, settings, ask.resume),
            observed=Observed(),
            spent=Spent(),
            extra=Extra(),
            span=self.span,
            tools=self.tools,
            held=self._held(pace),
        )

    def _held(self, pace: Pace) -> frozenset[Role]:
        if self.pair.absent is not None:
            return frozenset({self.pair.absent[0]})
        slow = self.ask.solo is None and self.policy.slow.hold and pace.holds()
        return frozenset({Role.SMALL}) if slow else frozenset()


async def prompt_tokens(
    policy: Policy, ask: Ask, backends: Mapping[str, ReplicaSet]
) -> tuple[int, bool]:
    """How long the prompt is, in tokens, and whether that is an estimate."""
    pair = await open_pair(policy, backends, [Role.LARGE])
    prompt = await _prompts(policy, ask, pair, None)
    return prompt.tokens, prompt.estimated


async def _tools(policy: Policy, ask: Ask, pair: Pair) -> Role | None:
    if ask.form is None:
        return None
    if ask.solo is not None:
        raise ServedWholeError(f"{ask.form}, and one model writes all")
    side, why = await tool_side(policy, pair)
    if side is None:
        raise ServedWholeError(f"{ask.form}: {why}")
    return side.role


async def _prompts(policy: Policy, ask: Ask, pair: Pair, raw: RawPrompt | None) -> Prompts:
    roles, sides = tuple(pair.sides), tuple(pair.sides.values())
    rendered = await asyncio.gather(*(side.prompt(policy, ask, raw) for side in sides))
    first, side = rendered[0], sides[0]
    counted = [len(prompt.ids) for prompt in rendered if prompt.ids is not None]
    echo = ""
    if ask.echo and side.tokens is not None:
        with side.failing():
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
    with side.failing():
        return await side.tokens.fixed_ids(side.model, "\n" + policy.thinking.close)


def _sampling(policy: Policy, role: Role, ask: Ask) -> Sampling:
    fields = {**policy.sampling, **policy.spec(role).sampling, **ask.sampling}
    return Sampling(fields, ask.logprobs, tells=True)
