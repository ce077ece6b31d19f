"""Backends: the replicas that serve one model, which of them are up, and which one to take."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection
from typing import Any

import structlog
from aiohttp import ClientSession

from gateway.engines.base import Engine, EngineInfo, Identity
from gateway.engines.detect import detect
from gateway.errors import GatewayError, RequestError, UnreachableError, UpstreamError
from gateway.metrics import State
from gateway.settings import Backend
from gateway.tls import client_context
from gateway.upstream import Upstream

log = structlog.get_logger()

_RETRY_S = 1.0
_CHECK_S = 5.0


class Replica:
    """One base URL of a backend: probed when first needed, watched in the background."""

    def __init__(self, upstream: Upstream, settings: Backend, probe_s: float) -> None:
        self.upstream = upstream
        self._settings = settings
        self._probe_s = probe_s
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

    @property
    def state(self) -> State:
        return "down" if self.info is None else "up"

    @property
    def active(self) -> int:
        return self._engine.active if self._engine else 0

    def wire_model(self, model: str) -> str:
        """The model's name as the engine wants it in a request."""
        return self._engine.wire_model(model) if self._engine else model

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request that the engine serves whole, as it wants it."""
        return self._engine.whole(body) if self._engine else body

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
        except UpstreamError as error:
            self.error = error.message
            raise
        except RequestError as error:  # the server's refusal of our probe, not of the client
            self.error = f"The server at {self.url} refused the probe: {error.message}"
            raise UpstreamError(self.error) from error
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
            log.warning("engine down", url=self.url, error=error.message)
        self.info, self.error = None, error.message

    def status(self) -> dict[str, Any]:
        """For /readyz."""
        if self.info is None:
            return {"url": self.url, "up": False, "error": self.error}
        assert self._engine is not None
        learned = {"max_logprobs": self._engine.max_logprobs, "tokens": self._engine.counts}
        return {"url": self.url, "up": True, **_told(self.info), **learned}


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
        self, name: str, settings: Backend, session: ClientSession, probe_s: float
    ) -> None:
        self.name = name
        self._session = session
        self._probe_s = probe_s
        self._made: dict[str, Replica] = {}
        self._settings: Backend | None = None
        self.replicas: list[Replica] = []
        self.update(settings)

    def update(self, settings: Backend) -> None:
        """Other settings: URLs that stay keep what was learned of them, if nothing else changed.

        Generations go on with the replicas they have. SettingsError for a bad `ca`, and then
        nothing has changed.
        """
        made = self._made if _alike(self._settings, settings) else {}
        tls = client_context(self.name, settings.ca)
        self._made = {
            url: made.get(url)
            or Replica(_upstream(self._session, url, settings, tls), settings, self._probe_s)
            for url in settings.urls
        }
        self._settings = settings
        self.replicas = list(self._made.values())

    async def choose(self, avoid: Collection[str] = ()) -> tuple[Engine, EngineInfo]:
        """The least loaded replica that is up, one of the URLs to `avoid` only if all others fail.

        Raises the last one's UpstreamError if none is up.
        """
        ordered = self.ranked(avoid)
        for i, replica in enumerate(ordered):
            try:
                return await replica.ready()
            except GatewayError:
                if i == len(ordered) - 1:
                    raise
        raise AssertionError("a backend has at least one URL")

    def models(self) -> list[str]:
        """Models served now."""
        return [model for replica in self.replicas if replica.info for model in replica.served]

    def serving(self, model: str) -> list[Replica]:
        """The replicas that serve a model, the best to ask first."""
        return [replica for replica in self.ranked() if model in replica.served]

    def ranked(self, avoid: Collection[str] = ()) -> list[Replica]:
        """All replicas: those that are up first, the least loaded before, those to `avoid` last."""
        return sorted(self.replicas, key=lambda r: (r.url in avoid, r.info is None, r.active))

    def down(self, engine: Engine, error: GatewayError) -> None:
        """An engine turned out to be unreachable."""
        for replica in self.replicas:
            if replica.url == engine.url:
                replica.mark_down(error)


def _alike(one: Backend | None, other: Backend) -> bool:
    """Whether they differ in nothing but their URLs."""
    return one is not None and one.model_copy(update={"urls": other.urls}) == other


def _upstream(
    session: ClientSession, url: str, settings: Backend, tls: ssl.SSLContext | None
) -> Upstream:
    bare = settings.engine == "openai" and not url.endswith("/v1")
    key = settings.api_key.get_secret_value() if settings.api_key else None
    return Upstream(session, url.removesuffix("/v1"), key, bare=bare, tls=tls)
