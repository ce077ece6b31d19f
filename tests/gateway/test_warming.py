"""`warm_every_tokens`: the model that waits reads along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import warming
from gateway.errors import UpstreamError
from gateway.extra import Extra
from gateway.pace import Pace
from gateway.prefill import Prefill
from gateway.warming import Warming
from relaygen.events import DecodeFailed, DecodeRequest, Event, Role
from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Gate, Reset, story
from tests.gateway.fakes.http import Request
from tests.gateway.fakes.script import ASSISTANT, Act, Script
from tests.gateway.support import GONE_S, WAIT_S, Stage, ask, leaving, scripted_pair, within
from tests.relaygen.support import make_policy, thinking_session

WORDS = [f" word{i}" for i in range(12)]
MORE = [f" more{i}" for i in range(12)]
TEXT = ("<think>", *WORDS, " Now", *MORE, "!", " So", "</think>", "Six", ".")
DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])


def gated(gates: dict[str, Gate], since: str = ASSISTANT) -> Script:
    """Writes the text; what begins after `since` waits before each of these tokens."""
    goes_on = story(*TEXT)

    def write(prompt: str) -> Iterable[Act]:
        waits = gates if prompt.endswith(since) else {}
        for token in goes_on(prompt):
            assert isinstance(token, bytes)
            yield from [waits[token.decode()]] if token.decode() in waits else []
            yield token

    return write


def warm_ups(engine: FakeEngine) -> list[Request]:
    return [decode for decode in engine.decodes if wanted(decode) == 1]


def wanted(decode: Request) -> int | None:
    most: int | None = decode.body.get("max_tokens", decode.body.get("n_predict"))
    return most


def spaced(words: list[str], every: int) -> dict[str, Gate]:
    """Gates by the words after each `every`."""
    return {word: Gate() for word in words[every::every]}


async def opened(gates: list[Gate], engine: FakeEngine) -> None:
    """Opens each gate when the engine has been sent one warm-up more, and has answered it."""
    for number, gate in enumerate(gates):
        await within(WAIT_S, gate.reached.wait())
        async with asyncio.timeout(WAIT_S):
            while len(warm_ups(engine)) <= number:
                await asyncio.sleep(0.001)
            await warm_ups(engine)[number].answered.wait()
        gate.opened.set()


@DIALECTS
async def test_the_small_model_reads_along(stage: Stage, dialect: type[FakeEngine]) -> None:
    gates = spaced(WORDS, 4)
    waits = list(gates.values())
    served, _, small = await scripted_pair(
        stage, gated(gates), story(*TEXT), dialect, warm_every_tokens=4
    )
    asking = asyncio.create_task(ask(served))
    await opened(waits, small)
    reply = await within(WAIT_S, asking)
    assert reply["choices"][0]["message"]["content"] == "Six."
    read = [prompt.partition("<think>")[2] for prompt in small.prompts()]
    assert read[:3] == ["".join(WORDS[:4]), "".join(WORDS[:8]), "".join([*WORDS, " Now"])]
    extra = reply["usage"]["relaygen"]["extra"]
    assert (extra["warm_ups"], extra["warm_ups_cut"], extra["tokens"]) == (2, 0, 2)


@DIALECTS
async def test_the_large_model_reads_along_too(stage: Stage, dialect: type[FakeEngine]) -> None:
    gates = spaced(MORE, 4)
    waits = list(gates.values())
    served, large, _ = await scripted_pair(
        stage, story(*TEXT), gated(gates, " Now"), dialect, warm_every_tokens=4
    )
    asking = asyncio.create_task(ask(served))
    await opened(waits, large)
    reply = await within(WAIT_S, asking)
    assert reply["choices"][0]["message"]["content"] == "Six."
    read = [prompt.partition(" Now")[2] for prompt in large.prompts()]
    assert read[1:] == ["".join(MORE[:4]), "".join(MORE[:8]), "".join([*MORE, "!"])]


async def test_the_reply_is_the_same(stage: Stage) -> None:
    replies = []
    for every in (1, 0):
        served, _, _ = await scripted_pair(
            stage, story(*TEXT), story(*TEXT), warm_every_tokens=every
        )
        replies.append(await ask(served))
    assert replies[0]["choices"] == replies[1]["choices"]


# ---- handoffs and ends --------------------------------------------------------------------------


async def test_a_handoff_waits_for_the_warm_up_of_its_engine(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_PATIENCE_S", WAIT_S)
    reading, cue = Gate(), Gate()
    served, _, small = await scripted_pair(
        stage, gated({" Now": cue}), reads_slowly(reading), warm_every_tokens=4
    )
    asking = asyncio.create_task(ask(served))
    await within(WAIT_S, reading.reached.wait())
    cue.opened.set()
    await asyncio.sleep(0.05)  # nothing tells that it waits
    assert len(small.decodes) == 1
    reading.opened.set()
    await small.decode(1)
    assert not warm_ups(small)[0].left.is_set()
    await within(WAIT_S, asking)


async def test_one_that_takes_long_is_cut(stage: Stage) -> None:
    reading, cue = Gate(), Gate()
    served, _, small = await scripted_pair(
        stage, gated({" Now": cue}), reads_slowly(reading), warm_every_tokens=4
    )
    asking = asyncio.create_task(ask(served))
    await within(WAIT_S, reading.reached.wait())
    cue.opened.set()
    extra = (await within(WAIT_S, asking))["usage"]["relaygen"]["extra"]
    assert extra["warm_ups_cut"] >= 1
    assert warm_ups(small)[0].left.is_set()


async def test_leaving_reaches_both_engines(stage: Stage) -> None:
    reading = Gate()
    served, large, small = await scripted_pair(
        stage, gated({" Now": Gate()}), reads_slowly(reading), warm_every_tokens=4
    )
    async with leaving(served.url, stream=True):
        await within(WAIT_S, reading.reached.wait())
    for engine in (large, small):
        await within(GONE_S, engine.decodes[0].left.wait())


async def test_one_that_breaks_is_the_last_and_breaks_nothing(stage: Stage) -> None:
    gates = spaced(WORDS, 4)
    waits = list(gates.values())
    goes_on = story(*TEXT)
    served, _, small = await scripted_pair(
        stage,
        gated(gates),
        lambda p: goes_on(p) if " Now" in p else [Reset()],
        warm_every_tokens=4,
    )
    asking = asyncio.create_task(ask(served))
    for gate in waits:
        await within(WAIT_S, gate.reached.wait())
        await small.decode(0)
        gate.opened.set()
    usage = (await within(WAIT_S, asking))["usage"]["relaygen"]
    assert (usage["extra"]["warm_ups"], usage["extra"]["warm_ups_cut"]) == (1, 1)
    assert usage["resumes"] == 0


async def test_after_a_failure_none_is_sent() -> None:
    async def broken(request: DecodeRequest) -> AsyncGenerator[Event]:
        raise UpstreamError("gone")
        yield DecodeFailed("")

    session, extra = thinking_session(make_policy("Now")), Extra()
    session.next_decode()
    reading = Warming(1, session, broken, Pace(), extra)
    for _ in range(3):
        reading.received(1)
        await asyncio.sleep(0)
        await reading.opening(DecodeRequest(Role.LARGE, 0, ()), begun=False)
    assert (extra.warm_ups, extra.warm_ups_cut) == (1, 1)


def reads_slowly(gate: Gate) -> Script:
    """Writes the text; the first decode waits for the gate."""
    gates, goes_on = [gate], story(*TEXT)
    return lambda prompt: [*([gates.pop()] if gates else []), *goes_on(prompt)]


# ---- when it pays -------------------------------------------------------------------------------


@given(
    st.floats(0, 0.1),
    st.floats(1e-5, 1e-2),
    st.lists(st.integers(1, 500), min_size=20, max_size=60).filter(lambda s: pstdev(s) > 8),
)
def test_the_time_to_read_is_found(fixed_s: float, token_s: float, unread: list[int]) -> None:
    prefill = Prefill()
    for count in unread:
        prefill.add(count, fixed_s + token_s * count)
    assert prefill.line == pytest.approx((fixed_s, token_s), rel=0.01, abs=1e-6)


def test_nothing_follows_from_little_or_from_what_is_all_alike() -> None:
    alike = Prefill()
    for count in range(100):
        alike.add(30 + count % 2, 0.01 + 0.001 * (count % 3))
    assert alike.line is None
    few = Prefill()
    few.add(1, 0.1)
    few.add(200, 0.2)
    assert few.line is None


@pytest.mark.parametrize(("read_s", "pays"), [(0.001, True), (0.0001, False), (0.05, False)])
def test_it_pays_where_reading_takes_longer_than_the_request_and_keeps_up(
    read_s: float, pays: bool
) -> None:
    pace = Pace()
    assert pace.warming_pays(Role.SMALL, 16)
    pace.add(Role.LARGE, 100, 2.5)
    for count in range(1, 40):
        pace.prefilled(Role.SMALL, count, 0.01 + read_s * count)
    assert pace.warming_pays(Role.SMALL, 16) == pays
    assert pace.warming_pays(Role.LARGE, 16)


async def test_none_is_sent_where_it_does_not_pay(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "warming_pays", lambda *_: False)
    told: list[tuple[Role, int]] = []
    monkeypatch.setattr(
        Pace, "prefilled", lambda _, role, unread, seconds: told.append((role, unread))
    )
    served, _, small = await scripted_pair(stage, story(*TEXT), story(*TEXT), warm_every_tokens=1)
    await ask(served)
    assert not warm_ups(small)
    assert (Role.SMALL, 14) in told
    assert (Role.LARGE, 13) in told
