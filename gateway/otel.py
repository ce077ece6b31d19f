"""Spans by OpenTelemetry's conventions for GenAI (`gen_ai.*`), sent by OTLP over HTTP.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.errors import GatewayError
from gateway.generation import ServedWholeError
from gateway.settings import TracingSettings
from gateway.tracing import Headers, ReplySpan, Tracing, context_of
from relaygen.events import DecodeChunk, DecodeFinished, DecodeRequest
from relaygen.policy import Policy
from relaygen.usage import Usage

if TYPE_CHECKING:
    from gateway.generation import Generation
    from gateway.openai_api import Ask
    from gateway.pace import Timed
    from gateway.pairs import Side

log = structlog.get_logger()

_SEND_S = 3.0
"""For a batch, all tries together; a gateway that stops waits no longer for a collector."""
_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


class OtelTracing(Tracing):
    """Spans are sent in batches by a thread of their own: no request waits for them."""

    def __init__(self, settings: TracingSettings) -> None:
        assert settings.otlp is not None
        _tell_in_our_log()
        release = version("relaygen")
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample)),
            resource=Resource.create(
                {"service.name": settings.service, "service.version": release}
            ),
            shutdown_on_exit=False,
        )
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        url = f"{settings.otlp.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(url, headers=headers, timeout=_SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("relaygen", release)

    @contextmanager
    def reply(self, headers: Headers, policy: Policy, ask: Ask) -> Iterator[ReplySpan]:
        operation = "chat" if ask.chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {ask.model}",
            _PROPAGATOR.extract(context_of(headers)),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "relaygen",
                "gen_ai.request.model": ask.model,
                "gen_ai.response.model": policy.name,
                "gen_ai.request.stream": ask.stream,
                **_asked(ask),
            },
        )
        with _ending(span):
            yield _OtelReply(self._tracer, span)

    def close(self) -> None:
        self._provider.shutdown()


class _OtelReply(ReplySpan):
    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        super().__init__(_headers(span))
        self._tracer = tracer
        self._span = span
        self._inside = trace.set_span_in_context(span)
        self._usage = Usage()
        self._prompts: dict[int, int] = {}
        self._finished: list[str] = []

    @contextmanager
    def decode(
        self, side: Side, request: DecodeRequest, choice: int, timed: Timed
    ) -> Iterator[Headers]:
        where = urlsplit(side.engine.url)
        span = self._tracer.start_span(
            f"text_completion {side.model}",
            self._inside,
            SpanKind.CLIENT,
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": side.info.dialect,
                "gen_ai.request.model": side.model,
                "gen_ai.request.stream": True,
                "server.address": where.hostname or "",
                "server.port": where.port or (443 if where.scheme == "https" else 80),
                "relaygen.role": side.role,
                "relaygen.segment": request.segment,
                "relaygen.choice": choice,
                **_known({"gen_ai.request.max_tokens": request.max_tokens}),
            },
        )
        with _ending(span):
            try:
                yield _headers(span)
            finally:
                span.set_attributes(_decoded(timed))

    def ended(self, generation: Generation, outcome: str, reply_id: str) -> None:
        session, seen, spent = generation.session, generation.observed, generation.spent
        usage = self._usage = self._usage + session.usage
        self._prompts[id(generation.prompts)] = generation.prompts.tokens  # choices share it
        self._finished += [seen.finish] if seen.finish else []
        first = None if seen.first_at is None else spent.since_asked(seen.first_at)
        attributes = {
            "gen_ai.response.id": reply_id,
            "gen_ai.response.finish_reasons": self._finished or None,
            "gen_ai.response.time_to_first_chunk": first,
            "gen_ai.usage.input_tokens": sum(self._prompts.values()),
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.large_reasoning + usage.small_reasoning,
            "gen_ai.usage.cache_read.input_tokens": sum(seen.cached.values()) or None,
            "relaygen.outcome": outcome,
            "relaygen.large_tokens": usage.large_tokens,
            "relaygen.small_tokens": usage.small_tokens,
            "relaygen.discarded_tokens": usage.discarded_tokens,
            "relaygen.handoffs": usage.handoffs,
            "relaygen.resumes": usage.resumes,
            "relaygen.efficiency": spent.efficiency(session.usage),
        }
        self._span.set_attributes(_known(attributes))
        for moment, handoff in seen.handoffs:
            told = {"to": handoff.target, "trigger": handoff.trigger, "text": handoff.text}
            named = {f"relaygen.handoff.{key}": value for key, value in told.items()}
            self._span.add_event("relaygen.handoff", named, _wall_ns(moment))


def _headers(span: Span) -> Headers:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier


def _decoded(timed: Timed) -> dict[str, Any]:
    """What is known of a decode at its end. The gateway ends most of them: at a cue, a sentence."""
    last = timed.event
    finish = last.reason if isinstance(last, DecodeFinished) else None
    read = last.read if isinstance(last, DecodeChunk | DecodeFinished) else None
    return _known(
        {
            "gen_ai.response.time_to_first_chunk": timed.first_s if timed.began else None,
            "gen_ai.usage.input_tokens": read[0] if read else None,
            "gen_ai.usage.cache_read.input_tokens": read[1] if read else None,
            "gen_ai.usage.output_tokens": timed.received,
            "gen_ai.response.finish_reasons": [finish] if finish else None,
            "relaygen.cut": finish is None,
        }
    )


@contextmanager
def _ending(span: Span) -> Iterator[None]:
    """Ends the span with the block, and tells what broke it. What was only cut is no failure."""
    try:
        yield
    except GatewayError as error:
        _failed(span, str(error.code or error.status), error.message)
        raise
    except ServedWholeError:
        span.set_attribute("relaygen.outcome", "served_whole")
        raise
    except Exception as error:
        _failed(span, type(error).__qualname__, str(error))
        raise
    finally:
        span.end()


def _failed(span: Span, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))


def _asked(ask: Ask) -> dict[str, Any]:
    sampling = {name: ask.sampling.get(field) for field, name in _SAMPLING.items()}
    numbers = {name: value for name, value in sampling.items() if type(value) in (int, float)}
    return _known(
        {
            **numbers,
            "gen_ai.request.max_tokens": ask.limits.max_tokens,
            "gen_ai.request.seed": ask.limits.seed,
            "gen_ai.request.choice.count": ask.choices if ask.choices > 1 else None,
            "gen_ai.request.stop_sequences": ask.limits.stops or None,
        }
    )


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _wall_ns(moment: float) -> int:
    """A moment of time.perf_counter() as nanoseconds since 1970."""
    return time.time_ns() - round((time.perf_counter() - moment) * 1e9)


# ---- what the exporter says of itself -----------------------------------------------------------


class _ToOurs(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.warning("traces", problem=record.getMessage())


def _tell_in_our_log() -> None:
    """Else its lines would stand between ours, of another form."""
    theirs = logging.getLogger("opentelemetry")
    if not theirs.handlers:
        theirs.addHandler(_ToOurs(logging.WARNING))
        theirs.propagate = False
