"""Requests that one engine serves whole."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from tests.gateway.fakes import FakeVllm, Raw, Reset, writes
from tests.gateway.fakes.engines import CHAT
from tests.gateway.support import POLICY, USER, Served, Stage

BODY = b'{ "messages":[{"role":"user", "content":"\\u0041"}],"model" : "big", "relaygen": 1e2}'


async def post(served: Served, path: str, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + path, data=body) as response,
    ):
        return response, await response.read()


async def test_a_backends_own_model_is_passed_through_byte_for_byte(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await large.request("/v1/models")
    await ready(served)
    response, content = await post(served, CHAT, BODY)
    [request] = large.asked(CHAT)
    assert request.content == BODY
    assert content == large.whole_reply
    assert response.headers["x-relaygen-mode"] == "passthrough"
    assert response.headers["x-engine"] == "fake"


async def ready(served: Served) -> None:
    await served.client.with_options(base_url=served.url).get("/readyz", cast_to=object)


async def test_the_engine_gets_its_own_key_and_nothing_of_the_clients(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    await stage.engine(large)
    await stage.engine(small)
    backends = {
        "large": {"urls": [large.url], "api_key": "engine-key"},
        "small": {"urls": [small.url]},
    }
    from tests.gateway.support import policy_of

    served = await stage.gateway({"backends": backends}, policy_of(large, small))
    await ready(served)
    await served.client.chat.completions.create(
        model="big",
        messages=USER,
        extra_headers={"X-Conversation-Id": "1"},  # llama.cpp would outlive the client for it
    )
    [request] = large.asked(CHAT)
    assert request.headers["authorization"] == "Bearer engine-key"
    assert "x-conversation-id" not in request.headers


async def test_a_stream_is_passed_through_as_it_comes(stage: Stage) -> None:
    wire = b': odd\r\ndata: {"a" :1}\r\n\r\ndata: [DONE]\r\n\r\n'
    large = FakeVllm(writes(Raw(wire)), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await ready(served)
    body = b'{"model": "big", "prompt": [1], "stream": true}'
    large.tokenizer.id_of("x")
    response, content = await post(served, "/v1/completions", body.replace(b"[1]", b'"x"'))
    assert content.startswith(wire)
    assert response.headers["x-relaygen-mode"] == "passthrough"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools: the policy says so (tools: whole)",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "response_format: the policy says so (tools: whole)",
        ),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"extra_body": {"stop_token_ids": [2]}}, "stop_token_ids"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                    }
                ]
            },
            "a content part of type image_url",
        ),
    ],
)
async def test_what_relaying_cannot_serve_goes_whole_to_the_large_model(
    stage: Stage, fields: dict[str, Any], reason: str
) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    sampling = {"temperature": 0.6, "top_k": 7}
    served = await stage.pair(large, small, sampling=sampling, tools="whole")
    with capture_logs() as logs:
        given = {"model": POLICY, "messages": USER, "temperature": 0.1, **fields}
        reply = await served.client.chat.completions.with_raw_response.create(**given)
    assert reply.headers["x-relaygen-mode"] == "passthrough"
    assert reply.http_response.content == large.whole_reply
    [request] = large.asked(CHAT)
    extra = fields.pop("extra_body", {})
    expected = {"messages": USER, "temperature": 0.1, "top_k": 7, **fields, **extra}
    assert request.body == {"model": "big", **expected}
    assert small.asked(CHAT) == small.decodes == []
    assert [e["reason"] for e in logs if e["event"] == "passed through"] == [reason]


async def test_our_own_field_does_not_reach_the_engine(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await served.client.chat.completions.create(
        model=POLICY,
        messages=USER,
        extra_body={"relaygen": {"trace": True}, "stop_token_ids": [2]},
    )
    assert "relaygen" not in large.asked(CHAT)[0].body


@pytest.mark.parametrize("fields", [{"tools": []}, {"response_format": {"type": "text"}}, {"n": 1}])
async def test_fields_that_ask_for_nothing_do_not_stop_relaying(
    stage: Stage, fields: dict[str, Any]
) -> None:
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"))
    create = served.client.chat.completions.with_raw_response.create
    reply = await create(model=POLICY, messages=USER, **fields)
    assert reply.headers["x-relaygen-mode"] == "relay"


async def test_an_engines_refusal_is_passed_through(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await ready(served)
    large.refusals[CHAT] = (422, b'{"odd": "error"}')
    response, content = await post(served, CHAT, BODY)
    assert (response.status, content) == (422, b'{"odd": "error"}')


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_refuses_our_key_is_not_the_clients_fault(
    stage: Stage, status: int
) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await ready(served)
    large.refusals[CHAT] = (status, b'{"error": {"message": "bad key"}}')
    response, content = await post(served, CHAT, BODY)
    assert response.status == 502
    assert "bad key" in json.loads(content)["error"]["message"]


async def test_a_cut_stream_ends_in_an_error_and_never_like_an_end(stage: Stage) -> None:
    event = b'data: {"choices": []}\n\n'
    large = FakeVllm(writes(Raw(event), Reset()), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await ready(served)
    seen = b""
    body = b'{"model": "big", "prompt": "x", "stream": true}'
    with pytest.raises(aiohttp.ClientPayloadError):
        async with (
            aiohttp.ClientSession() as session,
            session.post(served.url + "/v1/completions", data=body) as response,
        ):
            async for chunk in response.content.iter_any():
                seen += chunk
    assert seen.startswith(event)
    assert b'"error"' in seen
    assert b"[DONE]" not in seen


async def test_a_dead_engine_is_a_502(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await ready(served)
    await large.stop()
    response, content = await post(served, CHAT, BODY)
    assert response.status == 502
    assert json.loads(content)["error"]["code"] == "engine_unreachable"
