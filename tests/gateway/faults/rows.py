"""Every fault, what the client sees of it, what the log tells and what is counted.

The table of docs/operations.md is written from these rows, and each is played by the scene of its
id in tests/gateway/faults/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# ---- what the client sees -----------------------------------------------------------------------


@dataclass(frozen=True)
class Unbroken:
    """The whole text, a finish_reason and [DONE], as if nothing had been."""

    def __str__(self) -> str:
        return "an unbroken reply"


@dataclass(frozen=True)
class Refused:
    """An HTTP error, before any of the reply. `code`: the error's."""

    status: int
    code: str | None

    def __str__(self) -> str:
        return f"{self.status} `{self.code}`" if self.code else f"{self.status}"


@dataclass(frozen=True)
class Broken:
    """What there was of the reply, then an error event: no finish_reason, no [DONE]."""

    code: str | None

    def __str__(self) -> str:
        event = f"an error event `{self.code}`" if self.code else "an error event"
        return f"the text so far, then {event}"


@dataclass(frozen=True)
class Cut:
    """The connection closes; what came before it has no end."""

    def __str__(self) -> str:
        return "the connection is cut: no `[DONE]`"


@dataclass(frozen=True)
class Gone:
    """The client has left."""

    def __str__(self) -> str:
        return "(it has left)"


Seen = Unbroken | Refused | Broken | Cut | Gone

# ---- what the log tells -------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A line: its event, and fields that it has among others."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        fields = "".join(f" {name}={value}" for name, value in self.fields.items())
        return f"`{self.event}`{fields}"


def told(event: str, **fields: Any) -> Told:
    return Told(event, fields)


# ---- the rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """`counted`: by sample, how much is added by one such fault (of a gauge: what it shows)."""

    id: str
    fault: str
    seen: Seen
    log: tuple[Told, ...]
    counted: Mapping[str, int]


def failures(cause: str, times: int = 1, backend: str = "large") -> dict[str, int]:
    return {f'relaygen_upstream_failures_total{{backend="{backend}",cause="{cause}"}}': times}


def resumes(to: str, cause: str, role: str = "large", times: int = 1) -> dict[str, int]:
    labels = f'cause="{cause}",policy="pair",role="{role}",to="{to}"'
    return {f"relaygen_resumes_total{{{labels}}}": times}


def ended(outcome: str) -> dict[str, int]:
    return {f'relaygen_generations_total{{outcome="{outcome}",policy="pair"}}': 1}


def refused(code: str) -> dict[str, int]:
    return {f'relaygen_refused_total{{code="{code}"}}': 1}


def replicas(state: str, backend: str = "large") -> dict[str, int]:
    return {f'relaygen_replicas{{backend="{backend}",state="{state}"}}': 1}


FAILED = ended("failed")
UNBROKEN = Unbroken()
BROKEN = Broken("generation_failed")
GENERATION_FAILED = told("generation failed", code="generation_failed")
DOWN = told("engine down")


def _resumed(to: str, cause: str) -> Told:
    return told("resumed", to=to, cause=cause)


def _request_failed(status: int, code: str | None) -> Told:
    return told("request failed", status=status, code=code)


def _own_refusal(row: str, fault: str, status: int, code: str) -> Row:
    log = (_request_failed(status, code),)
    return Row(row, fault, Refused(status, code), log, refused(code))


BREAKS = {
    "reset": ("resets the connection", "truncated"),
    "truncated": ("ends its stream without an end", "truncated"),
    "error_event": ("sends an error event", "error"),
    "garbage": ("sends what is no event", "error"),
    "oversized": ("sends an event of over 10 MiB", "error"),
    "http_500": ("answers a handoff with 5xx", "status"),
    "http_429": ("answers a handoff with 429", "status"),
    "idle": ("goes silent (`timeouts.idle`)", "timeout"),
}
"""By the id's beginning: what the engine does in the middle of a generation, and the cause."""


def _breaks() -> list[Row]:
    rows = []
    for name, (what, cause) in BREAKS.items():
        rows.append(
            Row(
                f"{name}_with_another",
                f"An engine {what} in mid-generation; there is another",
                UNBROKEN,
                (_resumed("replica", cause),),
                {**failures(cause), **resumes("replica", cause)},
            )
        )
        rows.append(
            Row(
                f"{name}_with_none_left",
                f"An engine {what} in mid-generation; none is left",
                BROKEN,
                (GENERATION_FAILED,),
                {**failures(cause), **FAILED},
            )
        )
    return rows


ENGINES = [
    Row(
        "refuses_alone",
        "The large model's only engine refuses the connection",
        Refused(502, "engine_unreachable"),
        (DOWN, _request_failed(502, "engine_unreachable")),
        {**failures("connect"), **FAILED, **replicas("down")},
    ),
    Row(
        "refuses_with_another",
        "An engine refuses the connection; there is another",
        UNBROKEN,
        (DOWN, told("trying another replica", policy="pair")),
        {**failures("connect"), **replicas("down")},
    ),
    Row(
        "gone_at_a_handoff",
        "An engine is gone when a generation comes back to it; there is another",
        UNBROKEN,
        (DOWN, _resumed("replica", "connect")),
        {**failures("connect"), **resumes("replica", "connect"), **replicas("down")},
    ),
    Row(
        "known_to_be_down",
        "The large model's only engine is known to be down",
        Refused(502, "engine_unreachable"),
        (_request_failed(502, "engine_unreachable"),),
        {**FAILED, **replicas("down")},
    ),
    Row(
        "refuses_our_key",
        "An engine refuses the gateway's key (401, 403)",
        Refused(502, "engine_refused_key"),
        (_request_failed(502, "engine_refused_key"),),
        {**failures("status"), **FAILED},
    ),
    Row(
        "busy_alone",
        "The only engine answers 429 before the first token",
        Refused(429, None),
        (_request_failed(429, None),),
        {**failures("status"), **FAILED},
    ),
    *_breaks(),
    Row(
        "silent_at_first_alone",
        "The only engine sends no first token (`timeouts.first_token`)",
        Refused(504, "engine_timeout"),
        (_request_failed(504, "engine_timeout"),),
        {**failures("timeout"), **FAILED},
    ),
    Row(
        "silent_at_first_with_another",
        "An engine sends no first token (`timeouts.first_token`); there is another",
        UNBROKEN,
        (_resumed("replica", "timeout"),),
        {**failures("timeout"), **resumes("replica", "timeout")},
    ),
    Row(
        "slow_to_begin",
        "An engine is slower to its first token than the policy's `slow.*.first_token`; there is "
        "another",
        UNBROKEN,
        (_resumed("replica", "slow"),),
        {**failures("slow", backend="small"), **resumes("replica", "slow", "small")},
    ),
    Row(
        "slow_to_decode",
        "An engine is slower than the policy's `slow.*.tokens_per_second`; there is another",
        UNBROKEN,
        (_resumed("replica", "slow"),),
        {**failures("slow"), **resumes("replica", "slow")},
    ),
    Row(
        "slow_without_another",
        "An engine is slower than the policy's `slow` limits; there is none to go to",
        UNBROKEN,
        (told("slow engine, and no other"),),
        {},
    ),
    Row(
        "reply_too_long",
        "The whole reply takes too long (`timeouts.total`)",
        Broken("reply_timeout"),
        (
            told("generation failed", code="reply_timeout"),
            told("generation", outcome="failed"),
        ),
        FAILED,
    ),
    Row(
        "attempts_used_up",
        "Engines break more often than `resume.attempts` allows",
        BROKEN,
        (
            _resumed("same", "truncated"),
            told("resumes used up", attempts=1),
            GENERATION_FAILED,
        ),
        {**failures("truncated", 2), **resumes("same", "truncated"), **FAILED},
    ),
    Row(
        "small_is_down",
        "The small model's only engine is down: the large one writes alone",
        UNBROKEN,
        (DOWN, told("trying another replica", policy="pair")),
        {**failures("connect", backend="small"), **replicas("down", "small")},
    ),
    Row(
        "small_breaks",
        "The small model's only engine breaks: the large one goes on",
        UNBROKEN,
        (_resumed("role", "truncated"),),
        {**failures("truncated", backend="small"), **resumes("role", "truncated", "small")},
    ),
    Row(
        "small_keeps_breaking",
        "The small model's only engine breaks again and again: it is not handed to any more",
        UNBROKEN,
        (_resumed("role", "truncated"), told("breaker open", seconds=5.0)),
        {
            **failures("truncated", 2, backend="small"),
            **resumes("role", "truncated", "small", 2),
            **replicas("open", "small"),
        },
    ),
    Row(
        "small_breaks_and_must_not",
        "The same with `on_failure.small: fail`",
        BROKEN,
        (GENERATION_FAILED,),
        {**failures("truncated", backend="small"), **FAILED},
    ),
    Row(
        "small_is_slower",
        "The small model is measured to be slower than the large one: it is held back",
        UNBROKEN,
        (told("small model held", policy="pair"),),
        {'relaygen_small_held{policy="pair"}': 1},
    ),
    Row(
        "large_is_down",
        "The large model's only engine is down, with `on_failure.large: small`: the small one "
        "writes alone",
        UNBROKEN,
        (DOWN, _resumed("role", "connect")),
        {**failures("connect"), **resumes("role", "connect"), **replicas("down")},
    ),
    Row(
        "large_breaks",
        "The large model's only engine breaks, with `on_failure.large: small`: the small one "
        "goes on",
        UNBROKEN,
        (_resumed("role", "truncated"),),
        {**failures("truncated"), **resumes("role", "truncated")},
    ),
    Row(
        "tools_break",
        "The engine that writes what follows a thought (tools) breaks within a call",
        Broken("engine_disconnected"),
        (
            told("generation failed", code="engine_disconnected"),
            told("generation", outcome="failed"),
        ),
        {**failures("truncated"), **FAILED},
    ),
    Row(
        "breaker_opens",
        "An engine fails `health.failures` times in a row: it is passed over",
        UNBROKEN,
        (told("breaker open", seconds=5.0),),
        {**failures("error"), **resumes("replica", "error"), **replicas("open")},
    ),
    Row(
        "draining",
        "A replica drains: nothing new goes there",
        UNBROKEN,
        (told("settings loaded", changed=["backends"]),),
        replicas("draining"),
    ),
    Row(
        "passthrough_refused",
        "Passed through: an engine refuses the connection; there is another",
        UNBROKEN,
        (DOWN, told("trying another replica")),
        {**failures("connect"), **replicas("down")},
    ),
    Row(
        "passthrough_breaks",
        "Passed through: the engine breaks in mid-stream",
        Broken("engine_disconnected"),
        (told("passthrough broke off"),),
        failures("truncated"),
    ),
    Row(
        "passthrough_breaks_translated",
        "The same by `/v1/messages` or `/v1/responses`, whose errors have no code",
        Broken(None),
        (told("passthrough broke off"),),
        failures("truncated"),
    ),
    Row(
        "passthrough_500",
        "Passed through: the engine answers 5xx, which the client gets as it is",
        Refused(500, None),
        (told("engine's error passed through", status=500),),
        failures("status"),
    ),
]

CLIENTS = [
    Row(
        "leaves",
        "The client leaves",
        Gone(),
        (told("generation", outcome="cancelled"),),
        ended("cancelled"),
    ),
    Row(
        "stops_reading",
        "The client takes nothing from its answer (`timeouts.client`)",
        Cut(),
        (
            told("the client takes nothing from its answer"),
            told("generation", outcome="cancelled"),
        ),
        ended("cancelled"),
    ),
    _own_refusal("body_too_large", "A body over `limits.body_mib`", 413, "body_too_large"),
    _own_refusal(
        "body_too_slow", "A body that does not come (`timeouts.client`)", 408, "request_timeout"
    ),
    Row(
        "body_broken",
        "A body whose encoding or length is wrong",
        Refused(400, None),
        (_request_failed(400, None),),
        refused("bad_request"),
    ),
    Row(
        "no_http",
        "What is no HTTP request",
        Refused(400, "bad_http"),
        (told("request refused", status=400),),
        refused("bad_http"),
    ),
    _own_refusal("wrong_key", "A missing or wrong API key", 401, "invalid_api_key"),
    _own_refusal("not_for_this_key", "A policy that the key may not use", 404, "model_not_found"),
    _own_refusal(
        "too_many", "More than `limits.generations`, and no queue", 429, "too_many_generations"
    ),
    _own_refusal(
        "too_many_for_key",
        "More than the key's `generations`",
        429,
        "too_many_generations_for_key",
    ),
    _own_refusal("queue_full", "More wait than `limits.queue`", 429, "queue_full"),
    _own_refusal("queue_timeout", "No room within `limits.queue_seconds`", 429, "queue_timeout"),
]

GATEWAY = [
    Row(
        "bad_policy",
        "A policy file is broken: the old policy stays",
        UNBROKEN,
        (told("policy refused", old_one_stays=True),),
        {"relaygen_refused_files": 1},
    ),
    Row(
        "bad_settings",
        "The settings file is broken: the old settings stay",
        UNBROKEN,
        (told("settings refused", old_ones_stay=True),),
        {"relaygen_refused_files": 1},
    ),
    _own_refusal("shutting_down", "A request while the gateway shuts down", 503, "shutting_down"),
    Row(
        "internal_error",
        "A bug of the gateway, before the reply; the message has the request id",
        Refused(500, "internal_error"),
        (told("internal error"),),
        {"relaygen_internal_errors_total": 1, **FAILED},
    ),
    Row(
        "internal_error_in_stream",
        "A bug of the gateway, within the reply",
        Cut(),
        (told("internal error"), told("generation", outcome="failed")),
        {"relaygen_internal_errors_total": 1, **FAILED},
    ),
]

ROWS = [*ENGINES, *CLIENTS, *GATEWAY]


def table() -> str:
    """As docs/operations.md has it."""
    lines = ["| fault | the client sees | the log | counted |", "|---|---|---|---|"]
    lines += [
        f"| {row.fault} | {row.seen} | {_joined(row.log)} | {_joined(map(_sample, row.counted))} |"
        for row in ROWS
    ]
    return "\n".join(lines) + "\n"


def _joined(parts: Any) -> str:
    return "<br>".join(map(str, parts)) or "-"


def _sample(name: str) -> str:
    return f"`{name.removeprefix('relaygen_')}`"
