"""Real llama.cpp engines, killed with -9 and started again in the middle of generations.

At temperature 0 llama.cpp repeats itself but for near ties: a prefill of many tokens rounds unlike
steps of one. How far that goes without any fault is measured first, and told.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
import pytest

from gateway.demo.paths import bundled_policy
from gateway.demo.processes import gateway
from tests.chaos.clients import plain_session
from tests.chaos.killable import Engine, engines, killing
from tests.chaos.outcomes import Got, Verdict, judge, read_stream, read_whole
from tests.chaos.world import RESUMES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

QUESTIONS = 12
ROUNDS = 4
AT_ONCE = 4
SEED = 5
NEAR_TIE = 0.02  # as in tests/integration/seam.py
TIE = "near tie"
EQUAL = 0.99 if RESUMES else 0.0
HANG_S = 90.0


@dataclass(frozen=True, slots=True)
class Reply:
    got: Got
    margins: tuple[tuple[int, float], ...] = ()
    """p(top-1) - p(top-2), the least of a chunk, with the place in `text` where it ends."""

    @property
    def text(self) -> str:
        return self.got.reasoning + self.got.content

    def margin_at(self, place: int) -> float:
        return next((margin for end, margin in self.margins if end > place), math.inf)


def question(number: int) -> str:
    rng = Random(f"sum {number}")
    a, b, c, d, e = (rng.randint(2, 99) for _ in range(5))
    return f"What is {a}*{b} + {c}*{d} - {e}?"


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> Reply:
    body = {
        "model": "tiny-pair",
        "messages": [{"role": "user", "content": question(number)}],
        "max_tokens": 700,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with (
        asyncio.timeout(HANG_S),
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            return Reply(read_whole(response.status, await response.read()))
        wire, cut = b"", True
        with suppress(aiohttp.ClientPayloadError):
            async for data in response.content.iter_any():
                wire += data
            cut = False
    return Reply(read_stream(wire, cut=cut), tuple(_margins(wire)))


def _margins(wire: bytes) -> list[tuple[int, float]]:
    found, end = [], 0
    for event in wire.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        for choice in json.loads(event[6:]).get("choices", ()):
            delta, entries = choice["delta"], (choice["logprobs"] or {}).get("content") or []
            end += len((delta.get("reasoning_content") or "") + (delta.get("content") or ""))
            found.append((end, min(map(_margin, entries), default=math.inf)))
    return found


def _margin(entry: dict[str, list[dict[str, float]]]) -> float:
    first, second = (math.exp(top["logprob"]) for top in entry["top_logprobs"][:2])
    return first - second


def judged(reply: Reply, reference: Reply) -> tuple[str, str]:
    """As ever, but for another text that begins where two tokens were about as likely."""
    verdict, why = judge(reply.got, reference.got)
    if verdict is Verdict.WRONG and "text" in why:
        apart = enumerate(zip(reply.text, reference.text, strict=False))
        ends = min(len(reply.text), len(reference.text))
        place = next((i for i, (a, b) in apart if a != b), ends)
        if reference.margin_at(place) < NEAR_TIE:
            return TIE, ""
        why += f" (margin {reference.margin_at(place):.3f})"
    return verdict, why


async def asked(url: str, numbers: list[int], at_once: int) -> list[Reply]:
    free = asyncio.Semaphore(at_once)
    async with plain_session() as session:

        async def one(number: int) -> Reply:
            async with free:
                return await ask(session, url, number)

        return await asyncio.gather(*map(one, numbers))


@asynccontextmanager
async def relay(made: list[Engine]) -> AsyncIterator[str]:
    large, small = ([e for e in made if e.role == role] for role in ("large", "small"))
    more = [flag for e in [*large[1:], *small[1:]] for flag in (f"--{e.role}", f"{e.url}/v1")]
    with TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        given = bundled_policy("tiny-pair").read_text(encoding="utf-8")
        # The large model in the small one's place would write another text, as it should.
        policy.write_text(f"{given}\non_failure: {{small: fail}}\n", encoding="utf-8")
        async with gateway(policy, large[0].url, small[0].url, flags=more) as url:
            yield url


async def test_no_generation_is_lost_to_a_killed_engine() -> None:
    numbers = list(range(QUESTIONS))
    async with engines() as made, relay(made) as url:
        references = await asked(url, numbers, at_once=1)
        again = await asked(url, numbers * 2, at_once=AT_ONCE)
        pairs = zip(again, references * 2, strict=True)
        repeated = Counter(judged(one, other)[0] for one, other in pairs)
        killer = asyncio.create_task(killing(made, SEED, (0.2, 0.8)))
        try:
            replies = await asked(url, numbers * ROUNDS, at_once=AT_ONCE)
        finally:
            killer.cancel()
            with suppress(asyncio.CancelledError):
                await killer
        kills = sum(engine.kills for engine in made)
    verdicts = [judged(*pair) for pair in zip(replies, references * ROUNDS, strict=True)]
    outcomes = Counter(verdict for verdict, _ in verdicts)
    resumes = sum(reply.got.resumes for reply in replies)
    print(
        f"\nwithout a fault: {_told(repeated)}; {kills} kills: {_told(outcomes)}, {resumes} resumes"
    )
    assert kills >= 3
    assert [why for verdict, why in verdicts if verdict is Verdict.WRONG] == []
    assert outcomes[Verdict.EQUAL] + outcomes[TIE] >= EQUAL * len(verdicts)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
