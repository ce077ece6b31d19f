"""Several servers of one model: another one takes over where one fails before the first byte."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.gateway.fakes import Error, FakeVllm, Fin, Reset, writes
from tests.gateway.support import (
    WAIT_S,
    Stage,
    ask,
    get,
    stream,
    two_large,
    until_ready,
    within,
)
from tests.gateway.test_readiness import MuteVllm


@pytest.mark.parametrize("failure", [Reset(), Fin(), Error("queue full")])
async def test_another_replica_takes_over_before_the_first_byte(
    stage: Stage, failure: object
) -> None:
    broken, sound = FakeVllm(writes(failure), model="big"), FakeVllm(writes("Fine"), model="big")
    served = await two_large(stage, broken, sound)
    reply = await stream(served)
    assert (reply.text("content"), reply.finishes) == ("Fine", ["stop"])
    assert (len(broken.decodes), len(sound.decodes)) == (1, 1)


async def test_a_replica_that_refuses_with_a_server_error_is_passed_over(stage: Stage) -> None:
    broken, sound = FakeVllm(model="big"), FakeVllm(writes("Fine"), model="big")
    served = await two_large(stage, broken, sound)
    broken.refusals["/v1/completions"] = (503, b'{"error": {"message": "loading"}}')
    assert (await ask(served))["choices"][0]["message"]["content"] == "Fine"


async def test_each_replica_is_tried_and_the_last_error_is_told(stage: Stage) -> None:
    engines = [FakeVllm(writes(Reset()), model="big") for _ in "12"]
    served = await two_large(stage, *engines)
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served)
    assert caught.value.status_code == 502
    assert all(engine.decodes for engine in engines)


async def test_a_clients_mistake_is_not_tried_elsewhere(stage: Stage) -> None:
    first, second = FakeVllm(model="big"), FakeVllm(model="big")
    served = await two_large(stage, first, second)
    first.refusals["/v1/completions"] = (400, b'{"error": {"message": "too long"}}')
    with pytest.raises(openai.BadRequestError, match="too long"):
        await ask(served)
    assert not second.decodes


async def test_a_client_may_want_no_other_replica(stage: Stage) -> None:
    broken, sound = FakeVllm(writes("one", Reset()), model="big"), FakeVllm(model="big")
    served = await two_large(stage, broken, sound)
    with pytest.raises(openai.APIError):
        await stream(served, extra_body={"relaygen": {"resume": False}})
    assert not sound.decodes


async def test_an_engine_that_never_answers_the_probe_is_told_soon(stage: Stage) -> None:
    served = await stage.pair(
        MuteVllm(model="big"), FakeVllm(model="tiny"), {"timeouts": {"probe": 0.2}}
    )
    status, body = await within(WAIT_S, get(served, "/readyz"))
    assert status == 503
    assert "timeouts.probe" in body["policies"]["pair"]["error"]


async def test_requests_wait_for_one_probe_together(stage: Stage) -> None:
    mute = MuteVllm(model="big")
    served = await stage.pair(mute, FakeVllm(model="tiny"), {"timeouts": {"probe": 0.5}})
    began = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*(ask(served) for _ in range(8)), return_exceptions=True)
    assert all(isinstance(answer, openai.InternalServerError) for answer in answers)
    assert asyncio.get_running_loop().time() - began < 8 * 0.5 / 2


async def test_a_request_passed_through_goes_to_the_other_replica(stage: Stage) -> None:
    first, second = FakeVllm(model="big"), FakeVllm(model="big")
    served = await two_large(stage, first, second)
    await first.stop()
    for model in ("pair", "big"):
        reply = await served.client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"stop_token_ids": [2]},
        )
        assert reply.headers["x-relaygen-mode"] == "passthrough"


async def test_a_model_whose_engine_is_down_is_not_unknown(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await until_ready(served, 200)
    await large.stop()
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(served, model="big")
        assert caught.value.status_code == 502
