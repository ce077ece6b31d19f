"""Clients that leave, bodies that are large, engines that break when some text is out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway import server
from gateway.context import GATEWAY
from tests.cases import case
from tests.cases.support import BY_CHAT, pair_of, post, served_by
from tests.gateway.fakes import (
    FakeEngine,
    FakeSglang,
    FakeTgi,
    FakeVllm,
    Gate,
    Reset,
    Script,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.support import (
    ANSWER,
    GONE_S,
    REASONING,
    WAIT_S,
    Served,
    Stage,
    ask,
    backends_of,
    leaving,
    policy_of,
    settings_of,
    until_ready,
    within,
)

STREAMING = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
LEAVING = (
    "BerriAI/litellm#13774", "BerriAI/litellm#14304", "BerriAI/litellm#30245",
    "BerriAI/litellm#31499", "BerriAI/litellm#37140", "vllm-project/production-stack#634",
    "vllm-project/production-stack#1040", "maximhq/bifrost#7035", "open-webui/open-webui#16251",
)  # fmt: skip


async def idle(served: Served) -> None:
    """No generation runs any more."""
    assert await served.app[GATEWAY].admission.drain(WAIT_S) == 0


# ---- the client leaves --------------------------------------------------------------------------

BEFORE: Callable[[Gate], Script] = lambda gate: writes(gate)  # noqa: E731
AMID: Callable[[Gate], Script] = lambda gate: writes("<think>", "Six", gate, " more")  # noqa: E731


@case(32, *LEAVING)
@STREAMING
@pytest.mark.parametrize("window", [BEFORE, AMID], ids=["before the first token", "mid-stream"])
@pytest.mark.parametrize("dialect", [FakeVllm, FakeTgi])
async def test_leaving_closes_what_is_open_upstream(
    stage: Stage, dialect: type[FakeEngine], window: Callable[[Gate], Script], streaming: bool
) -> None:
    """Catches a watch for leaving that looks only between chunks, or only in streams."""
    gate = Gate()
    large = dialect(window(gate), model="big")
    served = await stage.pair(large, dialect(model="tiny"))
    async with leaving(served.url, stream=streaming):
        await within(WAIT_S, gate.reached.wait())
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)


@case(32, *LEAVING)
@STREAMING
@pytest.mark.parametrize("backend", [{}, BY_CHAT], ids=["completions", "chat"])
async def test_leaving_between_two_segments_starts_no_other(
    stage: Stage, streaming: bool, backend: dict[str, Any]
) -> None:
    """Catches a handoff that goes through although nobody listens any more."""
    large, small = pair_of(FakeVllm)
    large.script = writes("<think>", "Hm", ".", " Now", Gate())
    served = await served_by(stage, large, small, backend)
    await until_ready(served, 200)
    gate = small.gates[CHAT if backend else COMPLETIONS] = Gate()
    async with leaving(served.url, stream=streaming):
        await within(WAIT_S, gate.reached.wait())
        await within(GONE_S, large.decodes[0].left.wait())
    await within(GONE_S, small.decodes[0].left.wait())
    await idle(served)
    assert (len(large.decodes), len(small.decodes)) == (1, 1)


@case(32, *LEAVING)
async def test_an_engine_that_outlives_its_client_is_told_to_stop(stage: Stage) -> None:
    """Catches a closed socket taken for an aborted generation where the engine goes on."""
    gate = Gate()
    large = FakeSglang(writes("<think>", "Six", gate), model="big")
    served = await stage.pair(large, FakeSglang(model="tiny"))
    async with leaving(served.url, stream=True):
        await within(WAIT_S, gate.reached.wait())
    assert await large.freeing(large.decodes[0].body["rid"], GONE_S) == "abort"


@case(32, *LEAVING)
@STREAMING
async def test_leaving_a_request_passed_through_closes_it_upstream(
    stage: Stage, streaming: bool
) -> None:
    """Catches a way through the gateway that watches nothing."""
    gate = Gate()
    large = FakeVllm(writes("Six", gate), model="big")
    large.chats = True
    served = await stage.pair(large, FakeVllm(model="tiny"))
    async with leaving(served.url, stream=streaming, stop_token_ids=[7]):
        await within(WAIT_S, gate.reached.wait())
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)


class _Heard:
    """Takes the place of the server's log."""

    def __init__(self) -> None:
        self.listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def info(self, event: str, *, url: str = "", **_: Any) -> None:
        if event == "listening":
            self.listening.set_result(url.removesuffix("/v1"))


@asynccontextmanager
async def running(settings: Any, patch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The gateway as `relaygen serve` runs it."""
    heard = _Heard()
    patch.setattr(server, "log", heard)
    serving = asyncio.create_task(server.serve(settings))
    try:
        yield await within(WAIT_S, heard.listening)
    finally:
        serving.cancel()
        await asyncio.wait([serving])


@case(
    33, "aio-libs/aiohttp#6719", "aio-libs/aiohttp#6727", "aio-libs/aiohttp#7135",
    "aio-libs/aiohttp#7128",
)  # fmt: skip
@STREAMING
async def test_the_server_as_it_is_run_cancels_a_handler_whose_client_left(
    stage: Stage, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches aiohttp's default since 3.9, by which a handler outlives its client."""
    gate = Gate()
    large = await stage.engine(FakeVllm(writes(gate), model="big"))
    small = await stage.engine(FakeVllm(model="tiny"))
    policy = stage.write("policy.yaml", policy_of(large, small))
    settings = settings_of(backends=backends_of(large, small), policy_files=[policy])
    async with running(settings, monkeypatch) as url:
        async with leaving(url, stream=streaming):
            await within(WAIT_S, gate.reached.wait())
        await within(GONE_S, large.decodes[0].left.wait())


# ---- large bodies -------------------------------------------------------------------------------

MIB = 1024 * 1024
TOO_LARGE = ("aio-libs/aiohttp#4474", "liaohch3/claude-tap#2")


def long(mib: float) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * int(mib * MIB)}]


@case(35, *TOO_LARGE)
async def test_a_prompt_of_more_than_a_mebibyte_is_served(stage: Stage) -> None:
    """Catches aiohttp's default `client_max_size`."""
    large, small = FakeVllm(writes("fine"), model="big"), FakeVllm(model="tiny")
    answer = await post(await stage.pair(large, small), messages=long(1.1))
    assert answer.status == 200
    assert len(large.prompts()[0]) > 1.1 * MIB


@case(35, *TOO_LARGE)
async def test_a_body_over_the_limit_is_told_in_openais_shape(stage: Stage) -> None:
    """Catches aiohttp's own 413: a text that no SDK reads, and a limit nobody can set."""
    served = await stage.pair(*pair_of(FakeVllm), {"limits": {"body_mib": 0.5}})
    answer = await post(served, messages=long(0.6))
    assert answer.status == 413
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["type"] == "invalid_request_error"
    assert "limits.body_mib" in answer.error["message"]


# ---- an engine breaks when some text is out -----------------------------------------------------

FALLBACK = ("BerriAI/litellm#19077", "BerriAI/litellm#32835")


async def replicas(stage: Stage, *scripts: Script) -> tuple[list[FakeVllm], Served]:
    """Large engines that are replicas of each other, the first to be asked first."""
    vocabulary = Tokenizer()
    large = [FakeVllm(script, model="big", tokenizer=vocabulary) for script in scripts]
    for engine in large:
        await stage.engine(engine)
    small = await stage.engine(FakeVllm(model="tiny", tokenizer=vocabulary))
    backends = {**backends_of(large[0], small), "large": {"urls": [e.url for e in large]}}
    return large, await stage.gateway({"backends": backends}, policy_of(large[0], small))


TEXT = ("One", " two", " three", " four", ".")


def cut_short(prompt: str) -> list[Any]:
    """The text's first three tokens and no more, whatever there is of it already."""
    return [*story(*TEXT[:3])(prompt), Reset()]


@case(36, *FALLBACK)
@pytest.mark.parametrize("others", [0, 1], ids=["nowhere to fall back to", "a replica"])
async def test_text_that_is_out_is_never_written_again(stage: Stage, others: int) -> None:
    """Catches a second try from the beginning, glued to what the client has."""
    large, served = await replicas(stage, cut_short, *[story(*TEXT)] * others)
    answer = await post(served, stream=True)
    whole = "".join(TEXT)
    assert answer.text("content") == (whole if others else "One two three")
    assert answer.looks_complete == bool(others)
    assert others or "error" in answer.events[-1]
    (_, *later) = [prompt for engine in large for prompt in engine.prompts()]
    assert later
    assert all(prompt.endswith("One two three") for prompt in later)


@case(36, *FALLBACK)
@pytest.mark.parametrize("others", [0, 1], ids=["nowhere to fall back to", "a replica"])
async def test_a_client_may_want_no_second_try(stage: Stage, others: int) -> None:
    """Catches `relaygen.resume` read and not heeded."""
    large, served = await replicas(stage, cut_short, *[story(*TEXT)] * others)
    answer = await post(served, stream=True, relaygen={"resume": False})
    assert answer.text("content") == "One two three"
    assert "error" in answer.events[-1]
    assert not answer.looks_complete
    assert [len(engine.decodes) for engine in large] == [1, 0][: 1 + others]


@case(36, *FALLBACK)
async def test_a_second_try_of_a_reply_in_one_piece_has_the_text_once(stage: Stage) -> None:
    """Catches a collected beginning that a next try from the start is added to."""
    large, served = await replicas(stage, cut_short, story(*TEXT))
    answer = await post(served)
    assert answer.status == 200
    assert b'"content":"One two three four."' in answer.wire
    assert [len(engine.decodes) for engine in large] == [1, 1]


@case(36, *FALLBACK)
@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
async def test_a_streams_deltas_are_the_text_of_the_reply_in_one_piece(
    stage: Stage, tokens_per_chunk: int
) -> None:
    """Catches a stream and a reply in one piece that are put together by different code."""
    large, small = pair_of(FakeVllm)
    large.tokens_per_chunk = small.tokens_per_chunk = tokens_per_chunk
    served = await stage.pair(large, small)
    streamed = await post(served, stream=True)
    assert (streamed.text("reasoning_content"), streamed.text("content")) == (REASONING, ANSWER)
    message = (await ask(served))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (REASONING, ANSWER)
