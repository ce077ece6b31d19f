"""What is counted: the collectors of a process, with their names, labels and help texts."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

from gateway.observed import GAP_EDGES, Gaps

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
