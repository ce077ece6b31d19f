"""Clients that keep the raw bytes: many generations side by side, each with its verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from tests.chaos.outcomes import Got, Verdict, judge, read_stream, read_whole
from tests.chaos.transcripts import Question

T = TypeVar("T")
HANG_S = 90.0
"""A generation that takes longer than this hangs: far more than all its back-offs together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    question: Question
    got: Got
    verdict: Verdict
    why: str


class Client:
    """Asks a gateway at `url` (no path) for chats. `model` is a policy's name."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._model = model

    async def ask(self, question: Question, limit_s: float = HANG_S) -> Got:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question.text}],
            "temperature": 0,
            "max_tokens": question.max_tokens,
            **_streaming(question.streamed),
        }
        try:
            async with asyncio.timeout(limit_s):
                return await self._read(body, question.streamed)
        except TimeoutError:
            return Got(problem=f"nothing came to an end within {limit_s:g} s")
        except aiohttp.ClientError as error:
            return Got(problem=f"the connection broke with no answer: {error!r}")

    async def _read(self, body: dict[str, object], streamed: bool) -> Got:
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200 or not streamed:
                return read_whole(response.status, await response.read())
            wire, cut = b"", True
            with suppress(aiohttp.ClientPayloadError):
                async for data in response.content.iter_any():
                    wire += data
                cut = False
            return read_stream(wire, cut=cut)


def _streaming(streamed: bool) -> dict[str, object]:
    return {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}


def plain_session() -> aiohttp.ClientSession:
    """As many connections as are asked for, and no limit of its own on time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def references(client: Client, numbers: Iterable[int], at_once: int) -> dict[int, Got]:
    """Each question's reply while nothing fails, by its number."""
    asked = [Question(number) for number in numbers]
    replies = await _side_by_side(asked, client.ask, at_once)
    return {question.number: got for question, got in zip(asked, replies, strict=True)}


async def generations(
    client: Client,
    questions: list[Question],
    references: dict[int, Got],
    at_once: int,
    each: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    async def one(question: Question) -> Outcome:
        got = await client.ask(question)
        outcome = Outcome(question, got, *judge(got, references[question.number]))
        each(outcome)
        return outcome

    return await _side_by_side(questions, one, at_once)


async def _side_by_side(
    questions: Iterable[Question], work: Callable[[Question], Awaitable[T]], at_once: int
) -> list[T]:
    """The results in the order of the questions; never more than `at_once` are worked on."""
    free = asyncio.Semaphore(at_once)

    async def one(question: Question) -> T:
        async with free:
            return await work(question)

    return await asyncio.gather(*map(one, questions))
