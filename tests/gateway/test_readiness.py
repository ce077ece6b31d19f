"""What the gateway says of itself: models, health, readiness while engines come and go."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from gateway import backends
from tests.gateway.fakes import Connection, FakeLlamaCpp, FakeVllm, Gate, Request
from tests.gateway.support import (
    POLICY,
    WAIT_S,
    Stage,
    ask,
    backends_of,
    get,
    policy_of,
    until_ready,
    within,
)


async def test_policies_and_engines_models_are_listed(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(model="org/big"), FakeLlamaCpp(model="tiny"))
    await until_ready(served, 200)
    models = [model async for model in served.client.models.list()]
    assert [model.id for model in models] == [POLICY, "org/big", "tiny"]
    assert models[0].owned_by == "relaygen"


async def test_a_model_with_slashes_in_its_name_is_found(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(model="org/big"), FakeVllm(model="tiny"))
    await until_ready(served, 200)
    assert (await served.client.models.retrieve("org/big")).id == "org/big"
    assert (await get(served, "/v1/models/org/big"))[1]["id"] == "org/big"
    assert (await served.client.models.retrieve(POLICY)).owned_by == "relaygen"


async def test_a_model_that_nobody_serves_is_not_found(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"))
    with pytest.raises(openai.NotFoundError):
        await served.client.models.retrieve("org/other")


async def test_health_needs_no_engine(stage: Stage) -> None:
    served = await stage.gateway({"backends": {}})
    assert await get(served, "/healthz") == (200, {"status": "alive"})


async def test_not_ready_without_a_policy(stage: Stage) -> None:
    served = await stage.gateway({"backends": {}})
    assert (await get(served, "/readyz"))[0] == 503


async def test_not_ready_until_both_engines_are_up(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    await stage.engine(large)
    await stage.engine(small)
    await small.stop()
    policy = policy_of(large, small, on_failure={"small": "fail"})
    served = await stage.gateway({"backends": backends_of(large, small)}, policy)
    status, body = await get(served, "/readyz")
    assert status == 503
    assert not body["ready"]
    assert small.url.removesuffix("/v1") in body["policies"][POLICY]["error"]
    await small.start()
    body = await until_ready(served, 200)
    assert body["backends"]["small"][0]["engine"] == "vllm"
    assert body["backends"]["small"][0]["state"] == "up"


async def test_ready_while_the_large_model_can_write_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_CHECK_S", 0.05)
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    served = await stage.pair(large, small)
    await small.stop()
    async with asyncio.timeout(WAIT_S):
        while "notes" not in (await get(served, "/readyz"))[1]["policies"][POLICY]:
            pass
    body = await until_ready(served, 200)
    (note,) = body["policies"][POLICY]["notes"]
    assert note.startswith("the large model writes alone: The engine at")


async def test_an_engine_that_goes_down_is_noticed_without_a_request(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_CHECK_S", 0.05)
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await until_ready(served, 200)
    await large.stop()
    body = await until_ready(served, 503)
    assert body["backends"]["large"][0]["up"] is False
    assert body["backends"]["small"][0]["up"] is True


async def test_a_refused_policy_is_told_with_its_reason(stage: Stage) -> None:
    stage.write("bad.yaml", "version: 2\n")
    served = await stage.gateway({"backends": {}})
    _, body = await get(served, "/readyz")
    [(file, problems)] = body["refused"].items()
    assert file.endswith("bad.yaml")
    assert "version" in problems[0]


async def test_a_policy_without_its_backend_is_told(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    await stage.engine(large)
    served = await stage.gateway(
        {"backends": {"large": {"urls": [large.url]}}}, policy_of(large, small)
    )
    with pytest.raises(openai.InternalServerError, match=r"small\.backend is 'small'"):
        await ask(served)


async def test_an_engine_of_an_unknown_kind_is_told(stage: Stage) -> None:
    large = FakeVllm(model="big")
    large.refusals["/v1/models"] = (200, b'{"data": [{"id": "m", "owned_by": "me"}]}')
    served = await stage.pair(large, FakeVllm(model="tiny"))
    with pytest.raises(openai.InternalServerError, match="set `engine` to one of: "):
        await ask(served)


ODD = [b"[]", b"5", b"null", b'{"data": null}', b'{"data": [5]}', b"not json", b"{}"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dialect", ["auto", "vllm", "llamacpp"])
async def test_an_engine_that_makes_no_sense_is_told_and_looked_at_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, dialect: str, odd: bytes
) -> None:
    monkeypatch.setattr(backends, "_RETRY_S", 0.05)
    fake = FakeLlamaCpp if dialect == "llamacpp" else FakeVllm
    large, small = fake(model="big"), fake(model="tiny")
    await stage.engine(large)
    await stage.engine(small)
    for path in ("/v1/models", "/version", "/props"):
        large.refusals[path] = (200, odd)
    given = {name: {**b, "engine": dialect} for name, b in backends_of(large, small).items()}
    served = await stage.gateway({"backends": given}, policy_of(large, small))
    status, body = await get(served, "/readyz")
    assert status == 503, json.dumps(body)
    large.refusals.clear()
    await until_ready(served, 200)


class MuteVllm(FakeVllm):
    """Accepts connections and never answers."""

    async def answer(self, request: Request, connection: Connection) -> None:
        await Gate().opened.wait()


async def test_an_engine_that_never_answers_is_given_up(stage: Stage) -> None:
    served = await stage.pair(
        MuteVllm(model="big"), FakeVllm(model="tiny"), {"timeouts": {"idle": 0.3}}
    )
    with pytest.raises(openai.InternalServerError) as caught:
        await within(WAIT_S, ask(served))
    assert caught.value.status_code == 504


async def test_the_least_loaded_replica_serves(stage: Stage) -> None:
    replicas = [FakeVllm(model="big"), FakeVllm(model="big")]
    small = FakeVllm(model="tiny")
    for engine in (*replicas, small):
        await stage.engine(engine)
    backends = {"large": {"urls": [r.url for r in replicas]}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": backends}, policy_of(replicas[0], small))
    await until_ready(served, 200)
    await asyncio.gather(*(ask(served) for _ in "12"))  # what templates need is known to both
    decoding, rendering = Gate(), Gate()
    replicas[0].gates["/tokenize"] = rendering
    replicas[1].script = lambda _: ["one", decoding]
    first = asyncio.create_task(ask(served))
    await within(WAIT_S, rendering.reached.wait())
    second = asyncio.create_task(ask(served))
    await within(WAIT_S, decoding.reached.wait())
    rendering.opened.set()
    decoding.opened.set()
    assert (await first)["choices"][0]["message"]["content"] == "ok"
    assert (await second)["choices"][0]["message"]["content"] == "one"


async def test_a_replica_that_is_down_is_passed_over(stage: Stage) -> None:
    dead, alive, small = (FakeVllm(model=m) for m in ("big", "big", "tiny"))
    for engine in (dead, alive, small):
        await stage.engine(engine)
    await dead.stop()
    settings = {
        "backends": {"large": {"urls": [dead.url, alive.url]}, "small": {"urls": [small.url]}}
    }
    served = await stage.gateway(settings, policy_of(alive, small))
    for _ in range(3):
        assert (await ask(served))["choices"][0]["message"]["content"] == "ok"
