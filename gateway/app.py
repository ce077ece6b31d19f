"""The application: what is served under which path, and what runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import backends, handlers
from gateway.context import GATEWAY, ApiKeys, Gateway, Slots
from gateway.middleware import frame, on_prepare
from gateway.policies import PolicyStore
from gateway.settings import Settings
from gateway.upstream import client_session

log = structlog.get_logger()


def build_app(settings: Settings) -> web.Application:
    app = web.Application(
        middlewares=[frame], client_max_size=int(settings.limits.body_mib * 1024 * 1024)
    )
    app.add_routes(_routes())
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
                ApiKeys(settings.api_keys),
                Slots(settings.limits.generations),
            )
            watchers = [policies.watch(), app[GATEWAY].watch()]
            watchers += [r.watch() for s in replica_sets.values() for r in s.replicas]
            tasks = [asyncio.create_task(watcher) for watcher in watchers]
            for task in tasks:
                task.add_done_callback(_tell)
            yield
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    app.cleanup_ctx.append(running)
    return app


def _routes() -> list[web.RouteDef]:
    def get(path: str, handler: Handler) -> web.RouteDef:
        return web.get(path, handler, expect_handler=_expected)

    def post(path: str, handler: Handler) -> web.RouteDef:
        return web.post(path, handler, expect_handler=_expected)

    return [
        post("/v1/chat/completions", handlers.chat_completions),
        post("/v1/completions", handlers.completions),
        post("/v1/messages", handlers.messages),
        post("/v1/messages/count_tokens", handlers.count_tokens),
        post("/v1/responses", handlers.responses),
        get("/v1/models", handlers.models),
        get("/v1/models/{model:.+}", handlers.model),
        post("/tokenize", handlers.anything),
        post("/detokenize", handlers.anything),
        web.route("*", "/v1/{path:.+}", handlers.anything, expect_handler=_expected),
        get("/healthz", handlers.healthz),
        get("/readyz", handlers.readyz),
        get("/openapi.json", handlers.described),
    ]


async def _expected(request: web.Request) -> None:
    """Other expectations than this one may be ignored; aiohttp's handler breaks on some."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a watcher died", exc_info=error)
