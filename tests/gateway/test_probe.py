"""What the gateway learns of its engines, and what /readyz and the log tell of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from gateway import backends
from gateway.connections import Connections
from gateway.engines.chat import Prefill
from gateway.engines.detect import detect
from gateway.engines.hosted import HostedEngine
from gateway.settings import Backend, Timeouts
from gateway.upstream import Upstream
from tests.gateway.fakes import (
    Connection,
    FakeEngine,
    FakeHosted,
    FakeLlamaCpp,
    FakeSglang,
    FakeTgi,
    FakeVllm,
    Request,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.engines import COMPLETIONS
from tests.gateway.support import (
    POLICY,
    WAIT_S,
    Served,
    Stage,
    ask,
    backends_of,
    get,
    policy_of,
    stream,
    until_ready,
)

Dialect = Callable[..., FakeEngine]
STORY = ("<think>", "Six", ".", " Now", " it", ".", "</think>", "Fine")
SELF_HOSTED = (FakeVllm, FakeSglang, FakeTgi, FakeLlamaCpp)


async def probed(
    stage: Stage, large: FakeEngine, backend: Mapping[str, Any] = {}, **policy: Any
) -> tuple[Served, dict[str, Any]]:
    """The gateway, and what it tells in /readyz once it is ready."""
    small = FakeVllm(story(*STORY), model="tiny", tokenizer=large.tokenizer)
    for engine in (large, small):
        await stage.engine(engine)
    given = backends_of(large, small)
    given["large"] |= backend
    served = await stage.gateway({"backends": given}, policy_of(large, small, **policy))
    return served, await until_ready(served, 200)


# ---- what is told -------------------------------------------------------------------------------

TOLD: list[tuple[Dialect, dict[str, Any]]] = [
    (
        FakeVllm,
        {"engine": "vllm", "version": "0.32.0", "models": ["big"], "max_logprobs": 20},
    ),
    (
        FakeSglang,
        {"engine": "sglang", "version": "0.5.23", "models": ["big"], "max_logprobs": None},
    ),
    (
        FakeTgi,
        {"engine": "tgi", "version": "3.3.7", "models": ["big", "tgi"], "max_logprobs": 5},
    ),
    (
        FakeLlamaCpp,
        {"engine": "llamacpp", "version": "b11549", "models": ["big"], "max_logprobs": None},
    ),
]


@pytest.mark.parametrize(("dialect", "known"), TOLD)
async def test_auto_finds_each_engine_and_tells_what_it_can(
    stage: Stage, dialect: Dialect, known: dict[str, Any]
) -> None:
    large = dialect(model="big", tokenizer=Tokenizer(bos=True), system="<bos>", context=1234)
    with capture_logs() as logs:
        _, body = await probed(stage, large)
    url = large.url.removesuffix("/v1")
    rest = {"context": 1234, "bos": 1, "ids": dialect is not FakeTgi, "continuation": "completions"}
    [told] = body["backends"]["large"]
    assert (told.pop("state"), told.pop("active")) == ("up", 0)
    vocabulary = told.pop("vocabulary")
    assert told.pop("tokens") == "exact"
    assert told == {"url": url, "up": True, **known, **rest}
    assert len(vocabulary) == 16
    [line] = [log for log in logs if log["event"] == "engine up" and log["url"] == url]
    assert {**told, "models": tuple(known["models"])}.items() - {("up", True)} <= line.items()
    assert line["vocabulary"] == vocabulary


@pytest.mark.parametrize("dialect", SELF_HOSTED)
async def test_one_vocabulary_has_one_fingerprint_whatever_the_engine(
    stage: Stage, dialect: Dialect
) -> None:
    large = dialect(story(*STORY), model="big")
    _, body = await probed(stage, large)
    told = [body["backends"][role][0]["vocabulary"] for role in ("large", "small")]
    assert told[0] == told[1]
    assert body["policies"][POLICY]["handoff"] == ("text" if dialect is FakeTgi else "tokens")


async def test_no_begin_token_is_told_as_none_of_them(stage: Stage) -> None:
    _, body = await probed(stage, FakeVllm(story(*STORY), model="big"))
    assert body["backends"]["large"][0]["bos"] == 0


async def test_a_hosted_api_is_told_with_what_it_lacks(stage: Stage) -> None:
    large = FakeHosted(story(*STORY), model="big")
    large.completions = False
    _, body = await probed(stage, large, {"engine": "openai"})
    [told] = body["backends"]["large"]
    assert "estimated, by" in told.pop("tokens")
    assert told == {
        "url": large.url.removesuffix("/v1"),
        "up": True,
        "state": "up",
        "active": 0,
        "engine": "openai",
        "version": "",
        "models": ["big"],
        "context": None,
        "vocabulary": None,
        "ids": False,
        "max_logprobs": None,
        "bos": None,
        "continuation": "chat",
    }


async def test_continuation_by_chat_is_told_and_takes_no_ids(stage: Stage) -> None:
    large = FakeVllm(story(*STORY), model="big")
    large.chats = True
    _, body = await probed(stage, large, {"continuation": "chat"})
    [told] = body["backends"]["large"]
    assert (told["continuation"], told["ids"]) == ("chat", False)
    assert body["policies"][POLICY]["handoff"] == "text"


async def test_what_an_engine_cannot_render_is_no_reason_to_be_down(stage: Stage) -> None:
    large = FakeVllm(story(*STORY), model="big")
    large.system = "x"
    large.rendered = lambda *_, **__: (_ for _ in ()).throw(  # type: ignore[method-assign]
        large.refusal("no chat template")
    )
    _, body = await probed(stage, large)
    assert body["backends"]["large"][0]["bos"] is None


# ---- auto ---------------------------------------------------------------------------------------


async def test_any_other_server_is_told_what_to_set(stage: Stage) -> None:
    large, small = FakeHosted(model="big"), FakeVllm(model="tiny")
    served = await stage.pair(large, small)
    body = await until_ready(served, 503)
    [told] = body["backends"]["large"]
    assert told["up"] is False
    for word in ("vllm", "sglang", "tgi", "llamacpp", "openai", "`engine`", "['openai']"):
        assert word in told["error"]
    assert told["error"] == body["policies"][POLICY]["error"]


async def test_an_info_that_is_not_tgis_is_no_tgi(stage: Stage) -> None:
    large = FakeHosted(model="big")
    large.refusals["/info"] = (200, b'{"model_id": "big"}')
    served = await stage.pair(large, FakeVllm(model="tiny"))
    body = await until_ready(served, 503)
    assert "none that `engine: auto` recognises" in body["backends"]["large"][0]["error"]


async def test_a_key_that_is_refused_is_told(stage: Stage) -> None:
    large, small = FakeHosted(model="big"), FakeVllm(model="tiny")
    large.refusals["/v1/models"] = (401, b'{"error": {"message": "Invalid key"}}')
    served = await stage.pair(large, small)
    body = await until_ready(served, 503)
    error = body["backends"]["large"][0]["error"]
    assert "refused the gateway's key" in error
    assert "Invalid key" not in error


URLS = [
    ("https://api.deepseek.com/beta", "auto", Prefill.PREFIX_REASONING),
    ("https://api.mistral.ai/v1", "auto", Prefill.PREFIX),
    ("https://openrouter.ai/api/v1", "auto", Prefill.TRAILING),
    ("https://api.mistral.ai/v1", "trailing", Prefill.TRAILING),
    ("https://any.example/v1", "continue", Prefill.CONTINUE),
]


@pytest.mark.parametrize(("url", "given", "form"), URLS)
async def test_the_form_of_a_message_begun_is_known_or_set(
    url: str, given: Any, form: Prefill
) -> None:
    settings = Backend(urls=(url,), engine="openai", continuation="chat", prefill=given)
    async with Connections(Timeouts()) as session:
        engine = await detect(Upstream(session, url), settings)
    assert isinstance(engine, HostedEngine)
    assert engine.prefills == (form,)


# ---- the policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "tools", "told"),
    [
        (FakeVllm, "large", "large goes on by chat (continue)"),
        (FakeSglang, "large", "large goes on by chat (appended)"),
        (FakeVllm, "small", "small goes on by chat (continue)"),
        (FakeVllm, "whole", "whole to the large model: the policy says so (tools: whole)"),
        (FakeTgi, "large", "whole to the large model: the chat endpoint of "),
    ],
)
async def test_who_writes_after_the_thinking_where_there_are_tools(
    stage: Stage, dialect: Dialect, tools: str, told: str
) -> None:
    _, body = await probed(stage, dialect(story(*STORY), model="big"), tools=tools)
    assert body["policies"][POLICY]["tools"].startswith(told)


@pytest.mark.parametrize(
    ("large", "backend", "why"),
    [
        (FakeTgi, {}, "tgi (large) takes no token ids"),
        (FakeVllm, {"continuation": "chat"}, "large is gone on with by chat"),
        (FakeHosted, {"engine": "openai"}, "large is gone on with by chat"),
    ],
)
async def test_token_handoffs_without_ids_are_refused(
    stage: Stage, large: Dialect, backend: dict[str, Any], why: str
) -> None:
    engine, small = large(model="big"), FakeVllm(model="tiny")
    engine.chats = True
    for one in (engine, small):
        await stage.engine(one)
    given = backends_of(engine, small)
    given["large"] |= {"continuation": "chat"} | backend if backend else {}
    policy = policy_of(engine, small, handoff="tokens")
    served = await stage.gateway({"backends": given}, policy)
    error = (await until_ready(served, 503))["policies"][POLICY]["error"]
    assert f"handoff is `tokens`, but {why}; set handoff to auto or text" in error
    with pytest.raises(openai.InternalServerError, match="set handoff to auto or text"):
        await ask(served)


# ---- coming and going ---------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", SELF_HOSTED)
async def test_an_engine_that_comes_back_with_another_model_is_probed_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, dialect: Dialect
) -> None:
    monkeypatch.setattr(backends, "_CHECK_S", 0.02)
    large = dialect(story(*STORY), model="big", context=1000)
    served, before = await probed(stage, large)
    large.tokenizer = Tokenizer(offset=50_000)
    large.model, large.context = "bigger", 2000
    body = await until(served, lambda body: "bigger" in body["backends"]["large"][0]["models"])
    [old], [new] = before["backends"]["large"], body["backends"]["large"]
    assert new["context"] == 2000
    assert new["vocabulary"] != old["vocabulary"]


async def until(served: Served, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while not holds(body := (await get(served, "/readyz"))[1]):
            pass
    return body


async def test_another_engine_at_the_same_address_is_found(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_CHECK_S", 0.02)
    monkeypatch.setattr(backends, "_RETRY_S", 0.02)
    first = FakeVllm(story(*STORY), model="big")
    served, _ = await probed(stage, first)
    await first.stop()
    second = FakeSglang(story(*STORY), model="big", tokenizer=first.tokenizer)
    second.port = first.port
    await stage.engine(second)
    await until(served, lambda body: body["backends"]["large"][0].get("engine") == "sglang")
    reply = await stream(served)
    assert (reply.text("reasoning_content"), reply.text("content")) == ("Six. Now it.", "Fine")


# ---- logprobs -----------------------------------------------------------------------------------


class Limited(FakeVllm):
    """Started with --max-logprobs 5."""

    text = "Requested sample logprobs of {}, which is greater than max allowed: 5"

    async def _answer(self, request: Request, connection: Connection) -> None:
        if request.path == COMPLETIONS and request.body.get("logprobs", 0) > 5:
            told = {"message": self.text.format(request.body["logprobs"]), "code": 400}
            connection.json({"error": told}, 400)
            return
        await super()._answer(request, connection)


SAYINGS = [
    Limited.text,
    "Invalid value for 'logprobs': must be less than or equal to 5.",
    "logprobs must be <= 5",
    "The maximum value for logprobs: maximum is 5",
]


@pytest.mark.parametrize("saying", SAYINGS)
async def test_fewer_alternatives_are_asked_for_once_a_limit_is_told(
    stage: Stage, saying: str
) -> None:
    large = Limited(writes("Fine"), model="big")
    large.text = saying
    served, _ = await probed(stage, large)
    with capture_logs() as logs:
        for _ in "12":
            reply = await ask(served, logprobs=True, top_logprobs=20)
            [entry] = reply["choices"][0]["logprobs"]["content"]
            assert len(entry["top_logprobs"]) == 5
    assert [d.body["logprobs"] for d in large.decodes] == [20, 5, 5]
    assert [line["limit"] for line in logs if "fewer logprobs" in line["event"]] == [5]
    assert (await get(served, "/readyz"))[1]["backends"]["large"][0]["max_logprobs"] == 5


async def test_another_refusal_is_the_clients(stage: Stage) -> None:
    large = Limited(model="big")
    large.text = "logprobs are not for you"
    served, _ = await probed(stage, large)
    with pytest.raises(openai.BadRequestError, match="not for you"):
        await ask(served, logprobs=True, top_logprobs=20)
    assert json.loads(large.decodes[0].content)["logprobs"] == 20
    assert len(large.decodes) == 1
