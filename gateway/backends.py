"""Backends: the replicas that serve one model, which of them are up, and which one to take."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog

from gateway import metrics
from gateway.connections import Connections
from gateway.engines.base import Engine, EngineInfo, Identity
from gateway.engines.detect import detect
from gateway.errors import BusyError, GatewayError, RequestError, UnreachableError, UpstreamError
from gateway.health import Health
from gateway.metrics import State
from gateway.settings import Backend, HealthSettings
from gateway.tls import client_context
from gateway.upstream import Upstream

log = structlog.get_logger()

_RETRY_S = 1.0
_CHECK_S = 5.0
_LATELY_S = 5.0


class Replica:
    """One base URL of a backend: probed when first needed, watched in the background."""

    def __init__(
        self,
        upstream: Upstream,
        settings: Backend,
        probe_s: float,
        health: HealthSettings,
        *,
        name: str,
        given: str,
    ) -> None:
        self.upstream = upstream
        self._name = name
        self.given = given
        """The URL as the settings have it."""
        self._settings = settings
        self._probe_s = probe_s
        self._down_since: float | None = None
        self.health = Health(health)
        self.draining = False
        """Whether it is given nothing new."""
        self.active = 0
        """Requests that run on it now, as far as this process knows."""
        self._identity: Identity | None = None
        self._probing: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self.info: EngineInfo | None = None
        self.served: tuple[str, ...] = ()
        """Models that it serves, or did when it was last up."""
        self.error: str | None = "not probed yet"

    @property
    def url(self) -> str:
        return self.upstream.url

    def same(self, settings: Backend) -> bool:
        """Whether these settings say the same of the engine."""
        ours = {"urls": (), "draining": ()}
        return self._settings.model_copy(update=ours) == settings.model_copy(update=ours)

    @property
    def state(self) -> State:
        if self.draining:
            return "draining"
        if self.info is None:
            return "down"
        return "open" if self.health.open else "up"

    @property
    def lately_up(self) -> bool:
        """Whether it is up, or was a moment ago, and so may be again in another."""
        since = self._down_since
        return self.info is not None or (since is not None and time.monotonic() - since < _LATELY_S)

    @property
    def load(self) -> float:
        """What it has to do, for what it should have to do."""
        return (self.active + 1) / self.health.share

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self.taken()
        try:
            yield
        finally:
            self.left()

    def taken(self) -> None:
        self.active += 1
        self.health.chosen()

    def left(self) -> None:
        self.active -= 1

    def wire_model(self, model: str) -> str:
        """The model's name as the engine wants it in a request."""
        return self._engine.wire_model(model) if self._engine else model

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request that the engine serves whole, as it wants it."""
        return self._engine.whole(body) if self._engine else body

    def abandon(self, body: Mapping[str, Any]) -> None:
        """A request that it served whole was left before its end."""
        if self._engine is not None:
            self._engine.abandon(body)

    async def ready(self) -> tuple[Engine, EngineInfo]:
        """The engine behind the URL. Raises UpstreamError while it can't be used.

        Whoever waits for a probe waits for the same one.
        """
        if self.info is None:
            await self._probed()
        assert self._engine is not None and self.info is not None
        return self._engine, self.info

    async def _probed(self) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
            self._probing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._probing)

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(self._probe_s):
                await self._learn()
        except TimeoutError:
            self.error = (
                f"The engine at {self.url} did not answer within {self._probe_s:g} s "
                "(timeouts.probe)"
            )
            raise UpstreamError(self.error, status=504, code="engine_timeout") from None
        except (RequestError, BusyError) as error:  # a refusal of our probe, not of the client
            self.error = f"The server at {self.url} refused the probe: {error.message}"
            raise UpstreamError(self.error) from error
        except UpstreamError as error:
            self.error = error.message
            raise
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            self.error = (
                f"The server at {self.url} does not answer like {self._settings.engine}: {error!r}"
            )
            raise UnreachableError(self.error) from error

    async def _learn(self) -> None:
        """Asks who the server is, and, when that is new, all the rest."""
        engine = self._engine
        if self.info is not None and engine is not None:
            identity = await engine.identify()
            if identity == self._identity:
                return
        engine = await detect(self.upstream, self._settings)
        identity = await engine.identify()
        if self._engine is not None and identity == self._identity:
            engine = self._engine  # back again: what was learned of it, and its load, still hold
        info = await engine.probe(identity)
        self._engine, self._identity = engine, identity
        self.info, self.error, self.served = info, None, info.models
        if self._down_since is not None:
            self.health.came_back()
        log.info("engine up", url=self.url, **_told(info))

    async def watch(self) -> None:
        """Notices when the server comes up, goes down or changes. Runs until cancelled."""
        while True:
            try:
                await self._probed()
            except GatewayError as error:
                self.mark_down(error)
            await asyncio.sleep(_RETRY_S if self.info is None else _CHECK_S)

    def mark_down(self, error: GatewayError) -> None:
        """Probe anew before it is used again."""
        if self.info is not None:
            self._down_since = time.monotonic()
            log.warning("engine down", url=self.url, error=error.message)
        self.info, self.error = None, error.message

    def failed(self, error: UpstreamError) -> None:
        """A request to it did. One that only took too long in all is not its fault."""
        if error.code == "reply_timeout":
            return
        metrics.upstream_failed(self._name, error.cause)
        match error:
            case UnreachableError():
                self.mark_down(error)
            case BusyError():
                self.health.asked_for_patience(error.retry_after)
            case _:
                if seconds := self.health.failed():
                    log.warning("breaker open", url=self.url, seconds=seconds, error=error.message)

    def succeeded(self) -> None:
        """A request to it did."""
        if self.health.succeeded():
            log.info("breaker closed", url=self.url)

    def told(self, status: int) -> None:
        """A request that it served whole was answered so: the client gets that as it is.

        A 5xx may be the request's own fault, so it is counted and the breaker left alone.
        """
        if status < 500:
            return
        metrics.upstream_failed(self._name, "status")
        log.warning("engine's error passed through", url=self.url, status=status)

    def status(self) -> dict[str, Any]:
        """For /readyz."""
        if self.info is None:
            return {"url": self.url, "up": False, "state": self.state, "error": self.error}
        assert self._engine is not None
        learned = {"max_logprobs": self._engine.max_logprobs, "tokens": self._engine.counts}
        now = {"state": self.state, "active": self.active}
        return {"url": self.url, "up": True, **now, **_told(self.info), **learned}


def _told(info: EngineInfo) -> dict[str, Any]:
    """What the probe learned, for /readyz and the log."""
    return {
        "engine": info.dialect,
        "version": info.version,
        "models": info.models,
        "context": info.context,
        "vocabulary": info.vocabulary,
        "ids": info.ids,
        "max_logprobs": info.max_logprobs,
        "bos": info.bos,
        "continuation": info.continuation,
    }


class ReplicaSet:
    """All replicas of one backend."""

    def __init__(
        self,
        name: str,
        settings: Backend,
        connections: Connections,
        probe_s: float,
        health: HealthSettings,
    ) -> None:
        self.name = name
        self._connections = connections
        self._probe_s = probe_s
        self._health = health
        self.replicas: list[Replica] = []
        self.update(settings)

    def update(self, settings: Backend) -> None:
        """Takes new settings. What runs on a URL that is gone, or is draining, runs on.

        SettingsError for a bad `ca`, and then nothing has changed.
        """
        known = {replica.given: replica for replica in self.replicas if replica.same(settings)}
        tls = client_context(self.name, settings.ca)
        new = {url: self._replica(url, settings, tls) for url in settings.urls if url not in known}
        self.replicas = [known.get(url) or new[url] for url in settings.urls]
        for replica in self.replicas:
            replica.draining = replica.given in settings.draining

    def _replica(self, url: str, settings: Backend, tls: ssl.SSLContext | None) -> Replica:
        upstream = _upstream(self._connections, self.name, url, settings, tls)
        return Replica(upstream, settings, self._probe_s, self._health, name=self.name, given=url)

    async def choose(self, avoid: Collection[str] = (), model: str | None = None) -> Replica:
        """The best replica that is up, one of the URLs to `avoid` only if all others fail.

        With a `model`, one that serves it, if any does. Raises the last one's UpstreamError if none
        is up.
        """
        ordered = self.ranked(avoid)
        other: Replica | None = None
        failed: UpstreamError | None = None
        for replica in ordered:
            try:
                _, info = await replica.ready()
            except UpstreamError as error:
                error.engine = replica.url
                failed = error
                continue
            if model is None or info.serves(model):
                return replica
            other = other or replica
        if other is not None:
            return other
        assert failed is not None, "a backend has at least one URL"
        raise failed

    @property
    def urls(self) -> set[str]:
        return {replica.url for replica in self.replicas}

    def models(self) -> list[str]:
        """Models served now."""
        return [model for replica in self.replicas if replica.info for model in replica.served]

    def serving(self, model: str) -> list[Replica]:
        """The replicas that serve a model, the best to ask first."""
        return [replica for replica in self.ranked() if model in replica.served]

    def ranked(self, avoid: Collection[str] = ()) -> list[Replica]:
        """All replicas, the best to take first; a broken or draining one is better than none."""
        return sorted(
            self.replicas,
            key=lambda r: (
                r.url in avoid,
                r.info is None,
                r.draining,
                r.health.open,
                r.health.busy,
                r.load,
            ),
        )

    def others(self, avoid: Collection[str]) -> list[Replica]:
        """Those that can go on where one of the URLs to `avoid` could not, the best first."""
        return [r for r in self.ranked() if r.info is not None and r.url not in avoid]

    def beyond(self, avoid: Collection[str]) -> bool:
        """Whether there is any other than the URLs to `avoid`."""
        return any(replica.url not in avoid for replica in self.replicas)

    @property
    def lately_up(self) -> bool:
        return any(replica.lately_up for replica in self.replicas)

    @property
    def up(self) -> bool:
        """Whether any replica is, and its breaker lets at least a trial through."""
        return any(r.info is not None and not r.health.resting for r in self.replicas)


def _upstream(
    connections: Connections,
    name: str,
    url: str,
    settings: Backend,
    tls: ssl.SSLContext | None,
) -> Upstream:
    bare = settings.engine == "openai" and not url.endswith("/v1")
    key = settings.api_key.get_secret_value() if settings.api_key else None
    return Upstream(connections, url.removesuffix("/v1"), key, name=name, bare=bare, tls=tls)
