"""Requests that one engine serves whole."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import aiohttp
import pytest
from structlog.testing import capture_logs
from yarl import URL

from tests.gateway.fakes import Connection, FakeVllm, Gate, Raw, Request, Reset, writes
from tests.gateway.fakes.engines import CHAT
from tests.gateway.support import POLICY, USER, Served, Stage, policy_of

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
    assert "refused the gateway's key" in json.loads(content)["error"]["message"]
    assert b"bad key" not in content


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


# ---- whatever else engines serve ----------------------------------------------------------------


class Echo(FakeVllm):
    """Answers other paths with what it likes, and remembers what it was sent."""

    paths: ClassVar[tuple[str, ...]] = ("/v1/", "/tokenize", "/detokenize")
    headers: ClassVar[dict[str, str]] = {
        "x-engine": "odd",
        "proxy-connection": "keep-alive",
        "keep-alive": "timeout=5",
        "access-control-allow-origin": "*",
        "x-request-id": "theirs",
    }

    async def answer(self, request: Request, connection: Connection) -> None:
        known = ("/v1/models", "/version")
        body = request.content
        probe = b"add_special_tokens" in body or b"messages" in body or b'"tokens"' in body
        if request.path in known or probe or not request.path.startswith(self.paths):
            await super().answer(request, connection)
            return
        connection.whole(b"\x00odd \xff", 207, **{"content-type": "audio/x-odd", **self.headers})


async def echoing(stage: Stage, **policy: Any) -> tuple[Served, Echo]:
    large = Echo(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"), **policy)
    await ready(served)
    return served, large


async def call(
    served: Served, method: str, path: str, **given: Any
) -> tuple[aiohttp.ClientResponse, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(served.url + path, encoded=True), **given) as response,
    ):
        return response, await response.read()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/a%2Fb/c%20d?x=1%262&y=a+b&z=%2B",
        "/v1/lora/x/y/",
        "/v1/rerank?",
    ],
)
async def test_any_path_and_method_pass_untouched(stage: Stage, method: str, path: str) -> None:
    served, large = await echoing(stage)
    body = b'{ "model":"big" , "input": 1e2}'
    response, content = await call(served, method, path, data=body)
    assert (response.status, content) == (207, b"\x00odd \xff")
    assert response.headers["content-type"] == "audio/x-odd"
    assert response.headers["x-engine"] == "odd"
    assert response.headers["x-relaygen-mode"] == "passthrough"
    request = large.requests[-1]
    assert (request.method, request.path, request.content) == (method, path.rstrip("?"), body)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_the_tokenizers_paths_pass_too(stage: Stage, path: str) -> None:
    served, large = await echoing(stage)
    response, content = await post(served, path, b'{"model":"big",  "prompt": "x"}')
    assert (response.status, content) == (207, b"\x00odd \xff")
    assert large.requests[-1].content == b'{"model":"big",  "prompt": "x"}'


def form(model: str) -> tuple[bytes, str]:
    parts = [
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\n\x00\xff--\r\n\r\n",
        b'--xyz\r\nContent-Disposition: form-data; name="model"\r\n\r\n',
        model.encode() + b"\r\n--xyz--\r\n",
    ]
    return b"".join(parts), "multipart/form-data; boundary=xyz"


async def test_a_form_with_files_passes_byte_for_byte(stage: Stage) -> None:
    served, large = await echoing(stage)
    body, kind = form("big")
    headers = {"Content-Type": kind}
    path = "/v1/audio/transcriptions"
    response, _ = await call(served, "POST", path, data=body, headers=headers)
    assert response.status == 207
    assert large.requests[-1].content == body
    assert large.requests[-1].headers["content-type"] == kind


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
async def test_a_policys_name_goes_to_its_large_model(stage: Stage, path: str) -> None:
    served, large = await echoing(stage)
    body = json.dumps({"model": POLICY, "input": "x", "relaygen": {}}).encode()
    response, _ = await post(served, path, body)
    assert response.status == 207
    assert large.requests[-1].body == {"model": "big", "input": "x"}


async def test_a_policys_name_in_a_form_goes_to_its_large_model(stage: Stage) -> None:
    served, large = await echoing(stage)
    body, kind = form(POLICY)
    headers = {"Content-Type": kind}
    response, _ = await call(served, "POST", "/v1/audio/x", data=body, headers=headers)
    assert response.status == 207
    assert large.requests[-1].content == form("big")[0]


@pytest.mark.timeout(60)  # far less, or hours where it is looked through again and again
async def test_a_form_that_never_comes_to_its_model_is_looked_through_once(stage: Stage) -> None:
    served, _ = await echoing(stage)
    body = b'; name="model"\r\nx: y\r\n' * 500_000
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    response, content = await call(served, "POST", "/v1/audio/x", data=body, headers=headers)
    assert (response.status, json.loads(content)["error"]["param"]) == (400, "model")


async def test_a_file_named_model_is_not_the_model(stage: Stage) -> None:
    served, large = await echoing(stage)
    other = b'--xyz\r\nContent-Disposition: form-data; name="f"; filename="model"\r\n\r\nno\r\n'
    body, kind = form("big")
    headers = {"Content-Type": kind}
    response, _ = await call(served, "POST", "/v1/audio/x", data=other + body, headers=headers)
    assert response.status == 207
    assert large.requests[-1].content == other + body


async def test_a_query_may_name_the_model(stage: Stage) -> None:
    served, large = await echoing(stage)
    response, _ = await call(served, "GET", "/v1/files?model=big&x=%26")
    assert response.status == 207
    assert large.requests[-1].path == "/v1/files?model=big&x=%26"


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("GET", b"", 404),
        ("POST", b"", 400),
        ("POST", b"[1]", 400),
        ("POST", b'{"model": 5}', 400),
        ("POST", b"\x00", 400),
    ],
)
async def test_without_a_model_no_engine_can_be_chosen(
    stage: Stage, method: str, body: bytes, status: int
) -> None:
    served, large = await echoing(stage)
    asked = len(large.requests)
    response, content = await call(served, method, "/v1/embeddings", data=body)
    error = json.loads(content)["error"]
    assert (response.status, error["param"]) == (status, "model")
    assert "/v1/embeddings" in error["message"]
    assert len(large.requests) == asked


async def test_a_model_that_nobody_serves_is_a_404(stage: Stage) -> None:
    served, _ = await echoing(stage)
    response, content = await post(served, "/v1/embeddings", b'{"model": "gpt-9"}')
    assert (response.status, json.loads(content)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/x/../../sleep"])
async def test_no_path_leads_out_of_the_api(stage: Stage, path: str) -> None:
    served, large = await echoing(stage)
    response, _ = await call(served, "POST", path, data=b'{"model": "big"}')
    assert response.status == 404
    assert not [request for request in large.requests if "sleep" in request.path]


async def test_headers_of_one_connection_end_with_it(stage: Stage) -> None:
    served, large = await echoing(stage)
    sent = {
        "Authorization": "Bearer clients",
        "x-api-key": "clients",
        "Cookie": "a=b",
        "X-Conversation-Id": "1",
        "Accept-Encoding": "gzip",
        "TE": "trailers",
        "Proxy-Authorization": "x",
        "Accept": "audio/*",
        "Content-Type": "application/odd",
        "anthropic-beta": "tools",
    }
    response, _ = await call(
        served, "POST", "/v1/odd", data=b'{"model": "big"}', headers={**sent, "Connection": "close"}
    )
    got = large.requests[-1].headers
    kept = {"accept": "audio/*", "content-type": "application/odd", "anthropic-beta": "tools"}
    assert kept.items() <= got.items()
    assert got["accept-encoding"] == "identity"
    assert not {"authorization", "x-api-key", "cookie", "x-conversation-id", "te"} & got.keys()
    assert not {"proxy-authorization", "proxy-connection"} & got.keys()
    back = {name.lower() for name in response.headers}
    assert not {"proxy-connection", "keep-alive", "access-control-allow-origin"} & back
    assert response.headers.getall("x-request-id") != ["theirs"]
    assert len(response.headers.getall("x-request-id")) == 1


async def test_the_limit_of_generations_holds_for_all_of_them(stage: Stage) -> None:
    large = Echo(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"), {"limits": {"generations": 1}})
    await ready(served)
    gate = large.gates["/v1/chat/completions"] = Gate()
    waiting = asyncio.create_task(post(served, CHAT, BODY))
    await gate.reached.wait()
    response, _ = await post(served, "/v1/embeddings", b'{"model": "big"}')
    assert response.status == 429
    gate.opened.set()
    assert (await waiting)[0].status == 200
