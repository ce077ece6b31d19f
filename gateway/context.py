"""What all handlers share."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from gateway import metrics
from gateway.admission import Admission
from gateway.backends import Replica, ReplicaSet
from gateway.errors import RequestError, UpstreamError, model_not_found
from gateway.generation import Relaying
from gateway.keys import Key, KeyStore
from gateway.pairs import status
from gateway.policies import PolicyStore
from gateway.settings import Settings
from gateway.shadow import Shadow
from relaygen.events import Role
from relaygen.policy import Policy

log = structlog.get_logger()

_LOOK_S = 2.0
_MEASURE_S = 1.0


@dataclass(slots=True)
class Gateway:
    """`settings` and `backends` change when settings are read again."""

    settings: Settings
    policies: PolicyStore
    backends: Mapping[str, ReplicaSet]
    keys: KeyStore
    admission: Admission
    relaying: Relaying
    shadow: Shadow = field(default_factory=Shadow)
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

    def policy(self, name: str) -> Policy | None:
        """The policy to serve a model name by; None where it is none of ours.

        Raises UpstreamError (503) where the name stands for policies of which none is loaded.
        """
        known, public = self.policies.by_name, self.settings.models.get(name)
        if public is None:
            return known.get(name)
        weights = {policy: w for policy, w in public.weights.items() if policy in known}
        if not weights:
            raise UpstreamError(
                f"The model {name!r} stands for policies that are not loaded: "
                f"{', '.join(public.weights)}; see models.{name}.weights in the settings",
                status=503,
            )
        return known[random.choices(list(weights), list(weights.values()))[0]]

    def public_models(self) -> dict[str, dict[str, object]]:
        """By name: whether it can be served, and the policies that are missing, for /readyz."""
        known = self.policies.by_name
        return {
            name: {
                "ready": not known.keys().isdisjoint(public.weights),
                "weights": public.weights,
                "missing": [policy for policy in public.weights if policy not in known],
            }
            for name, public in self.settings.models.items()
        }

    async def states(self) -> dict[str, dict[str, object]]:
        """By policy: whether it can be served, by which handoff and why."""
        policies = dict(self.policies.by_name)
        found = await asyncio.gather(*(status(p, self.backends) for p in policies.values()))
        return dict(zip(policies, found, strict=True))

    def speeds(self, policy: str) -> dict[str, object]:
        """What was measured of a policy's models, for /readyz."""
        pace = self.relaying.paces[policy]
        known = {role: pace.token_seconds(role) for role in Role}
        told = {role: round(s * 1e3, 3) for role, s in known.items() if s is not None}
        return {"token_ms": told, "small_held": pace.slower}

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
        metrics.load(self.admission.taken, self.admission.waiting)
        for name, backend in self.backends.items():
            metrics.replicas(name, Counter(replica.state for replica in backend.replicas))
        metrics.refused_files(len({**self.refused, **self.policies.problems}))
        for policy, pace in self.relaying.paces.items():
            metrics.small_held(policy, pace.slower)
        for served in self.policies.by_name.values():
            metrics.calibrated_share(served)

    def serving(self, model: str) -> list[Replica]:
        """The replicas that serve a model, the best to ask first."""
        found = (backend.serving(model) for backend in self.backends.values())
        return next((replicas for replicas in found if replicas), [])

    def served_names(self, key: Key) -> list[str]:
        """Policies first, then the models that are up: those that the key may use."""
        models = [name for backend in self.backends.values() for name in backend.models()]
        ours = [*self.settings.models, *self.policies.by_name]
        return key.seen(dict.fromkeys([*ours, *models]))

    def not_found(self, model: str, key: Key) -> RequestError:
        """The same for a model that is not there and for one that the key may not use."""
        return model_not_found(model, self.served_names(key))


GATEWAY = web.AppKey("gateway", Gateway)
REQUEST_ID = web.RequestKey("request_id", str)
ANSWERED = web.RequestKey("answered", bool)
MODE = web.RequestKey("mode", str)
QUEUED_S = web.RequestKey("queued_s", float)
