"""What all handlers share."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import structlog
from aiohttp import web
from pydantic import SecretStr

from gateway import metrics
from gateway.backends import ReplicaSet
from gateway.errors import RequestError, UpstreamError
from gateway.pairs import status
from gateway.policies import PolicyStore
from gateway.settings import Limits, Settings

log = structlog.get_logger()

_LOOK_S = 2.0
_MEASURE_S = 1.0


class Slots:
    """Counts the generations that run; refuses one too many and tells when none is left."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle = asyncio.Event()
        self._idle.set()
        self.taken = 0
        self.waiting = 0
        self.closed = False

    def replace(self, limits: Limits) -> None:
        """Other limits, for those who come from now on."""
        self._limit = limits.generations

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        if self.closed:
            raise UpstreamError(
                "This gateway is shutting down; try again",
                status=503,
                type="server_error",
                code="shutting_down",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        if self.taken + count > self._limit:
            raise RequestError(
                f"{self.taken} generations are running, and limits.generations allows "
                f"{self._limit}; try again later",
                status=429,
                type="rate_limit_error",
                code="too_many_generations",
                headers={"Retry-After": "1"},
            )
        self.taken += count
        self._idle.clear()
        try:
            yield
        finally:
            self.taken -= count
            if not self.taken:
                self._idle.set()

    async def drain(self, seconds: float) -> int:
        """Takes no more, waits until none runs, `seconds` at most; returns how many still do."""
        self.closed = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self.taken


class ApiKeys:
    """Bearer tokens of the clients; none means that everybody may call."""

    def __init__(self, keys: Iterable[SecretStr]) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[SecretStr]) -> None:
        """Other keys, for requests that come from now on."""
        self._keys = [key.get_secret_value().encode() for key in keys]

    def check(self, authorization: str) -> None:
        """Raises RequestError (401) for a token that is none of ours, in constant time."""
        if not self._keys:
            return
        scheme, _, token = authorization.partition(" ")
        known = 0
        for key in self._keys:  # all of them, whichever fits
            known |= hmac.compare_digest(token.encode(errors="surrogateescape"), key)
        if not known or scheme.lower() != "bearer":
            raise RequestError(
                "Missing or wrong API key; send `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )


@dataclass(slots=True)
class Gateway:
    """`settings` and `backends` change when settings are read again."""

    settings: Settings
    policies: PolicyStore
    backends: Mapping[str, ReplicaSet]
    keys: ApiKeys
    slots: Slots
    started: int = field(default_factory=lambda: int(time.time()))
    refused: dict[str, list[str]] = field(default_factory=dict)
    """By file: why its present content is not in force."""

    def backend(self, name: str, policy: str) -> ReplicaSet:
        try:
            return self.backends[name]
        except KeyError:
            raise UpstreamError(
                f"Policy {policy!r} names backend {name!r}, which the settings do not have; "
                f"known: {', '.join(self.backends)}",
                status=503,
            ) from None

    async def states(self) -> dict[str, dict[str, object]]:
        """By policy: whether it can be served, by which handoff and why."""
        policies = dict(self.policies.by_name)
        found = await asyncio.gather(*(status(p, self.backends) for p in policies.values()))
        return dict(zip(policies, found, strict=True))

    async def watch(self) -> None:
        """Tells in the log whenever what can be served changes. Runs until cancelled."""
        told: dict[str, dict[str, object]] = {}
        while True:
            states = await self.states()
            for name, state in states.items():
                if told.get(name) != state:
                    level = log.info if state["ready"] and "notes" not in state else log.warning
                    level(
                        "policy can be served" if state["ready"] else "policy can't be served",
                        policy=name,
                        **state,
                    )
            told = states
            await asyncio.sleep(_LOOK_S)

    async def measure(self) -> None:
        """Keeps the gauges up to date, for a scrape that another worker answers."""
        while True:
            self.measured()
            await asyncio.sleep(_MEASURE_S)

    def measured(self) -> None:
        """Brings the gauges up to date."""
        metrics.load(self.slots.taken, self.slots.waiting)
        for name, backend in self.backends.items():
            metrics.replicas(name, Counter(replica.state for replica in backend.replicas))

    def served_names(self) -> list[str]:
        """Policies first, then the models that are up."""
        models = [name for backend in self.backends.values() for name in backend.models()]
        return list(dict.fromkeys([*self.policies.by_name, *models]))


GATEWAY = web.AppKey("gateway", Gateway)
REQUEST_ID = web.RequestKey("request_id", str)
ANSWERED = web.RequestKey("answered", bool)
MODE = web.RequestKey("mode", str)
