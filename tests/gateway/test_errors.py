"""Errors: OpenAI's shape and status before the first byte, an error event after it."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.fakes import (
    Error,
    FakeEngine,
    FakeLlamaCpp,
    FakeVllm,
    Fin,
    Gate,
    Raw,
    Reset,
    Script,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.engines import COMPLETIONS
from tests.gateway.support import (
    NO_RESUME,
    POLICY,
    USER,
    WAIT_S,
    Served,
    Stage,
    ask,
    events,
    stream,
    within,
)

DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])


@pytest.fixture
async def served(stage: Stage) -> Served:
    return await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"))


async def send(
    served: Served, body: bytes | dict[str, Any], path: str = "/v1/chat/completions", **more: Any
) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + path, data=data, **more) as response,
    ):
        return response.status, await response.read()


# ---- the request is wrong -----------------------------------------------------------------------


async def test_an_unknown_model_names_those_that_are_served(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(served, model="gpt-9")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "'gpt-9'" in caught.value.message
    assert POLICY in caught.value.message


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "no role"}]}, "messages[0]"),
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": {}}, "stop"),
    ({"stop": ["x"] * 33}, "stop"),
    ({"stop": ["x" * 4097]}, "stop"),
    ({"relaygen": {"trace": "no"}}, "trace"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"n": 0}, "n"),
    ({"relaygen": "large"}, "relaygen"),
    ({"relaygen": {"mode": "medium"}}, "relaygen.mode"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_a_wrong_field_is_named(served: Served, change: dict[str, Any], param: str) -> None:
    status, content = await send(served, {"model": POLICY, "messages": USER, **change})
    error = json.loads(content)["error"]
    assert status == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", [None, 5, [], {"a": 1}])
async def test_a_prompt_must_be_one(served: Served, prompt: Any) -> None:
    status, content = await send(served, {"model": POLICY, "prompt": prompt}, "/v1/completions")
    assert status == 400
    assert json.loads(content)["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b"true", b'"text"', b"\xff", b'{"a": "\\ud800"}', b"[" * 5000]
)
async def test_a_body_that_is_no_json_object_is_a_400(served: Served, body: bytes) -> None:
    status, content = await send(served, body)
    assert status == 400
    assert json.loads(content)["error"]["message"].startswith("The body ")


async def test_a_wrong_method_says_which_are_right(served: Served) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(served.url + "/v1/chat/completions") as response,
    ):
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_an_unknown_path_is_a_404_in_the_same_shape(served: Served) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + "/v2/embeddings") as response,
    ):
        assert response.status == 404
        assert "/v2/embeddings" in (await response.json())["error"]["message"]


async def test_a_body_too_large_is_a_413(stage: Stage) -> None:
    served = await stage.pair(
        FakeVllm(model="big"), FakeVllm(model="tiny"), {"limits": {"body_mib": 0.01}}
    )
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(served, messages=[{"role": "user", "content": "x" * 20_000}])
    assert caught.value.status_code == 413
    assert caught.value.code == "body_too_large"
    assert "0.01 MiB" in caught.value.message


async def test_more_than_a_mebibyte_is_fine(served: Served) -> None:
    body = {"model": "nobody", "padding": "x" * 1_200_000}
    status, _ = await send(served, body)
    assert status == 404


async def test_one_generation_too_many_is_a_429(stage: Stage) -> None:
    gate = Gate()
    large = FakeVllm(writes("one", gate, "two"), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"), {"limits": {"generations": 1}})
    chunks = await served.client.chat.completions.create(model=POLICY, messages=USER, stream=True)
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(served)
    assert caught.value.response.headers["Retry-After"] == "1"
    gate.opened.set()
    assert [chunk async for chunk in chunks]
    assert (await ask(served))["choices"][0]["message"]["content"] == "onetwo"


# ---- keys ---------------------------------------------------------------------------------------


@pytest.fixture
async def locked(stage: Stage) -> Served:
    settings = {"api_keys": ["first-key", "second-key"]}
    return await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"), settings)


async def test_a_wrong_key_is_a_401(locked: Served) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await ask(locked)
    assert caught.value.code == "invalid_api_key"
    assert "first-key" not in str(caught.value)


@pytest.mark.parametrize("key", ["first-key", "second-key"])
async def test_each_of_the_keys_opens(locked: Served, key: str) -> None:
    client = locked.client.with_options(api_key=key)
    assert (await client.models.list()).data


@pytest.mark.parametrize(
    "header", [b"", b"Bearer", b"Bearer ", b"Bearer first-key2", b"Basic first-key", b"Bearer \xff"]
)
async def test_no_key_no_entry(locked: Served, header: bytes) -> None:
    headers = {"Authorization": header.decode("utf-8", "surrogateescape")}
    status, content = await send(locked, {}, headers=headers if header else None)
    assert status == 401, content


async def test_the_schemes_case_does_not_matter(locked: Served) -> None:
    status, _ = await send(locked, {}, headers={"Authorization": "bearer first-key"})
    assert status == 400


async def test_health_needs_no_key(locked: Served) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/healthz", "/readyz"):
            async with session.get(locked.url + path) as response:
                assert response.status == 200


# ---- an engine refuses --------------------------------------------------------------------------


async def test_an_engines_4xx_keeps_its_status_and_message(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    error = {"message": "temperature must be in [0, 2]", "type": "BadRequestError", "code": 400}
    large.refusals[COMPLETIONS] = (400, json.dumps({"error": error}).encode())
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(served, temperature=3)
    assert "temperature must be in [0, 2]" in caught.value.message


@pytest.mark.parametrize(
    ("status", "seen"), [(401, 502), (403, 502), (500, 502), (503, 503), (422, 422), (429, 429)]
)
async def test_an_engines_status_becomes_the_clients(stage: Stage, status: int, seen: int) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    large.refusals[COMPLETIONS] = (status, b'{"error": {"message": "told so"}}')
    for streaming in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(served, stream=streaming)
        assert caught.value.status_code == seen
        assert ("told so" in caught.value.message) == (status not in (401, 403))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"plain words", "plain words"),
        (b'{"error": "a text"}', "a text"),
        (b'{"message": "flat", "object": "error"}', "flat"),
        (b'{"detail": "of FastAPI"}', "of FastAPI"),
        (b'{"error": {"message": ["a", "list"]}}', "list"),
        (b"", "HTTP status 400"),
        (b"[1, 2]", "[1,2]"),
    ],
)
async def test_an_engines_error_is_understood_in_any_shape(
    stage: Stage, body: bytes, said: str
) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    large.refusals[COMPLETIONS] = (400, body)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(served)
    assert said in caught.value.message


async def test_a_refusal_to_render_is_the_clients_error(stage: Stage) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    await ask(served)
    large.refusals["/tokenize"] = (400, b'{"error": {"message": "roles must alternate"}}')
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        await ask(served)


@DIALECTS
@pytest.mark.parametrize("dead", ["large", "small"])
async def test_a_dead_engine_is_a_502_that_names_it(
    stage: Stage, dialect: type[FakeEngine], dead: str
) -> None:
    vocabulary = Tokenizer()
    large, small = (dialect(model=m, tokenizer=vocabulary) for m in ("big", "tiny"))
    served = await stage.pair(large, small, on_failure={"small": "fail"})
    await ask(served)
    engine = large if dead == "large" else small
    await engine.stop()
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served)
    assert caught.value.status_code == 502
    assert engine.url.removesuffix("/v1") in caught.value.message
    assert "can't be reached" in caught.value.message


@DIALECTS
async def test_a_dead_small_engine_leaves_all_to_the_large_one(
    stage: Stage, dialect: type[FakeEngine]
) -> None:
    vocabulary = Tokenizer()
    large = dialect(writes("Fine", "."), model="big", tokenizer=vocabulary)
    small = dialect(model="tiny", tokenizer=vocabulary)
    served = await stage.pair(large, small)
    await ask(served)
    await small.stop()
    assert (await ask(served))["choices"][0]["message"]["content"] == "Fine."


async def test_an_engine_that_serves_another_model_is_named(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    served = await stage.pair(large, small, large={"backend": "large", "model": "other"})
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served)
    assert caught.value.status_code == 503
    assert "serves big" in caught.value.message


async def test_a_policy_that_wants_tokens_of_unlike_vocabularies_is_refused(stage: Stage) -> None:
    small = FakeVllm(model="tiny", tokenizer=Tokenizer(offset=50_000))
    served = await stage.pair(FakeVllm(model="big"), small, handoff="tokens")
    with pytest.raises(openai.InternalServerError, match="vocabularies differ") as caught:
        await ask(served)
    assert caught.value.status_code == 503


async def test_token_ids_as_a_prompt_need_one_vocabulary(stage: Stage) -> None:
    small = FakeVllm(model="tiny", tokenizer=Tokenizer(offset=50_000))
    served = await stage.pair(FakeVllm(model="big"), small)
    with pytest.raises(openai.BadRequestError, match="send text instead"):
        await served.client.completions.create(model=POLICY, prompt=[2001, 2002])


# ---- a stream breaks ----------------------------------------------------------------------------

BREAKS = pytest.mark.parametrize(
    "act", [Reset(), Fin(), Error("queue full")], ids=["reset", "fin", "error"]
)


@DIALECTS
@BREAKS
async def test_a_stream_that_breaks_at_once_is_an_http_error(
    stage: Stage, dialect: type[FakeEngine], act: Any
) -> None:
    served = await stage.pair(dialect(writes(act), model="big"), dialect(model="tiny"))
    for streaming in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(served, stream=streaming)
        assert caught.value.status_code == (429 if isinstance(act, Error) else 502)


@DIALECTS
@BREAKS
async def test_a_stream_that_breaks_later_ends_in_an_error_event(
    stage: Stage, dialect: type[FakeEngine], act: Any
) -> None:
    served = await stage.pair(
        dialect(writes("<think>", "Six", " plus", act), model="big"),
        dialect(model="tiny"),
        NO_RESUME,
    )
    status, wire = await send(served, {"model": POLICY, "messages": USER, "stream": True})
    assert status == 200
    *chunks, last = events(wire)
    assert last["error"]["type"] == "upstream_error"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    texts = [c["choices"][0]["delta"].get("reasoning_content") or "" for c in chunks]
    assert "".join(texts) == "Six plus"


@BREAKS
async def test_the_sdk_raises_when_a_stream_breaks(stage: Stage, act: Any) -> None:
    script = writes("<think>", "Six", " plus", act)
    served = await stage.pair(FakeVllm(script, model="big"), FakeVllm(model="tiny"))
    with pytest.raises(openai.APIError):
        await stream(served)


@BREAKS
async def test_a_reply_in_one_piece_that_breaks_is_a_502(stage: Stage, act: Any) -> None:
    script = writes("<think>", "Six", " plus", act)
    served = await stage.pair(FakeVllm(script, model="big"), FakeVllm(model="tiny"))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served)
    assert caught.value.status_code == 502


@BREAKS
async def test_the_second_engine_breaking_ends_in_an_error_event(stage: Stage, act: Any) -> None:
    vocabulary = Tokenizer()
    large = FakeVllm(story("<think>", "Now", " it"), model="big", tokenizer=vocabulary)
    small = FakeVllm(writes(act), model="tiny", tokenizer=vocabulary)
    served = await stage.pair(large, small, NO_RESUME)
    status, wire = await send(served, {"model": POLICY, "messages": USER, "stream": True})
    *chunks, last = events(wire)
    assert status == 200
    assert "error" in last
    assert chunks[-1]["choices"][0]["delta"] == {"reasoning_content": "Now"}


async def test_the_second_engine_refusing_ends_in_an_error_event(stage: Stage) -> None:
    vocabulary = Tokenizer()
    large = FakeVllm(story("<think>", "Now", " it"), model="big", tokenizer=vocabulary)
    small = FakeVllm(model="tiny", tokenizer=vocabulary)
    small.refusals[COMPLETIONS] = (400, b'{"error": {"message": "top_k is too odd"}}')
    served = await stage.pair(large, small)
    with pytest.raises(openai.APIError, match="top_k is too odd"):
        await stream(served)


async def test_tokens_right_before_an_error_are_not_lost(stage: Stage) -> None:
    large = FakeVllm(writes("<think>", "Six", " plus", Error("queue full")), model="big")
    large.in_one_write = True
    served = await stage.pair(large, FakeVllm(model="tiny"), NO_RESUME)
    _, wire = await send(served, {"model": POLICY, "messages": USER, "stream": True})
    *chunks, last = events(wire)
    texts = [c["choices"][0]["delta"].get("reasoning_content") or "" for c in chunks]
    assert "".join(texts) == "Six plus"
    assert "queue full" in last["error"]["message"]


def _after_the_answer_began(act: Any) -> Script:
    return writes("Fine", ".", act)


@BREAKS
async def test_a_broken_answer_is_never_taken_for_a_stop(stage: Stage, act: Any) -> None:
    served = await stage.pair(
        FakeVllm(_after_the_answer_began(act), model="big"), FakeVllm(model="tiny")
    )
    _, wire = await send(served, {"model": POLICY, "messages": USER, "stream": True})
    assert b"[DONE]" not in wire
    assert b'"finish_reason":"stop"' not in wire
    assert "error" in events(wire)[-1]


async def test_an_engine_that_falls_silent_is_given_up(stage: Stage) -> None:
    large = FakeVllm(writes(Gate()), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"), {"timeouts": {"idle": 0.3}})
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served)
    assert caught.value.status_code == 504
    await within(WAIT_S, large.decodes[0].left.wait())


JUNK = [
    b"{",
    b"[]",
    b"5",
    b'{"choices": [5]}',
    b'{"choices": {"0": 1}}',
    b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}',
    b'{"choices": [{"text": "a", "logprobs": {"content": [{}]}}]}',
    b'{"usage": 5}',
]


@DIALECTS
@pytest.mark.parametrize("junk", JUNK)
async def test_junk_in_a_stream_is_an_engines_error(
    stage: Stage, dialect: type[FakeEngine], junk: bytes
) -> None:
    script = writes(Raw(b"data: " + junk + b"\n\n"), Fin())
    served = await stage.pair(dialect(script, model="big"), dialect(model="tiny"))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(served)
    assert caught.value.status_code == 502


async def test_every_error_names_its_request(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(served, model="nobody", extra_headers={"x-request-id": "order-66"})
    assert caught.value.request_id == "order-66"


async def test_a_body_nested_too_deeply_to_pass_on_is_the_clients_error(served: Served) -> None:
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    status, content = await send(served, {"model": POLICY, "messages": USER, "odd": nested})
    assert status == 400, content


async def test_a_body_that_is_not_compressed_as_it_says_is_the_clients_error(
    served: Served,
) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession(skip_auto_headers=["Content-Encoding"]) as session,
        session.post(
            served.url + "/v1/chat/completions", data=b"{}", headers=headers, compress=None
        ) as response,
    ):
        assert response.status == 400
        assert "error" in await response.json()


async def test_token_ids_that_no_vocabulary_has_are_the_clients_error(served: Served) -> None:
    for ids in ([-1], [2**40]):
        status, content = await send(served, {"model": POLICY, "prompt": ids}, "/v1/completions")
        assert (status, json.loads(content)["error"]["param"]) == (400, "prompt")
