"""The application: what is served under which path, and what runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog
from aiohttp import web

from gateway import backends, handlers
from gateway.admission import Admission
from gateway.context import GATEWAY, Gateway
from gateway.generation import Relaying
from gateway.keys import KeyStore
from gateway.middleware import frame, on_prepare
from gateway.policies import PolicyStore
from gateway.settings import Settings
from gateway.upstream import client_session

log = structlog.get_logger()


def build_app(settings: Settings) -> web.Application:
    app = web.Application(
        middlewares=[frame], client_max_size=int(settings.limits.body_mib * 1024 * 1024)
    )
    app.add_routes(
        [
            web.post("/v1/chat/completions", handlers.chat_completions),
            web.post("/v1/completions", handlers.completions),
            web.post("/v1/messages", handlers.messages),
            web.post("/v1/messages/count_tokens", handlers.count_tokens),
            web.post("/v1/responses", handlers.responses),
            web.get("/v1/models", handlers.models),
            web.get("/v1/models/{model:.+}", handlers.model),
            web.post("/tokenize", handlers.anything),
            web.post("/detokenize", handlers.anything),
            web.route("*", "/v1/{path:.+}", handlers.anything),
            web.get("/healthz", handlers.healthz),
            web.get("/readyz", handlers.readyz),
        ]
    )
    app.on_response_prepare.append(on_prepare)

    async def running(app: web.Application) -> AsyncIterator[None]:
        policies = PolicyStore(settings.policies, settings.policy_files)
        policies.load()
        async with client_session(settings.timeouts) as session:
            replica_sets = backends.build(settings, session)
            app[GATEWAY] = Gateway(
                settings,
                policies,
                replica_sets,
                KeyStore(settings.api_keys),
                Admission(settings.limits),
                Relaying(replica_sets, settings.resume, settings.timeouts.first_token),
            )
            watchers = [policies.watch(), app[GATEWAY].watch()]
            watchers += [replicas.watch() for replicas in replica_sets.values()]
            tasks = [asyncio.create_task(watcher) for watcher in watchers]
            for task in tasks:
                task.add_done_callback(_tell)
            yield
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    app.cleanup_ctx.append(running)
    return app


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a watcher died", exc_info=error)
