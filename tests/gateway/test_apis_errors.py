"""Errors in the shape of the API that was asked, before the first byte and after it; leaving."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.fakes import (
    Error,
    FakeVllm,
    Gate,
    Reset,
    writes,
)
from tests.gateway.fakes.engines import COMPLETIONS
from tests.gateway.fakes.script import Act
from tests.gateway.support import (
    GONE_S,
    POLICY,
    WAIT_S,
    Stage,
    within,
)
from tests.gateway.test_apis import (
    ASKED,
    MESSAGES,
    PATHS,
    RESPONSES,
    TOOLS,
    relaying,
    runs,
    send,
    streamed,
    writing,
)
from tests.gateway.test_cancellation import client, idle

# ---- what goes wrong ----------------------------------------------------------------------------


def message_of(path: str, content: bytes) -> tuple[str, str]:
    """Kind and message of an error, in the shape of the API that was asked."""
    body = json.loads(content)
    if path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (MESSAGES, "not_found_error"),
        (MESSAGES + "/count_tokens", "not_found_error"),
        (RESPONSES, "invalid_request_error"),
    ],
)
async def test_an_unknown_model_is_a_404(stage: Stage, path: str, kind: str) -> None:
    served, _ = await relaying(stage)
    status, content = await send(served, path, model="gpt-9")
    assert status == 404
    found, message = message_of(path, content)
    assert (found, "gpt-9" in message) == (kind, True)


@PATHS
async def test_a_wrong_field_is_a_400(stage: Stage, path: str) -> None:
    served, _ = await relaying(stage)
    wrong = {"max_tokens": 0} if path == MESSAGES else {"max_output_tokens": 0}
    status, content = await send(served, path, **wrong)
    assert status == 400
    kind, message = message_of(path, content)
    assert (kind, next(iter(wrong)) in message) == ("invalid_request_error", True)


@PATHS
async def test_no_key_is_a_401_and_anthropics_header_opens_too(stage: Stage, path: str) -> None:
    large = FakeVllm(writes("ok"), model="big")
    small = FakeVllm(model="tiny")
    served = await stage.pair(large, small, {"api_keys": ["first-key"]})
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "first-key2"}):
        status, content = await send(served, path, headers)
        assert status == 401
        kind, _ = message_of(path, content)
        assert kind == ("authentication_error" if path == MESSAGES else "invalid_request_error")
    assert (await send(served, path, {"x-api-key": "first-key"}))[0] == 200
    assert (await send(served, path, {"Authorization": "Bearer first-key"}))[0] == 200
    assert not any({"x-api-key", "authorization"} & r.headers.keys() for r in large.requests)


@PATHS
async def test_a_body_too_large_is_a_413(stage: Stage, path: str) -> None:
    settings = {"limits": {"body_mib": 0.01}}
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"), settings)
    status, content = await send(served, path, padding="x" * 20_000)
    assert status == 413
    kind, message = message_of(path, content)
    assert kind == ("request_too_large" if path == MESSAGES else "invalid_request_error")
    assert "0.01 MiB" in message


@PATHS
async def test_one_generation_too_many_is_a_429(stage: Stage, path: str) -> None:
    gate = Gate()
    large, small = FakeVllm(writes("one", gate), model="big"), FakeVllm(model="tiny")
    served = await stage.pair(large, small, {"limits": {"generations": 1}})
    body = {"model": POLICY, **ASKED[path], "stream": True}
    async with client(served, path, **body):
        await within(WAIT_S, gate.reached.wait())
        status, content = await send(served, path)
        assert status == 429
        assert message_of(path, content)[0] == "rate_limit_error"


@PATHS
async def test_an_engines_refusal_keeps_status_and_message(stage: Stage, path: str) -> None:
    served, large = await writing(stage, writes("ok"))
    large.refusals[COMPLETIONS] = (422, b'{"error": {"message": "told so"}}')
    for streaming in (True, False):
        status, content = await send(served, path, stream=streaming)
        assert (status, message_of(path, content)[1]) == (422, "told so")


@PATHS
async def test_a_wrong_method_is_told_in_the_apis_own_shape(stage: Stage, path: str) -> None:
    served, _ = await relaying(stage)
    async with aiohttp.ClientSession() as session, session.get(served.url + path) as response:
        assert response.status == 405
        message_of(path, await response.read())


@PATHS
@pytest.mark.parametrize("failure", [Error("cache full"), Reset()], ids=["error", "reset"])
@pytest.mark.parametrize("how", ["relayed", "whole"])
async def test_a_stream_that_breaks_ends_in_an_error_of_its_own_kind(
    stage: Stage, path: str, failure: Act, how: str
) -> None:
    served, large = await relaying(stage, "It", failure, tools="whole")
    body: dict[str, Any] = {"relaygen": {"resume": False}}
    if how == "whole":
        large.script = writes("It", failure)
        body = {"tools": TOOLS[path]}
    events = await streamed(served, path, **body)
    if path == MESSAGES:
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["message"]
        assert "message_stop" not in runs(events)
        assert "message_delta" not in runs(events)
    else:
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["message"]
        assert "response.completed" not in runs(events)


async def test_openais_sdk_is_told_of_a_broken_response(stage: Stage) -> None:
    served, _ = await writing(stage, writes("one", Reset()))
    with pytest.raises(openai.InternalServerError):
        await served.client.responses.create(model=POLICY, input="How many?")


@PATHS
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("how", ["relayed", "whole"])
async def test_leaving_reaches_the_engine(
    stage: Stage, path: str, streaming: bool, how: str
) -> None:
    gate = Gate()
    served, large = await relaying(stage, tools="whole")
    large.script = writes("one", gate)
    body = {"tools": TOOLS[path]} if how == "whole" else {}
    async with client(served, path, stream=streaming, **ASKED[path], **body):
        await within(WAIT_S, gate.reached.wait())
    await within(GONE_S, large.decodes[0].left.wait())
    await idle(served)
