"""What the gateway counts of itself, in Prometheus' formats, over all its processes.

Workers count in files of one folder (PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads when
it is imported); whichever is asked adds them up. All label values come from the settings, from
policies or from the lists below, so the number of series is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.errors import Cause, GatewayError
from gateway.extra import Extra
from relaygen.usage import Usage

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
To = Literal["replica", "same", "role"]
State = Literal["up", "down", "open", "draining"]
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 1.0)
_NO_EXTRA = Extra()
# From a handoff over loopback to one that waits for a long prefill.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The collectors of one process."""

    def __init__(self) -> None:
        # Else a series more for each counter, that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.generations = Counter(
            "relaygen_generations_total",
            "Relayed generations that ended, by how.",
            ("policy", "outcome"),
            registry=registry,
        )
        self.resumes = Counter(
            "relaygen_resumes_total",
            "Decodes that broke and were gone on with elsewhere, by where and why.",
            ("policy", "role", "to", "cause"),
            registry=registry,
        )
        self.failures = Counter(
            "relaygen_upstream_failures_total",
            "Calls of engines that failed, by why.",
            ("backend", "cause"),
            registry=registry,
        )
        self.refused = Counter(
            "relaygen_refused_total",
            "Requests that the gateway itself refused, by the code of its error.",
            ("code",),
            registry=registry,
        )
        self.internal = Counter(
            "relaygen_internal_errors_total",
            "Requests that a bug of the gateway's own broke; the log has each with its traceback.",
            registry=registry,
        )
        self.tokens = Counter(
            "relaygen_tokens_total",
            "Tokens kept in generations, by the role that decoded them.",
            ("policy", "role"),
            registry=registry,
        )
        self.discarded = Counter(
            "relaygen_discarded_tokens_total",
            "Tokens decoded by engines and not kept.",
            ("policy",),
            registry=registry,
        )
        self.handoff = Histogram(
            "relaygen_handoff_seconds",
            "From the last token of a segment to the first of the next one, by who writes that.",
            ("policy", "to"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.overlaps = Counter(
            "relaygen_overlaps_total",
            "Segments that were begun before it was sure that they come: used, or dropped.",
            ("policy", "outcome"),
            registry=registry,
        )
        self.warm_ups = Counter(
            "relaygen_warm_ups_total",
            "Requests that had the waiting engine read what the other one wrote: done, or cut.",
            ("policy", "outcome"),
            registry=registry,
        )
        self.extra = Counter(
            "relaygen_extra_tokens_total",
            "Tokens decoded in overlaps that were dropped and in warm-ups.",
            ("policy",),
            registry=registry,
        )
        self.efficiency = Histogram(
            "relaygen_generation_efficiency",
            "Of a whole generation: the time that its engines alone would take over its own, 0..1.",
            ("policy",),
            buckets=_SHARES,
            registry=registry,
        )
        self.in_flight = Gauge(
            "relaygen_in_flight",
            "Generations that run now.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.queued = Gauge(
            "relaygen_queued",
            "Generations that wait for their turn.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        # Each worker looks at the same replicas: a sum would count them once for each.
        self.replicas = Gauge(
            "relaygen_replicas",
            "Replicas of a backend in each state; of several workers, the most that one sees.",
            ("backend", "state"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.refused_files = Gauge(
            "relaygen_refused_files",
            "Policies and settings whose present content is not in force; the most of a worker.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.small_held = Gauge(
            "relaygen_small_held",
            "1 while a policy's small model is not used; of several workers, by any.",
            ("policy",),
            registry=registry,
            multiprocess_mode="livemax",
        )


@lru_cache(maxsize=1)
def _metrics() -> Metrics:
    return Metrics()


# ---- what happens -------------------------------------------------------------------------------


def generation(
    policy: str,
    outcome: str,
    usage: Usage,
    handoff_ms: Iterable[tuple[str, float]] = (),
    efficiency: float | None = None,
    extra: Extra = _NO_EXTRA,
) -> None:
    """A relayed generation ended: done, failed or cancelled."""
    found = _metrics()
    found.generations.labels(policy, outcome).inc()
    found.tokens.labels(policy, "large").inc(usage.large_tokens)
    found.tokens.labels(policy, "small").inc(usage.small_tokens)
    found.discarded.labels(policy).inc(usage.discarded_tokens)
    for role, milliseconds in handoff_ms:
        found.handoff.labels(policy, role).observe(milliseconds / 1e3)
    found.overlaps.labels(policy, "used").inc(extra.overlaps)
    found.overlaps.labels(policy, "dropped").inc(extra.overlaps_dropped)
    found.warm_ups.labels(policy, "done").inc(extra.warm_ups - extra.warm_ups_cut)
    found.warm_ups.labels(policy, "cut").inc(extra.warm_ups_cut)
    found.extra.labels(policy).inc(extra.tokens)
    if efficiency is not None:
        found.efficiency.labels(policy).observe(efficiency)


def never_began(policy: str, choices: int) -> None:
    """No engine could be had for a request: so many generations failed before their first."""
    _metrics().generations.labels(policy, "failed").inc(choices)


def resumed(policy: str, role: str, to: To, cause: Cause) -> None:
    """A decode of `role` broke and is gone on with."""
    _metrics().resumes.labels(policy, role, to, cause).inc()


def upstream_failed(backend: str, cause: Cause) -> None:
    _metrics().failures.labels(backend, cause).inc()


def answered(error: GatewayError) -> None:
    """An error went to a client: counted where it is the gateway's own refusal."""
    if not error.engines and (error.status < 500 or error.status == 503):
        refused(str(error.code or _named(error.status)))


def refused(code: str) -> None:
    """`code`: one of our own, never an engine's or a client's."""
    _metrics().refused.labels(code).inc()


def internal_error() -> None:
    _metrics().internal.inc()


def _named(status: int) -> str:
    try:
        return HTTPStatus(status).name.lower()
    except ValueError:
        return "other"


# ---- what is so now -----------------------------------------------------------------------------


def load(in_flight: int, queued: int) -> None:
    """Generations of this process."""
    _metrics().in_flight.set(in_flight)
    _metrics().queued.set(queued)


def replicas(backend: str, counts: Mapping[State, int]) -> None:
    """How many replicas of a backend are in each state."""
    for state in get_args(State):
        _metrics().replicas.labels(backend, state).set(counts.get(state, 0))


def refused_files(count: int) -> None:
    """How many files' present content is not in force."""
    _metrics().refused_files.set(count)


def small_held(policy: str, held: bool) -> None:
    """Whether the policy's small model is not used for now."""
    _metrics().small_held.labels(policy).set(held)


# ---- scrapes ------------------------------------------------------------------------------------


def rendered(accept: str) -> tuple[bytes, str]:
    """All metrics, and their content type: the one that the scraper accepts, text for others."""
    encode, content_type = choose_encoder(accept)
    return encode(_registry()), content_type


def _registry() -> CollectorRegistry:
    own = _metrics().registry
    if FOLDER not in os.environ:
        return own
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
