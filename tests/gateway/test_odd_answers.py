"""Engines that answer at endless length, or with JSON of another shape than they should."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from gateway import upstream
from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Request, Tokenizer, story
from tests.gateway.fakes.http import Connection
from tests.gateway.support import POLICY, STORY, USER, Served, Stage, until_ready

CHAT = "/v1/chat/completions"
LOOK = [
    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
]


class Odd(FakeEngine):
    """Answers with `odd` on the paths that it has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.odd: dict[str, bytes] = {}
        self.kind = "application/json"
        self.endless = False

    async def answer(self, request: Request, connection: Connection) -> None:
        if (content := self.odd.get(request.path)) is None:
            await super().answer(request, connection)
            return
        connection.begin(self.kind)
        connection.send(content)
        while self.endless and not connection.gone.is_set():
            connection.send(content)
            if connection.unread.is_set():
                await connection.read.wait()
            await asyncio.sleep(0)
        connection.end()


class OddVllm(Odd, FakeVllm):
    pass


class OddLlamaCpp(Odd, FakeLlamaCpp):
    pass


async def pair(stage: Stage, kind: type[Odd] = OddVllm) -> tuple[Served, Odd]:
    tokens = Tokenizer()
    large = kind(story(*STORY), model="big", tokenizer=tokens)
    served = await stage.pair(large, kind(story(*STORY), model="tiny", tokenizer=tokens))
    await until_ready(served, 200)
    return served, large


async def post(served: Served, path: str, **body: Any) -> tuple[int, bytes]:
    content = {"model": POLICY, "max_tokens": 99, **body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + path, json=content) as response,
    ):
        return response.status, await response.read()


# ---- endless ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "path", "request_"),
    [
        ("/tokenize", CHAT, {"messages": USER}),
        (CHAT, "/v1/messages", {"messages": LOOK}),
        (CHAT, "/v1/messages", {"messages": LOOK, "stream": True}),
    ],
)
async def test_an_endless_answer_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, odd: str, path: str, request_: dict[str, Any]
) -> None:
    served, large = await pair(stage)
    monkeypatch.setattr(upstream, "MAX_ANSWER_BYTES", 1_000_000)
    large.odd, large.endless = {odd: b" " * 50_000}, True
    status, content = await post(served, path, **request_)
    assert status == 502
    assert "answered with over 1000000 bytes" in json.loads(content)["error"]["message"]


async def test_an_endless_error_is_told_by_its_beginning(stage: Stage) -> None:
    served, large = await pair(stage)
    message = "x" * 100_000
    large.refusals = {"/v1/completions": (400, json.dumps({"message": message}).encode())}
    status, content = await post(served, CHAT, messages=USER)
    assert status == 400
    assert len(json.loads(content)["error"]["message"]) <= 500


# ---- of another shape ---------------------------------------------------------------------------

ODD_JSON = [
    *(b"{}", b"[]", b"null", b"5", b"[" * 1000 + b"]" * 1000),
    b'{"tokens": 5, "prompt": 5, "content": 5}',
    b'{"tokens": ["a"], "prompt": [], "content": {}}',
    b'{"tokens": [1.5], "prompt": null, "content": null}',
]


@pytest.mark.parametrize("kind", [OddVllm, OddLlamaCpp])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_a_tokenizer_that_answers_oddly_is_the_engines_fault(
    stage: Stage, kind: type[Odd], path: str
) -> None:
    served, large = await pair(stage, kind)
    for odd in ODD_JSON:
        large.odd = {"/tokenize": odd, "/apply-template": odd}
        status, content = await post(served, path, messages=USER)
        assert status == 502, content
        assert large.url.removesuffix("/v1") in json.loads(content)["error"]["message"]


@pytest.mark.parametrize(
    "completion",
    [
        b'{"choices": 5}',
        b'{"choices": [5]}',
        b'{"choices": [{"message": 5}]}',
        b'{"choices": [{"message": {"tool_calls": [5]}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "a"}, "finish_reason": ["stop"]}]}',
        b'{"choices": [{"message": {}, "finish_reason": "stop"}], "usage": 5}',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_of_another_shape_is_the_engines_fault(
    stage: Stage, completion: bytes, stream: bool
) -> None:
    served, large = await pair(stage)
    large.odd = {CHAT: completion}
    for path, body in (
        ("/v1/messages", {"messages": LOOK}),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "http://x"}]}]}),
    ):  # fmt: skip
        status, content = await post(served, path, stream=stream, **body)
        assert status == 502 or (stream and b'"error"' in content), content
        assert b"end_turn" not in content
        assert b"response.completed" not in content


@pytest.mark.parametrize("depth", [199, 250, 950, 1020])
@pytest.mark.parametrize("field", ["model", "seed", "metadata", "relaygen", "messages"])
async def test_a_body_may_be_nested_so_deep(stage: Stage, depth: int, field: str) -> None:
    served, _ = await pair(stage)
    rest = {"model": POLICY, "messages": USER, "max_tokens": 9, "metadata": {}}
    rest.pop(field, None)
    deep = f'{json.dumps(rest)[:-1]}, "{field}": ' + "[" * depth + "]" * depth + "}"
    async with aiohttp.ClientSession() as session:
        for path in (CHAT, "/v1/messages", "/v1/messages/count_tokens"):
            async with session.post(served.url + path, data=deep) as response:
                told = await response.json()
                assert response.status in ((200, 400) if depth < 200 else (400,)), told
                if depth > 200:
                    assert "at most 200 levels" in told["error"]["message"]


async def test_events_may_be_nested_so_deep(stage: Stage) -> None:
    served, large = await pair(stage)
    for depth in (250, 950, 1020):
        nested = b"[" * depth + b"]" * depth
        choice = b'{"index": 0, "delta": {"content": "a"}, "odd": %s}' % nested
        large.odd, large.kind = {CHAT: b'data: {"choices": [%s]}\n\n' % choice}, "text/event-stream"
        status, content = await post(served, "/v1/messages", messages=LOOK, stream=True)
        assert status == 502
        assert "nested over 200 levels" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize("expect", ["else", "100-continue, else"])
async def test_other_expectations_are_ignored(stage: Stage, expect: str) -> None:
    served = await stage.pair(FakeVllm(), FakeVllm())
    async with (
        aiohttp.ClientSession() as session,
        session.get(served.url + "/v1/models", headers={"Expect": expect}) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize(
    "choice",
    [
        {"text": [1], "token_ids": [5]},
        {"text": {"a": 1}},
        {"text": 5, "finish_reason": "stop"},
        {"text": "a", "token_ids": ["x"]},
        {"text": "a", "token_ids": 5},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_of_another_shape_is_the_engines_fault(
    stage: Stage, choice: dict[str, Any], stream: bool
) -> None:
    served, large = await pair(stage)
    chunk = json.dumps({"choices": [choice], "usage": {"completion_tokens": "many"}})
    large.odd = {"/v1/completions": f"data: {chunk}\n\ndata: [DONE]\n\n".encode()}
    large.kind = "text/event-stream"
    status, content = await post(served, CHAT, messages=USER, stream=stream)
    assert status == 502 or (stream and b'"error"' in content), content
    assert b"stop" not in content
