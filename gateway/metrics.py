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

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.collectors import Metrics
from gateway.errors import Cause, GatewayError
from gateway.extra import Extra
from gateway.observed import Observed
from gateway.spent import Spent
from relaygen.events import Role
from relaygen.policy import Policy
from relaygen.state import Trigger
from relaygen.usage import Usage

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
To = Literal["replica", "same", "role"]
State = Literal["up", "down", "open", "draining"]


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
