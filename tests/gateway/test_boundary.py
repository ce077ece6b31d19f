"""What stays between the gateway and its engines: keys, admin paths, headers."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import openai
import pytest
from structlog.testing import capture_logs

from tests.gateway.fakes import FakeVllm, Raw, writes
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.support import POLICY, USER, Served, Stage, ask, get, policy_of, until_ready
from tests.gateway.test_passthrough import Echo, call, echoing

KEY = "sk-engines-own"


async def with_key(stage: Stage, large: FakeVllm, **policy: Any) -> Served:
    small = FakeVllm(model="tiny", tokenizer=large.tokenizer)
    await stage.engine(large)
    await stage.engine(small)
    backends = {"large": {"urls": [large.url], "api_key": KEY}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": backends}, policy_of(large, small, **policy))
    await until_ready(served, 200)
    return served


# ---- the engine's key ---------------------------------------------------------------------------

TELLS = json.dumps({"error": {"message": f"odd request with key {KEY}!"}}).encode()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
async def test_a_key_that_an_engine_tells_back_is_masked(
    stage: Stage, status: int, streaming: bool
) -> None:
    large = FakeVllm(model="big")
    served = await with_key(stage, large)
    large.refusals[COMPLETIONS] = (status, TELLS)
    with capture_logs() as logs, pytest.raises(openai.APIStatusError) as caught:
        await ask(served, stream=streaming)
    assert "odd request with key ***!" in caught.value.message
    assert KEY not in str(logs)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
async def test_a_key_told_inside_a_stream_is_masked(stage: Stage, tools: Any) -> None:
    event = b"data: " + TELLS + b"\n\n"
    large = FakeVllm(writes("<think>", "a", Raw(event)), model="big")
    large.chats = True
    served = await with_key(stage, large)
    fields = {"tools": tools} if tools else {}
    with capture_logs() as logs, pytest.raises(openai.APIError) as caught:
        async for _ in await served.client.chat.completions.create(
            model=POLICY, messages=USER, stream=True, **fields
        ):
            pass
    assert "odd request with key ***!" in caught.value.message
    assert KEY not in str(logs)


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_a_key_in_an_error_passed_through_is_masked(stage: Stage, status: int) -> None:
    large = FakeVllm(model="big")
    served = await with_key(stage, large)
    large.refusals[CHAT] = (status, TELLS)
    response, content = await call(served, "POST", CHAT, data=b'{"model": "big"}')
    assert (response.status, content) == (status, TELLS.replace(KEY.encode(), b"***"))


async def test_an_endless_error_is_cut_off(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await with_key(stage, large)
    large.refusals[CHAT] = (400, b"x" * 1_000_000)
    _, content = await call(served, "POST", CHAT, data=b'{"model": "big"}')
    assert content == b"x" * 65_536


@pytest.mark.parametrize("status", [401, 403])
async def test_what_an_engine_says_of_our_key_is_for_the_log_alone(
    stage: Stage, status: int
) -> None:
    large = FakeVllm(model="big")
    served = await with_key(stage, large)
    large.refusals[COMPLETIONS] = large.refusals[CHAT] = (status, TELLS)
    with capture_logs() as logs:
        for model in (POLICY, "big"):
            with pytest.raises(openai.APIStatusError) as caught:
                await ask(served, model=model)
            assert (caught.value.status_code, caught.value.code) == (502, "engine_refused_key")
            assert "odd request" not in str(caught.value.body)
    assert KEY not in str(logs)
    inside = [line["inside"] for line in logs if line.get("inside")]
    assert inside == ["odd request with key ***!"] * 2


async def test_readiness_tells_nothing_of_the_key(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    for path in ("/version", "/v1/models"):
        large.refusals[path] = (401, TELLS)
    await stage.engine(large)
    await stage.engine(small)
    backends = {"large": {"urls": [large.url], "api_key": KEY}, "small": {"urls": [small.url]}}
    served = await stage.gateway({"backends": backends}, policy_of(large, small))
    await until_ready(served, 503)
    _, body = await get(served, "/readyz")
    assert KEY not in json.dumps(body)
    assert "odd request" not in json.dumps(body)


# ---- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1//load_lora_adapter",
        "/v1/load%5Flora%5fadapter",
        "/v1/x/unload_lora_adapter",
        "/v1/x%2Funload_lora_adapter",
        "/v1/load_lora_adapter?model=big",
        "/v1/chat/completions/control",
        "/v1/flush_cache",
        "/load_lora_adapter",
        "/flush_cache",
        "/update_weights_from_disk",
        "/slots/0",
        "/props",
    ],
)
async def test_an_engines_admin_paths_are_not_there(stage: Stage, method: str, path: str) -> None:
    served, large = await echoing(stage)
    asked = len(large.requests)
    body = json.dumps({"model": "big", "lora_name": "x", "lora_path": "/etc"}).encode()
    response, content = await call(served, method, path, data=body)
    assert response.status == 404
    assert "error" in json.loads(content)
    assert not [r for r in large.requests[asked:] if "x-odd" in r.path or "lora" in r.path]
    assert not [r for r in large.requests[asked:] if r.path.split("?")[0] == path.split("?")[0]]


# ---- headers ------------------------------------------------------------------------------------


class Telling(Echo):
    headers: ClassVar[dict[str, str]] = {
        "Set-Cookie": "session=1",
        "WWW-Authenticate": "Bearer",
        "Authorization": f"Bearer {KEY}",
        "X-Api-Key": KEY,
        "Location": "http://10.0.0.7:8000/v1/odd/",
        "Alt-Svc": 'h2="10.0.0.7:443"',
        "Strict-Transport-Security": "max-age=1",
        "X-Ratelimit-Remaining": "5",
    }


async def test_an_engines_own_affairs_do_not_reach_the_client(stage: Stage) -> None:
    served = await with_key(stage, Telling(model="big"))
    response, _ = await call(served, "POST", "/v1/odd", data=b'{"model": "big"}')
    assert response.status == 207
    back = {name.lower() for name in response.headers}
    assert "x-ratelimit-remaining" in back
    assert not {name.lower() for name in Telling.headers} - {"x-ratelimit-remaining"} & back
    assert KEY not in str(response.headers)
