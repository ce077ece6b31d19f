"""The applications: what is served under which path, and what runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import web

from gateway import handlers
from gateway.admission import Admission
from gateway.backends import ReplicaSet
from gateway.connections import Connections
from gateway.context import GATEWAY, Gateway
from gateway.generation import Relaying
from gateway.keys import KeyStore
from gateway.middleware import frame, on_prepare
from gateway.policies import PolicyStore
from gateway.reloading import RELOADER, Reloader, Source, Watchers, started
from gateway.settings import Backend, Settings
from gateway.tracing import tracing_of


async def _expected(request: web.Request) -> None:
    """Other expectations than this one may be ignored; aiohttp's handler breaks on some."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


_post = partial(web.post, expect_handler=_expected)
_get = partial(web.get, expect_handler=_expected)

_HEALTH = [_get("/healthz", handlers.healthz)]
_OPERATION = [_get("/readyz", handlers.readyz), _get("/metrics", handlers.scraped)]
_API = [
    _post("/v1/chat/completions", handlers.chat_completions),
    _post("/v1/completions", handlers.completions),
    _post("/v1/messages", handlers.messages),
    _post("/v1/messages/count_tokens", handlers.count_tokens),
    _post("/v1/responses", handlers.responses),
    _get("/v1/models", handlers.models),
    _get("/v1/models/{model:.+}", handlers.model),
    _post("/tokenize", handlers.anything),
    _post("/detokenize", handlers.anything),
    web.route("*", "/v1/{path:.+}", handlers.anything, expect_handler=_expected),
    _get("/openapi.json", handlers.described),
]


def build_app(settings: Settings, source: Source | None = None) -> web.Application:
    """What clients call. With a source, settings are read again from it."""
    app = web.Application(middlewares=[frame])
    app.add_routes([*_API, *_HEALTH, *([] if settings.admin.port is not None else _OPERATION)])
    app.on_response_prepare.append(on_prepare)

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with Connections(settings.timeouts) as connections:
            gateway = app[GATEWAY] = _gateway(settings, connections)
            watchers = Watchers()
            reloader = app[RELOADER] = Reloader(
                gateway, source, lambda name, b: _replicas(name, b, settings, connections), watchers
            )
            beside = (gateway.policies.watch(), gateway.watch(), gateway.measure())
            tasks = [started(watcher) for watcher in (*beside, reloader.watch())]
            watchers.follow(gateway.backends.values())
            yield
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await watchers.close()
            await gateway.shadow.close()
            await asyncio.to_thread(gateway.relaying.tracing.close)

    app.cleanup_ctx.append(running)
    return app


def build_admin(app: web.Application) -> web.Application:
    """What those who run a started gateway call, for a port of its own."""
    admin = web.Application(middlewares=[frame])
    admin.add_routes([*_HEALTH, *_OPERATION])
    admin.on_response_prepare.append(on_prepare)
    admin[GATEWAY] = app[GATEWAY]
    return admin


def _gateway(settings: Settings, connections: Connections) -> Gateway:
    policies = PolicyStore(settings.policies, settings.policy_files)
    policies.load()
    backends = {n: _replicas(n, b, settings, connections) for n, b in settings.backends.items()}
    return Gateway(
        settings,
        policies,
        backends,
        KeyStore(settings.api_keys),
        Admission(settings.limits),
        Relaying(
            backends,
            settings.resume,
            settings.timeouts.first_token,
            tracing=tracing_of(settings.tracing),
        ),
    )


def _replicas(
    name: str, backend: Backend, settings: Settings, connections: Connections
) -> ReplicaSet:
    return ReplicaSet(name, backend, connections, settings.timeouts.probe, settings.health)
