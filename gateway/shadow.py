"""Shadow comparison: some relayed requests are answered by the large model alone as well.

In the background, and no client sees it: it tells whether both come to the same final answer, and
what time either took, on the traffic that a policy really has.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import structlog

from gateway import metrics
from gateway.errors import GatewayError
from gateway.generation import Generation, Relaying, ServedWholeError, prepared
from gateway.openai_api import Ask
from gateway.settings import ShadowSettings
from gateway.tracing import ReplySpan
from relaygen.answers import agree, final_answer
from relaygen.policy import Policy
from relaygen.state import State

log = structlog.get_logger()


class Shadow:
    """Those that run. Close it to end them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def consider(
        self,
        settings: ShadowSettings,
        relaying: Relaying,
        ask: Ask,
        generation: Generation,
    ) -> None:
        """A generation of this request is over: perhaps it is to be compared."""
        whole = generation.session.state is State.DONE and generation.tools is None
        if not whole or ask.solo is not None or random.random() >= settings.share:
            return
        if len(self._tasks) >= settings.concurrent:
            metrics.shadow(generation.policy.name, "skipped")
            return
        task = asyncio.create_task(_compared(settings, relaying, ask, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _compared(
    settings: ShadowSettings, relaying: Relaying, ask: Ask, relayed: Generation
) -> None:
    policy = relayed.policy
    try:
        async with asyncio.timeout(settings.seconds):
            alone = await _alone(policy, ask, relaying)
    except (GatewayError, ServedWholeError, TimeoutError) as error:
        metrics.shadow(policy.name, "failed")
        log.warning("shadow failed", policy=policy.name, error=str(error) or "took too long")
        return
    close = policy.thinking.close
    texts = (relayed.session.text, alone.session.text)
    same = agree(*(final_answer(text, close) for text in texts))
    metrics.shadow(policy.name, "agrees" if same else "differs")
    seconds = (relayed.spent.total, alone.spent.total)
    metrics.shadow_seconds(policy.name, *seconds)
    tokens = (relayed.session.usage.completion_tokens, alone.session.usage.completion_tokens)
    log.info(
        "shadow",
        policy=policy.name,
        agrees=same,
        relay_seconds=round(seconds[0], 4),
        large_seconds=round(seconds[1], 4),
        relay_tokens=tokens[0],
        large_tokens=tokens[1],
    )


async def _alone(policy: Policy, ask: Ask, relaying: Relaying) -> Generation:
    """The same request, written by the large model."""
    asked = replace(ask, mode="large", n=1)
    async with prepared(policy, asked, relaying, ReplySpan({})) as generations:
        async with aclosing(generations[0].run()) as batches:
            async for _ in batches:
                pass
        generations[0].spent.end()
        if generations[0].session.state is not State.DONE:
            raise GatewayError("the large model's generation failed")
        return generations[0]
