"""A generation outlives its engines: the client reads one text, whatever broke in between."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.fakes import (
    Error,
    FakeEngine,
    FakeLlamaCpp,
    FakeSglang,
    FakeVllm,
    Fin,
    Gate,
    Raw,
    Reset,
    Script,
    ToolCall,
    story,
    writes,
)
from tests.gateway.support import (
    ANSWER,
    NO_RESUME,
    POLICY,
    REASONING,
    STORY,
    USER,
    WAIT_S,
    Served,
    Stage,
    ask,
    get,
    policy_of,
    stream,
    until_ready,
    within,
)
from tests.gateway.tooling import TOOLS

DIALECTS = [FakeVllm, FakeLlamaCpp, FakeSglang]
BREAKS = [Reset(), Fin(), Error("queue full"), Raw(b"data: {nonsense\n\n")]


def after(count: int, act: Any) -> Script:
    """The story, broken after so many tokens of each decode."""
    script = story(*STORY)

    def broken(prompt: str) -> list[Any]:
        rest = list(script(prompt))
        return rest if len(rest) <= count else [*rest[:count], act]

    return broken


async def replicas(
    stage: Stage, large: list[FakeEngine], small: list[FakeEngine], /, **policy: Any
) -> Served:
    """The first of each is asked first."""
    for engine in (*large, *small):
        await stage.engine(engine)
    backends = {
        "large": {"urls": [engine.url for engine in large]},
        "small": {"urls": [engine.url for engine in small]},
    }
    settings = {"backends": backends, "resume": policy.pop("resume", {})}
    served = await stage.gateway(settings, policy_of(large[0], small[0], **policy))
    async with asyncio.timeout(WAIT_S):
        while not all(
            replica["up"]
            for backend in (await get(served, "/readyz"))[1]["backends"].values()
            for replica in backend
        ):
            pass
    return served


def whole(reply: Any) -> tuple[str, str, list[str]]:
    return reply.text("reasoning_content"), reply.text("content"), reply.finishes


UNBROKEN = (REASONING, ANSWER, ["stop"])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("act", BREAKS, ids=["reset", "fin", "error", "garbage"])
@pytest.mark.parametrize("count", [1, 2, 4])
async def test_another_replica_goes_on_in_mid_segment(
    stage: Stage, dialect: type[FakeEngine], act: Any, count: int
) -> None:
    broken = dialect(after(count, act), model="big")
    sound = dialect(story(*STORY), model="big")
    small = dialect(story(*STORY), model="tiny")
    served = await replicas(stage, [broken, sound], [small])
    reply = await stream(served, stream_options={"include_usage": True})
    assert whole(reply) == UNBROKEN
    (usage,) = reply.usages
    assert usage["relaygen"]["resumes"] >= 1
    assert usage["completion_tokens"] == len(STORY) + 1
    assert len(broken.decodes) >= 1 and len(sound.decodes) >= 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_same_replica_goes_on_where_there_is_no_other(
    stage: Stage, dialect: type[FakeEngine]
) -> None:
    engines = [dialect(after(3, Reset()), model=model) for model in ("big", "tiny")]
    served = await replicas(stage, engines[:1], engines[1:])
    assert whole(await stream(served)) == UNBROKEN


async def test_a_reply_in_one_piece_goes_on_too(stage: Stage) -> None:
    broken, sound = FakeVllm(after(3, Reset()), model="big"), FakeVllm(story(*STORY), model="big")
    served = await replicas(stage, [broken, sound], [FakeVllm(story(*STORY), model="tiny")])
    message = (await ask(served))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (REASONING, ANSWER)


async def test_each_of_several_choices_goes_on(stage: Stage) -> None:
    broken, sound = FakeVllm(after(3, Reset()), model="big"), FakeVllm(story(*STORY), model="big")
    served = await replicas(stage, [broken, sound], [FakeVllm(story(*STORY), model="tiny")])
    reply = await ask(served, n=3)
    assert [c["message"]["content"] for c in reply["choices"]] == [ANSWER] * 3


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_status_at_a_handoff_is_gone_on_from(stage: Stage, status: int) -> None:
    refusing = FakeVllm(story(*STORY), model="tiny")
    sound = FakeVllm(story(*STORY), model="tiny")
    served = await replicas(stage, [FakeVllm(story(*STORY), model="big")], [refusing, sound])
    refusing.refusals["/v1/completions"] = (status, b'{"error": {"message": "not now"}}')
    assert whole(await stream(served)) == UNBROKEN
    assert len(sound.decodes) >= 1


async def test_an_engine_that_says_it_is_busy_is_told_to_the_client_as_such(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    served = await replicas(stage, [large], [small])
    large.refusals["/v1/completions"] = (429, b'{"error": {"message": "full", "code": "x"}}')
    with pytest.raises(openai.RateLimitError, match="full"):
        await ask(served)


async def test_the_small_model_failing_leaves_the_rest_to_the_large_one(stage: Stage) -> None:
    large = FakeVllm(story(*STORY), model="big")
    small = FakeVllm(writes(Reset()), model="tiny")
    served = await replicas(stage, [large], [small])
    reply = await stream(served, extra_body={"relaygen": {"trace": True}})
    assert whole(reply) == UNBROKEN
    assert {chunk["relaygen"]["role"] for chunk in reply.chunks} <= {"large", "small"}


async def test_a_small_model_that_is_down_is_not_handed_to(stage: Stage) -> None:
    large, small = FakeVllm(story(*STORY), model="big"), FakeVllm(story(*STORY), model="tiny")
    served = await replicas(stage, [large], [small])
    await small.stop()
    for _ in range(2):  # noticed by the first at the latest
        reply = await stream(served, stream_options={"include_usage": True})
        assert whole(reply) == UNBROKEN
    assert (
        reply.usages[0]["relaygen"] | {"handoffs": 0, "resumes": 0} == reply.usages[0]["relaygen"]
    )
    assert reply.usages[0]["relaygen"]["small_tokens"] == 0


async def test_a_policy_may_rather_fail_than_be_large_alone(stage: Stage) -> None:
    large, small = FakeVllm(story(*STORY), model="big"), FakeVllm(writes(Reset()), model="tiny")
    policy = {"on_failure": {"small": "fail"}, "resume": {"seconds": 0.2}}
    served = await replicas(stage, [large], [small], **policy)
    with pytest.raises(openai.APIError):
        await stream(served)


@pytest.mark.parametrize("act", [None, Reset()])
async def test_the_small_model_stands_in_where_the_policy_says_so(stage: Stage, act: Any) -> None:
    large = FakeVllm(after(2, act) if act else story(*STORY), model="big")
    small = FakeVllm(story(*STORY), model="tiny")
    served = await replicas(stage, [large], [small], on_failure={"large": "small"})
    if act is None:
        await large.stop()
    assert whole(await stream(served)) == UNBROKEN


async def test_without_another_the_large_model_failing_is_an_error_and_no_end(
    stage: Stage,
) -> None:
    large = FakeVllm(story(*STORY), model="big")
    served = await replicas(stage, [large], [FakeVllm(model="tiny")], resume={"seconds": 0.3})
    large.script = after(2, Reset())
    stall = Gate()
    large.script = lambda prompt: ["<think>", "Six", stall]
    chunks = await served.client.chat.completions.create(model=POLICY, messages=USER, stream=True)  # type: ignore[call-overload]
    finishes = []
    with pytest.raises(openai.APIError):
        async for chunk in chunks:
            finishes += [c.finish_reason for c in chunk.choices if c.finish_reason]
            if stall.reached.is_set():
                await large.stop()
    assert finishes == []


async def test_attempts_are_bounded(stage: Stage) -> None:
    large = FakeVllm(lambda prompt: ["x", Reset()], model="big")
    served = await replicas(stage, [large], [FakeVllm(model="tiny")], resume={"attempts": 3})
    with pytest.raises(openai.APIError):
        await stream(served)
    assert len(large.decodes) == 4


async def test_resuming_can_be_switched_off(stage: Stage) -> None:
    large = FakeVllm(after(2, Reset()), model="big")
    served = await stage.pair(large, FakeVllm(story(*STORY), model="tiny"), NO_RESUME)
    with pytest.raises(openai.APIError):
        await stream(served)


async def test_an_engine_that_breaks_after_its_finish_has_finished(stage: Stage) -> None:
    end = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
    large = FakeVllm(writes("Fine", ".", Raw(end), Reset()), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    reply = await stream(served)
    assert (reply.text("content"), reply.finishes) == ("Fine.", ["stop"])
    assert len(large.decodes) == 1


async def test_an_engine_that_is_silent_at_first_is_left_for_another(stage: Stage) -> None:
    silent, sound = FakeVllm(writes(Gate()), model="big"), FakeVllm(story(*STORY), model="big")
    for engine in (silent, sound, small := FakeVllm(story(*STORY), model="tiny")):
        await stage.engine(engine)
    backends = {"large": {"urls": [silent.url, sound.url]}, "small": {"urls": [small.url]}}
    settings = {"backends": backends, "timeouts": {"first_token": 0.3}}
    served = await stage.gateway(settings, policy_of(silent, small))
    await until_ready(served, 200)
    assert whole(await stream(served)) == UNBROKEN
    await within(WAIT_S, (await silent.decode()).left.wait())


async def test_a_reply_that_takes_too_long_ends_in_an_error(stage: Stage) -> None:
    large = FakeVllm(writes("<think>", "Six", Gate()), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"), {"timeouts": {"total": 0.5}})
    with pytest.raises(openai.APIError, match=r"timeouts\.total"):
        await stream(served)
    await within(WAIT_S, (await large.decode()).left.wait())


# ---- engines that are slow ----------------------------------------------------------------------


async def test_a_policys_limit_to_the_first_token_leaves_a_slow_engine(stage: Stage) -> None:
    slow, sound = FakeVllm(writes(Gate()), model="tiny"), FakeVllm(story(*STORY), model="tiny")
    large = FakeVllm(story(*STORY), model="big")
    served = await replicas(stage, [large], [slow, sound], slow={"small": {"first_token": 0.2}})
    assert whole(await stream(served)) == UNBROKEN
    assert len(slow.decodes) == 1


async def test_a_slow_engine_is_kept_where_there_is_no_other(stage: Stage) -> None:
    gate = Gate()
    large = FakeVllm(writes(gate, "Fine", "."), model="big")
    small = FakeVllm(story(*STORY), model="tiny")
    served = await replicas(stage, [large], [small], slow={"large": {"first_token": 0.05}})
    asked = asyncio.create_task(stream(served))
    await within(WAIT_S, gate.reached.wait())
    with pytest.raises(TimeoutError):  # longer than the limit
        await asyncio.wait_for(asyncio.shield(asked), 0.3)
    gate.opened.set()
    assert (await asked).text("content") == "Fine."


# ---- what follows a thought with tools ----------------------------------------------------------


async def test_tools_are_asked_of_another_engine_before_the_first_delta(stage: Stage) -> None:
    call = ToolCall("count", ("{", '"n": 1', "}"))
    thought = ("<think>", "Six", "</think>")
    broken, sound = (FakeVllm(story(*thought), model="big") for _ in "12")
    broken.chats = sound.chats = True
    script = story(*thought)
    sound.script = lambda prompt: [call] if "</think>" in prompt else script(prompt)
    broken.script = lambda prompt: [Reset()] if "</think>" in prompt else script(prompt)
    served = await replicas(stage, [broken, sound], [FakeVllm(model="tiny")])
    reply = await ask(served, tools=TOOLS)
    (made,) = reply["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "count", "arguments": '{"n": 1}'}
