"""Asks the large model alone, the small one alone and the relay the same problems, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from openai import AsyncOpenAI

from gateway.demo.ask import Reply, Target, ask
from gateway.demo.problems import Problem, is_right, problems
from gateway.demo.result import Comparison, Graded, Mode, ModeResult, summed

OnReply = Callable[[Mode, Problem, bool], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare: the engines called directly, and the gateway's policy as a model.

    `max_tokens` bounds each reply. With `cache_salt`, each mode's requests carry their own (a field
    that vLLM knows), so that no mode reads another's prefix cache, however large that is.
    """

    large: Target
    small: Target
    relay: Target
    count: int = 24
    seed: int = 1
    max_tokens: int = 1024
    cache_salt: bool = False

    def target(self, mode: Mode) -> Target:
        target = {Mode.LARGE: self.large, Mode.SMALL: self.small, Mode.RELAY: self.relay}[mode]
        if not self.cache_salt:
            return target
        return replace(target, extra_body={**target.extra_body, "cache_salt": f"demo-{mode}"})


def walk(count: int) -> Iterator[tuple[Mode, int]]:
    """The order of the requests: (mode, index of the problem).

    The modes take turns, so that they share the machine's noise, a third of the problems apart: a
    slot of llama.cpp keeps its last prompt and reply, and the next mode would start from those.
    """
    modes = list(Mode)
    for turn in range(count):
        for place in range(len(modes)):
            number = (turn + place) % len(modes)
            yield modes[number], (turn + number * max(1, count // len(modes))) % count


async def compare(plan: Plan, on_reply: OnReply | None = None) -> Comparison:
    """Asks `plan.count` problems in each mode, one request at a time.

    `on_reply` hears of each reply and whether it was right. Raises openai.OpenAIError.
    """
    *asked, spare = problems(plan.count + 1, plan.seed)
    replies: dict[Mode, dict[int, Reply]] = {mode: {} for mode in Mode}
    async with AsyncExitStack() as stack:
        clients = {
            mode: await stack.enter_async_context(plan.target(mode).client()) for mode in Mode
        }
        for mode in Mode:
            await _ask(plan, clients[mode], mode, spare)  # connections and first-use costs
        for mode, index in walk(plan.count):
            reply = await _ask(plan, clients[mode], mode, asked[index])
            replies[mode][index] = reply
            if on_reply:
                on_reply(mode, asked[index], is_right(asked[index], reply.content))
    return _comparison(plan.seed, asked, replies)


async def _ask(plan: Plan, client: AsyncOpenAI, mode: Mode, problem: Problem) -> Reply:
    return await ask(client, plan.target(mode), problem.question, max_tokens=plan.max_tokens)


def _comparison(
    seed: int, asked: Sequence[Problem], replies: dict[Mode, dict[int, Reply]]
) -> Comparison:
    graded = tuple(
        Graded(
            problem.question,
            problem.expected,
            {mode: is_right(problem, replies[mode][i].content) for mode in Mode},
        )
        for i, problem in enumerate(asked)
    )
    results = {mode: _result(mode, replies[mode], graded) for mode in Mode}
    return Comparison(seed, results[Mode.LARGE], results[Mode.SMALL], results[Mode.RELAY], graded)


def _result(mode: Mode, replies: dict[int, Reply], graded: Sequence[Graded]) -> ModeResult:
    return summed(mode, list(replies.values()), sum(each.right[mode] for each in graded))
