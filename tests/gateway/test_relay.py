"""The driver between a session and its engines."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator

import pytest

from gateway import generation
from gateway.errors import GatewayError
from gateway.observed import Observed
from gateway.relay import relay
from relaygen.events import DecodeChunk, DecodeFinished, DecodeRequest, Delta, Event, Output, Piece
from relaygen.session import RelaySession
from relaygen.thinking import Phase
from tests.gateway.fakes import FakeVllm, Tokenizer, story
from tests.gateway.support import Stage, alive, ask, nothing_ahead
from tests.relaygen.support import make_policy


async def _raised(error: GatewayError, *, started: bool) -> list[Output]:
    raise error


async def test_the_next_decode_is_asked_for_before_the_last_one_is_closed() -> None:
    done: list[str] = []

    def decode(request: DecodeRequest) -> AsyncGenerator[Event]:
        done.append(f"{request.role} asked")
        return events(request)

    async def events(request: DecodeRequest) -> AsyncGenerator[Event]:
        done.append(f"{request.role} opened")
        try:
            await asyncio.sleep(0)  # the engine's answer takes a while
            text = {"large": "Now", "small": " it."}[request.role]
            yield DecodeChunk((Piece(text, (1,)),))
            yield DecodeFinished("length")
        finally:
            await asyncio.sleep(0)
            done.append(f"{request.role} closed")

    session = RelaySession(make_policy("Now"), phase=Phase.THINKING)
    outputs = relay(session, nothing_ahead(session, decode), _raised, Observed())
    for _ in range(3):
        await anext(outputs)
    await outputs.aclose()
    assert done.index("small asked") < done.index("large closed")
    for role in ("large", "small"):
        assert done.count(f"{role} opened") == done.count(f"{role} closed") > 0


async def test_the_next_decode_is_asked_for_before_the_client_gets_the_last_text() -> None:
    asked: list[str] = []

    async def events() -> AsyncGenerator[Event]:
        yield DecodeChunk((Piece("Let", (1,)),))
        yield DecodeChunk((Piece(" Now", (2,)),))

    def decode(request: DecodeRequest) -> AsyncGenerator[Event]:
        asked.append(request.role)
        return events()

    session = RelaySession(make_policy("Now"), phase=Phase.THINKING)
    outputs = relay(session, nothing_ahead(session, decode), _raised, Observed())
    told = [(_text(await anext(outputs)), list(asked)) for _ in range(2)]
    assert told == [("Let", ["large"]), (" Now", ["large", "small"])]
    await outputs.aclose()


async def test_the_first_text_of_all_waits_for_no_handoff() -> None:
    asked: list[str] = []

    async def events() -> AsyncGenerator[Event]:
        yield DecodeChunk((Piece("Now", (1,)),))

    def decode(request: DecodeRequest) -> AsyncGenerator[Event]:
        asked.append(request.role)
        return events()

    session = RelaySession(make_policy("Now"), phase=Phase.THINKING)
    outputs = relay(session, nothing_ahead(session, decode), _raised, Observed())
    assert _text(await anext(outputs)) == "Now"
    assert asked == ["large"]
    await outputs.aclose()


def _text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, Delta))


async def test_generations_are_freed_without_the_garbage_collector(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("<think>", "Six", " Now", " it", " is", ".", "</think>", "Fine")
    vocabulary = Tokenizer()
    large, small = (FakeVllm(story(*texts), model=m, tokenizer=vocabulary) for m in ("b", "t"))
    served = await stage.pair(large, small)
    await ask(served)
    sessions = alive(monkeypatch, generation, "RelaySession")
    gc.disable()
    try:
        for _ in range(3):
            await ask(served)
        assert not sessions
    finally:
        gc.enable()
