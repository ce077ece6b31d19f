"""Traces: spans by OpenTelemetry's conventions at a collector, and the client's context sent on."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, server_attributes

from gateway.settings import SettingsError, TracingSettings
from gateway.tracing import context_of, tracing_of
from tests.gateway.collector import Collector, attributes, collector
from tests.gateway.fakes import FakeVllm, Tokenizer, writes
from tests.gateway.fakes.script import silence, story
from tests.gateway.support import (
    POLICY,
    STORY,
    USER,
    WAIT_S,
    Served,
    Stage,
    ask,
    get,
    leaving,
    until_ready,
    within,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
async def spans(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms, not the 5 s that suit a server
    async with collector() as found:
        yield found


async def traced(stage: Stage, spans: Collector, large: FakeVllm, small: FakeVllm) -> Served:
    served = await stage.pair(large, small, {"tracing": {"otlp": spans.url}})
    await until_ready(served, 200)
    return served


def engines() -> tuple[FakeVllm, FakeVllm]:
    same = Tokenizer()
    return (
        FakeVllm(story(*STORY), model="big", tokenizer=same),
        FakeVllm(story(*STORY), model="tiny", tokenizer=same),
    )


# ---- spans --------------------------------------------------------------------------------------


async def test_a_generation_is_a_span_under_the_clients_own(stage: Stage, spans: Collector) -> None:
    served = await traced(stage, spans, *engines())
    reply = await ask(served, temperature=0.5, extra_headers={"traceparent": PARENT})
    (span,) = await within(2 * WAIT_S, spans.named("chat pair"))
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    assert span.kind == span.SPAN_KIND_SERVER
    told, usage = attributes(span), reply["usage"]
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "relaygen"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == POLICY
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.response.id"] == reply["id"]
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["relaygen.handoffs"] == usage["relaygen"]["handoffs"] == len(span.events)
    first = attributes(span.events[0])
    assert (first["relaygen.handoff.to"], first["relaygen.handoff.text"]) == ("small", "Now")
    assert spans.resource["service.name"] == "relaygen"


async def test_choices_share_a_span(stage: Stage, spans: Collector) -> None:
    served = await traced(stage, spans, *engines())
    usage = (await ask(served, n=2))["usage"]
    (span,) = await within(2 * WAIT_S, spans.named("chat pair"))
    told = attributes(span)
    assert told["gen_ai.request.choice.count"] == 2
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    choices = [attributes(s)["relaygen.choice"] for s in spans.spans if s is not span]
    assert set(choices) == {0, 1}


async def test_every_decode_is_a_span_within(stage: Stage, spans: Collector) -> None:
    large, small = engines()
    served = await traced(stage, spans, large, small)
    usage = (await ask(served))["usage"]["relaygen"]
    (whole,) = await within(2 * WAIT_S, spans.named("chat pair"))
    decodes = [span for span in spans.spans if span.name.startswith("text_completion")]
    assert len(decodes) == usage["segments"] == len(large.decodes) + len(small.decodes)
    for span in decodes:
        assert span.parent_span_id == whole.span_id
        assert span.kind == span.SPAN_KIND_CLIENT
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano
        told = attributes(span)
        engine = large if told["relaygen.role"] == "large" else small
        assert told["gen_ai.request.model"] == engine.model
        assert told["gen_ai.provider.name"] == "vllm"
        assert engine.url.startswith(f"http://{told['server.address']}:{told['server.port']}")
    assert sorted(attributes(span)["relaygen.segment"] for span in decodes) == list(range(6))
    # Each engine was told of its own decode's span.
    asked = [request for engine in (large, small) for request in engine.asked("/v1/completions")]
    sent = {tuple(request.headers["traceparent"].split("-")[1:3]) for request in asked}
    assert sent == {(span.trace_id.hex(), span.span_id.hex()) for span in decodes}


async def test_names_are_the_conventions(stage: Stage, spans: Collector) -> None:
    served = await traced(stage, spans, *engines())
    await ask(served)
    await within(2 * WAIT_S, spans.named("chat pair"))
    modules = (gen_ai_attributes, server_attributes)
    known = {v for m in modules for v in vars(m).values() if isinstance(v, str)}
    names = {name for span in spans.spans for name in attributes(span)}
    assert {n for n in names if not n.startswith("relaygen.")} <= known
    assert len(names) > 10


async def test_an_error_is_told(stage: Stage, spans: Collector) -> None:
    large, small = engines()
    large.refusals["/v1/completions"] = (400, b'{"error": {"message": "no", "code": "theirs"}}')
    served = await traced(stage, spans, large, small)
    with pytest.raises(openai.BadRequestError):
        await ask(served)
    (span,) = await within(2 * WAIT_S, spans.named("chat pair"))
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == "theirs"


async def test_a_client_that_leaves_is_no_error(stage: Stage, spans: Collector) -> None:
    large = FakeVllm(writes("one", silence()), model="big")
    served = await traced(stage, spans, large, FakeVllm(model="tiny"))
    async with leaving(served.url, stream=True):
        await within(WAIT_S, large.decode())
    (span,) = await within(2 * WAIT_S, spans.named("chat pair"))
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert attributes(span)["relaygen.outcome"] == "cancelled"


async def test_a_client_that_does_not_sample_has_no_spans(stage: Stage, spans: Collector) -> None:
    served = await traced(stage, spans, *engines())
    await ask(served, extra_headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    await ask(served)
    (span,) = await within(2 * WAIT_S, spans.named("chat pair"))
    assert span.trace_id.hex() != TRACE


async def test_a_collectors_key_is_sent_and_not_shown(stage: Stage, spans: Collector) -> None:
    settings = {"otlp": spans.url, "headers": {"api-key": "secret"}}
    served = await stage.pair(*engines(), {"tracing": settings})
    await until_ready(served, 200)
    await ask(served)
    await within(2 * WAIT_S, spans.named("chat pair"))
    assert spans.headers["api-key"] == "secret"
    assert "secret" not in repr(TracingSettings.model_validate(settings))


async def test_no_collector_costs_no_generation(stage: Stage) -> None:
    served = await stage.pair(*engines(), {"tracing": {"otlp": "http://127.0.0.1:9"}})
    await until_ready(served, 200)
    assert (await ask(served))["choices"][0]["finish_reason"] == "stop"


# ---- without spans ------------------------------------------------------------------------------


async def test_the_clients_context_goes_on_to_both_engines(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await until_ready(served, 200)
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    await ask(served, extra_headers=headers)
    for engine in (large, small):
        for request in engine.asked("/v1/completions"):
            assert {name: request.headers[name] for name in headers} == headers


@pytest.mark.parametrize(("parent", "sent"), [(PARENT, PARENT), ("x", None)])
async def test_what_is_passed_through_takes_a_sound_context_along(
    stage: Stage, parent: str, sent: str | None
) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await until_ready(served, 200)
    await get(served, "/v1/models")
    async with aiohttp.ClientSession(headers={"traceparent": parent}) as session:
        body = {"model": "big", "messages": USER}
        await session.post(f"{served.url}/v1/chat/completions", json=body)
    [request] = large.asked("/v1/chat/completions")
    assert request.headers.get("traceparent") == sent


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        f"{PARENT} x",
        f"{PARENT}-\x01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_a_bad_context_does_not_go_on(parent: str) -> None:
    assert context_of({"traceparent": parent, "tracestate": "a=1"}) == {}


def test_a_bad_state_is_left_out() -> None:
    assert context_of({"traceparent": PARENT, "tracestate": "é"}) == {"traceparent": PARENT}


def test_opentelemetry_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gateway.otel", None)
    settings = TracingSettings(otlp="http://127.0.0.1:4318")
    with pytest.raises(SettingsError, match=re.escape("pip install 'relaygen[otel]'")):
        tracing_of(settings)
