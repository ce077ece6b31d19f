"""What the gateway counts of itself, in Prometheus' formats, over all its processes.

Workers count in files of one folder (PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads when
it is imported); whichever is asked adds them up. All label values come from the settings, from
policies or from the lists below, so the number of series is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Literal, get_args

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
from gateway.observed import GAP_EDGES, Gaps, Observed
from gateway.spent import Spent
from relaygen.events import Role
from relaygen.policy import Policy
from relaygen.state import Trigger
from relaygen.usage import Usage

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
To = Literal["replica", "same", "role"]
State = Literal["up", "down", "open", "draining"]
_EFFICIENCIES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 1.0)
_SHARES = tuple(step / 10 for step in range(1, 11))
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
# From a handoff over loopback to one that waits for a long prefill.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class _GapHistogram(Histogram):
    """Takes what was counted while a generation ran: one call for all its tokens."""

    def add(self, gaps: Gaps) -> None:
        if not any(gaps.counts):
            return
        self._sum.inc(gaps.seconds)
        for bucket, count in zip(self._buckets, gaps.counts, strict=True):
            if count:
                bucket.inc(count)


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
            "Tokens kept in generations, by the role that decoded them and what they belong to.",
            ("policy", "role", "phase"),
            registry=registry,
        )
        self.first_token = Histogram(
            "relaygen_time_to_first_token_seconds",
            "From a request to the first text of a generation, the wait for its turn included.",
            ("policy",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "relaygen_generation_seconds",
            "From a request's turn to the end of a generation.",
            ("policy",),
            buckets=_LONG_S,
            registry=registry,
        )
        self.gaps = _GapHistogram(
            "relaygen_inter_token_seconds",
            "Between two tokens of a decode, as they come from the engine.",
            ("policy", "role"),
            buckets=GAP_EDGES,
            registry=registry,
        )
        self.segments = Histogram(
            "relaygen_segment_tokens",
            "Length of the segments: kept tokens that one role wrote in one go.",
            ("policy", "role"),
            buckets=_LENGTHS,
            registry=registry,
        )
        self.handoffs = Counter(
            "relaygen_handoffs_total",
            "Handoffs, by who goes on, why, and the cue where one was the cause.",
            ("policy", "to", "trigger", "cue"),
            registry=registry,
        )
        self.large_share = Histogram(
            "relaygen_large_share",
            "Of a whole generation: the share of its tokens that the large model decoded, 0..1.",
            ("policy",),
            buckets=_SHARES,
            registry=registry,
        )
        self.calibrated_share = Gauge(
            "relaygen_calibrated_large_share",
            "Share of the large model that a policy's calibration expects, 0..1.",
            ("policy",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.sent = Counter(
            "relaygen_sent_tokens_total",
            "Tokens of prompts and of what was written so far, sent to engines to go on from.",
            ("policy", "role"),
            registry=registry,
        )
        self.prefilled = Counter(
            "relaygen_prefill_tokens_total",
            "Of what engines were sent: tokens that they had to read, as far as they tell.",
            ("policy", "role"),
            registry=registry,
        )
        self.cached = Counter(
            "relaygen_cached_tokens_total",
            "Of what engines were sent: tokens that were in their prefix caches, as far as told.",
            ("policy", "role"),
            registry=registry,
        )
        self.phases = Counter(
            "relaygen_phase_seconds_total",
            "Where the time of generations went.",
            ("policy", "phase"),
            registry=registry,
        )
        self.upstream = Counter(
            "relaygen_upstream_requests_total",
            "Requests to engines, probes with them: how they went, by status or cause of failure.",
            ("backend", "outcome", "code"),
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
        self.shadows = Counter(
            "relaygen_shadows_total",
            "Relayed requests answered by the large model as well: does the final answer agree?",
            ("policy", "outcome"),
            registry=registry,
        )
        self.shadow_time = Counter(
            "relaygen_shadow_seconds_total",
            "Time of the requests that were compared, as relayed and by the large model alone.",
            ("policy", "by"),
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
            buckets=_EFFICIENCIES,
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
    policy: Policy, outcome: str, usage: Usage, seen: Observed, spent: Spent, extra: Extra
) -> None:
    """A relayed generation ended: done, failed or cancelled."""
    name = policy.name
    _add("generations", 1, name, outcome)
    _tokens(name, usage, seen)
    _times(name, seen, spent)
    _segments(policy, seen)
    _extra(name, extra)
    if (efficiency := spent.efficiency(usage)) is not None:
        _child("efficiency", name).observe(efficiency)
    if usage.completion_tokens:
        _child("large_share", name).observe(usage.large_utilization)


@lru_cache(maxsize=4096)
def _child(metric: str, *labels: str) -> Any:
    """One series. Finding it by its labels takes longer than all else."""
    return getattr(_metrics(), metric).labels(*labels)


def _add(metric: str, amount: float, *labels: str) -> None:
    """The series is there from its first mention on, so that its first increase is seen."""
    child = _child(metric, *labels)
    if amount:
        child.inc(amount)


def _tokens(name: str, usage: Usage, seen: Observed) -> None:
    kept = {
        Role.LARGE: (usage.large_tokens, usage.large_reasoning),
        Role.SMALL: (usage.small_tokens, usage.small_reasoning),
    }
    for role, (tokens, reasoning) in kept.items():
        _add("tokens", reasoning, name, role, "reasoning")
        _add("tokens", tokens - reasoning, name, role, "answer")
        _add("sent", seen.sent[role], name, role)
        _add("prefilled", seen.prefilled[role], name, role)
        _add("cached", seen.cached[role], name, role)
    _add("discarded", usage.discarded_tokens, name)


def _times(name: str, seen: Observed, spent: Spent) -> None:
    if seen.first_at is not None:
        _child("first_token", name).observe(spent.since_asked(seen.first_at))
    if spent.lasted:
        _child("duration", name).observe(spent.prepare + spent.lasted)
    for role, milliseconds in seen.times.values:
        _child("handoff", name, role).observe(milliseconds / 1e3)
    for role, gaps in seen.gaps.items():
        _child("gaps", name, role).add(gaps)
    for phase, seconds in spent.phases():
        _add("phases", seconds, name, phase)


def _segments(policy: Policy, seen: Observed) -> None:
    for segment in seen.segments:
        _child("segments", policy.name, segment.role).observe(segment.tokens)
    for _, handoff in seen.handoffs:
        # Only a policy's own words are labels.
        by_cue = handoff.trigger is Trigger.CUE and handoff.text in policy.cues.words
        cue = handoff.text if by_cue else ""
        _add("handoffs", 1, policy.name, handoff.target, handoff.trigger, cue)


def _extra(name: str, extra: Extra) -> None:
    _add("overlaps", extra.overlaps, name, "used")
    _add("overlaps", extra.overlaps_dropped, name, "dropped")
    _add("warm_ups", extra.warm_ups - extra.warm_ups_cut, name, "done")
    _add("warm_ups", extra.warm_ups_cut, name, "cut")
    _add("extra", extra.tokens, name)


def shadow(policy: str, outcome: Literal["agrees", "differs", "failed", "skipped"]) -> None:
    """A request that was to be answered by the large model as well."""
    _metrics().shadows.labels(policy, outcome).inc()


def shadow_seconds(policy: str, relayed: float, alone: float) -> None:
    """What the request took either way, first decode to end."""
    _metrics().shadow_time.labels(policy, "relay").inc(relayed)
    _metrics().shadow_time.labels(policy, "large").inc(alone)


def never_began(policy: str, choices: int) -> None:
    """No engine could be had for a request: so many generations failed before their first."""
    _metrics().generations.labels(policy, "failed").inc(choices)


def resumed(policy: str, role: str, to: To, cause: Cause) -> None:
    """A decode of `role` broke and is gone on with."""
    _metrics().resumes.labels(policy, role, to, cause).inc()


def upstream_answered(backend: str, status: int) -> None:
    """An engine answered a request."""
    outcome = "answered" if status < 400 else "refused" if status < 500 else "failed"
    _add("upstream", 1, backend, outcome, str(status))


def upstream_unanswered(backend: str, cause: Cause) -> None:
    """A request to an engine had no answer."""
    _add("upstream", 1, backend, "failed", cause)


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


def calibrated_share(policy: Policy) -> None:
    """What the policy's calibration expects; nothing where it says nothing."""
    share = policy.expected_large_share
    if share is not None:
        _metrics().calibrated_share.labels(policy.name).set(share)


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
