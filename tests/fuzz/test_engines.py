"""Whatever engines answer: clients get a reply, or an error, and never an ending made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fuzz.bodies import FUNCTION, JUNK, USER, spoil, written
from tests.fuzz.sturdy import SturdyLlamaCpp, SturdyVllm, any_prompt
from tests.fuzz.support import SECONDS, Running, alive, ask, background, fuzz, proper
from tests.gateway.fakes import FakeEngine, Request
from tests.gateway.fakes.http import Connection
from tests.gateway.support import Served, Stage, policy_of

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(10 * SECONDS + 300)]


class _Odd(FakeEngine):
    """Decodes, and tokenizes if so told, with the bytes that it is given."""

    status = 200
    kind = "text/event-stream"
    wire = b""
    cuts = 1
    odd_paths: tuple[str, ...] = ()

    async def answer(self, request: Request, connection: Connection) -> None:
        if not self.is_decode(request.path) and request.path not in self.odd_paths:
            await super().answer(request, connection)
            return
        if self.kind == "text/event-stream" and self.status == 200:
            connection.begin(self.kind)
            for i in range(0, len(self.wire), self.cuts):
                connection.send(self.wire[i : i + self.cuts])
            connection.end()
        else:
            connection.whole(self.wire, self.status)


class OddVllm(_Odd, SturdyVllm):
    pass


class OddLlamaCpp(_Odd, SturdyLlamaCpp):
    pass


ODD: dict[str, _Odd] = {}


async def odd_pairs(stage: Stage) -> Served:
    ODD["pair"] = OddVllm(any_prompt(), model="big")
    ODD["lpair"] = OddLlamaCpp(any_prompt(), model="lbig")
    backends, policies = {}, []
    for name, engine in ODD.items():
        engine.chats = True
        await stage.engine(engine)
        backends[name] = {"urls": [engine.url]}
        policy = policy_of(engine, engine, name=name)
        policy["large"]["backend"] = policy["small"]["backend"] = name
        policies.append(policy)
    return await stage.gateway({"backends": backends, "timeouts": {"idle": 5}}, *policies)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with background(tmp_path_factory.mktemp("policies"), odd_pairs) as running:
        yield running


# ---- what engines say ---------------------------------------------------------------------------

_LOGPROBS = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1}]}
_ENTRIES = {"content": [{"id": 5, "token": "a", "logprob": -0.1, "top_logprobs": []}]}
_CALL = {"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
CHOICES: list[dict[str, Any]] = [
    {"index": 0, "text": "a.", "token_ids": [5], "logprobs": _LOGPROBS, "finish_reason": None},
    {"index": 0, "text": "a", "logprobs": _ENTRIES, "finish_reason": None},
    {"index": 0, "text": "</think>b", "token_ids": [6, 7], "finish_reason": None},
    {"index": 0, "delta": {"content": "a"}, "token_ids": [5], "logprobs": _ENTRIES},
    {"index": 0, "delta": {"reasoning_content": "a", "content": "b"}},
    {"index": 0, "delta": {"tool_calls": [_CALL]}, "finish_reason": None},
    {"index": 0, "message": {"content": "a", "tool_calls": [_CALL]}, "finish_reason": "stop"},
]
FINISHES = ["stop", "length", "tool_calls", "content_filter", "abort", "odd"]


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """One chunk near what engines send."""
    choice = dict(draw(st.sampled_from(CHOICES)))
    if draw(st.integers(0, 3)) == 0:
        choice["finish_reason"] = draw(st.sampled_from(FINISHES))
    chunk: Any = {"id": "x", "created": 1, "model": "m", "choices": [choice]}
    if draw(st.booleans()):
        chunk["usage"] = _USAGE
    if draw(st.integers(0, 4)) == 0:
        chunk["timings"] = {"predicted_n": 1}
    if draw(st.integers(0, 9)) == 0:
        chunk["error"] = draw(JUNK)
    chunk = json.loads(json.dumps(chunk))
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        spoil(draw, chunk)
    return written(chunk)


EVENTS = st.lists(
    st.one_of(
        chunks().map(lambda data: b"data: " + data + b"\n\n"),
        chunks().map(lambda data: b"data: " + data + b"\n\n"),
        JUNK.map(written).map(lambda data: b"data: " + data + b"\n\n"),
        st.sampled_from([b"data: [DONE]\n\n", b": ping\n\n", b"data:\n\n", b"data: {\n\n"]),
        st.binary(max_size=20),
    ),
    max_size=6,
).map(b"".join)
ANSWERS = st.one_of(
    st.tuples(st.just("text/event-stream"), st.just(200), EVENTS),
    st.tuples(st.just("text/event-stream"), st.just(200), EVENTS),
    st.tuples(st.just("application/json"), st.just(200), chunks() | JUNK.map(written)),
    st.tuples(
        st.just("application/json"),
        st.sampled_from([400, 404, 422, 429, 500, 503]),
        JUNK.map(lambda junk: written({"error": {"message": junk, "code": junk, "type": junk}}))
        | JUNK.map(written)
        | st.binary(),
    ),
)

# ---- what clients ask -----------------------------------------------------------------------

_TOOLS = [{"type": "function", "function": FUNCTION}]
_PICTURE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
_LOOK = [{"role": "user", "content": [{"type": "text", "text": "a"}, _PICTURE]}]
_SHOWN = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", {"messages": USER, "tools": _TOOLS}),
    ("/v1/chat/completions", {"messages": _LOOK}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 999}),
    ("/v1/messages", {"messages": USER, "max_tokens": 999}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [_SHOWN]}], "max_tokens": 999}),
    ("/v1/messages", {"messages": USER, "tools": [{"name": "look", "input_schema": {}}],
                      "max_tokens": 999}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": "http://x/y.png"}]}]}),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION}]}),
]  # fmt: skip


def test_any_answer(gateway: Running) -> None:
    url = gateway.served.url

    def check(
        name: str,
        asked: tuple[str, dict[str, Any]],
        stream: bool,
        solo: bool,
        answer: tuple[str, int, bytes],
        cuts: int,
    ) -> None:
        engine = ODD[name]
        engine.kind, engine.status, engine.wire = answer
        engine.cuts = cuts
        path, body = asked
        mode = {"relaygen": {"mode": "large"}} if solo else {}
        content = json.dumps({"model": name, "stream": stream, **body, **mode}).encode()
        given = ask(url, "POST", path, content)
        # Untouched: what the engine says is what the client gets.
        if path == "/v1/chat/completions" and given.headers["x-relaygen-mode"] == "passthrough":
            return
        proper(given, path)
        told = [finish for finish in FINISHES if f'"{finish}"'.encode() in engine.wire]
        if given.status == 200 and not told:
            assert not [f for f in ENDED if f in given.content], given.content
        alive(url)

    names = st.sampled_from(["pair", "lpair"])
    fuzz(
        check, names, st.sampled_from(ASKED), st.booleans(), st.booleans(), ANSWERS,
        st.sampled_from([1, 7, 100_000]),
    )  # fmt: skip


ENDED = (b'"finish_reason":"stop"', b'"end_turn"', b"message_stop", b"response.completed")


def test_any_tokenizer(gateway: Running) -> None:
    """Junk where ids or a rendered prompt should be."""
    url = gateway.served.url

    def check(name: str, path: str, junk: bytes, body: dict[str, Any]) -> None:
        engine = ODD[name]
        engine.kind, engine.status, engine.wire = "application/json", 200, junk
        engine.odd_paths = (path,)
        try:
            content = json.dumps({"model": name, **body}).encode()
            for asked in ("/v1/chat/completions", "/v1/messages/count_tokens"):
                proper(ask(url, "POST", asked, content), asked)
            alive(url)
        finally:
            engine.odd_paths = ()

    paths = st.sampled_from(["/tokenize", "/detokenize", "/apply-template"])
    keys = st.sampled_from(["tokens", "count", "prompt", "content", "max_model_len"])
    junk = st.dictionaries(keys, JUNK) | JUNK
    fuzz(
        check, st.sampled_from(["pair", "lpair"]), paths, junk.map(written),
        st.sampled_from([{"messages": USER}, {"messages": USER, "tools": _TOOLS}]), share=0.3,
    )  # fmt: skip
