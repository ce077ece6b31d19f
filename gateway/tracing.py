"""Traces: what a generation tells about itself while it is written. Here: nothing.

A client's trace context goes on to the engines all the same. With `tracing.otlp` set,
gateway/otel.py makes spans of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gateway.settings import SettingsError, TracingSettings
from relaygen.events import DecodeRequest
from relaygen.policy import Policy

if TYPE_CHECKING:  # they have a span each
    from gateway.generation import Generation
    from gateway.openai_api import Ask
    from gateway.pace import Timed
    from gateway.pairs import Side

Headers = Mapping[str, str]
_NONE: Headers = {}
# W3C Trace Context, of this version or a later one; all zeros are no ids.
_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]*)?"
)
_MAX_STATE_CHARS = 512


def context_of(headers: Headers) -> Headers:
    """The trace context of a request, as it goes on; nothing where there is none, or a bad one."""
    parent = headers.get("traceparent")
    if parent is None or not _PARENT.fullmatch(parent):
        return _NONE
    state = headers.get("tracestate", "")
    if 0 < len(state) <= _MAX_STATE_CHARS and state.isascii() and state.isprintable():
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}


class ReplySpan:
    """One request's generations. `headers` join what engines do for it."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers

    @contextmanager
    def decode(
        self, side: Side, request: DecodeRequest, choice: int, timed: Timed
    ) -> Iterator[Headers]:
        """Around one decode, which `timed` follows: the headers of its request."""
        yield self.headers

    def ended(self, generation: Generation, outcome: str, reply_id: str) -> None:
        """One of its generations is over."""


class Tracing:
    """How requests are traced: not at all."""

    @contextmanager
    def reply(self, headers: Headers, policy: Policy, ask: Ask) -> Iterator[ReplySpan]:
        """Around a request that is relayed, from its turn to the end of its reply."""
        yield ReplySpan(context_of(headers))

    def close(self) -> None:
        """Sends what has not been sent. Takes seconds where nobody takes it."""


def tracing_of(settings: TracingSettings) -> Tracing:
    """Raises SettingsError where spans are asked for and OpenTelemetry is not installed."""
    if settings.otlp is None:
        return Tracing()
    try:
        from gateway.otel import OtelTracing
    except ImportError as error:
        raise SettingsError(
            f"settings: tracing.otlp: OpenTelemetry is not installed (no module {error.name}); "
            "run: pip install 'relaygen[otel]'"
        ) from None
    return OtelTracing(settings)
