"""The HTTP server under the application: what it does with clients that stall or send nonsense."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from typing import Any

import structlog
from aiohttp import http_exceptions, web

from gateway import metrics
from gateway.errors import GatewayError, RequestError
from gateway.settings import Settings

log = structlog.get_logger()

KEEPALIVE_S = 620.0
"""Idle between requests. Longer than load balancers keep theirs (Google's: 600 s)."""
LEAST_BYTES = 16 * 1024
"""What a client must at least bring or take in `timeouts.client`: less is as good as nothing."""


def runner_of(app: web.Application, settings: Settings) -> web.AppRunner:
    """The application with its server. A client that leaves cancels its handler, and so closes
    what is open upstream."""
    return _Runner(
        app,
        settings,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=KEEPALIVE_S,
        max_line_size=settings.limits.header_kib * 1024,
        max_field_size=settings.limits.header_kib * 1024,
    )


def _untaken(transport: asyncio.Transport) -> int:
    """Bytes on their way to the client: in our buffer and, where it tells, in the kernel's.

    The kernel takes more of ours only when a third of its megabytes is free: ours alone would not
    show that a slow client takes something.
    """
    sock = transport.get_extra_info("socket")
    try:
        told: bytes = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        told = bytes(4)
    return transport.get_write_buffer_size() + int.from_bytes(told, sys.byteorder)


class _Runner(web.AppRunner):
    """aiohttp's, with connections of our own kind."""

    def __init__(self, app: web.Application, settings: Settings, **options: Any) -> None:
        super().__init__(app, **options)
        self._settings = settings

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._settings, **self._kwargs)


class _Server(web.Server):
    def __init__(self, made: web.Server, settings: Settings, **options: Any) -> None:
        super().__init__(made.request_handler, request_factory=made.request_factory, **options)
        self._settings = settings

    def __call__(self) -> web.RequestHandler:
        connection = _Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)
        connection.settings = self._settings
        return connection


class _Connection(web.RequestHandler):
    """Two timers a connection, none a token: one for a request's head, one while our buffer for
    the client is full."""

    __slots__ = ("_head_timer", "_taking_timer", "_untaken", "settings")

    settings: Settings

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._taking_timer: asyncio.TimerHandle | None = None
        self._untaken = 0

    # ---- a head that does not come --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a body are no concern here: then a handler runs and none waits for a head."""
        heads = self._request_count
        super().data_received(data)
        if self._request_count != heads:
            self._head_came()
        elif data and self._head_timer is None and self._waiter is not None:
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_came()
        self._taken()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self.settings.timeouts.client, self._no_head)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _no_head(self) -> None:
        self._head_timer = None
        log.debug("no request came", client=self._client())
        self.force_close()

    # ---- an answer that is not taken ------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _watch_taking(self) -> None:
        assert self.transport is not None
        self._untaken = _untaken(self.transport)
        self._taking_timer = self._loop.call_later(self.settings.timeouts.client, self._not_taken)

    def _taken(self) -> None:
        if self._taking_timer is not None:
            self._taking_timer.cancel()
            self._taking_timer = None

    def _not_taken(self) -> None:
        self._taking_timer = None
        if self.transport is None:
            return
        if self._untaken - _untaken(self.transport) >= LEAST_BYTES:
            self._watch_taking()
            return
        log.warning(
            "the client takes nothing from its answer",
            limit_s=self.settings.timeouts.client,
            client=self._client(),
        )
        self.transport.abort()

    def _client(self) -> str:
        return str(self.peername[0]) if isinstance(self.peername, tuple) else ""

    # ---- what aiohttp would answer by itself ----------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An error outside of any handler, in OpenAI's shape, and nothing of its insides."""
        error = (
            self._refusal(exc) if status == 400 else GatewayError("Internal error", status=status)
        )
        log.warning(
            "request refused", status=error.status, error=error.message, client=self._client()
        )
        metrics.answered(error)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: it can only be cut off")
        response = error.response(error.body())
        response.force_close()
        return response

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        log.error("connection failed", exc_info=options.get("exc_info", True))

    def _refusal(self, exc: BaseException | None) -> RequestError:
        match exc:
            case http_exceptions.LineTooLong():
                return RequestError(
                    "The URL or a header is longer than limits.header_kib "
                    f"({self.settings.limits.header_kib} KiB); send less or raise it",
                    status=431,
                    code="header_too_large",
                )
            case http_exceptions.PayloadEncodingError():
                what = "its body's encoding or length is wrong"
            case http_exceptions.InvalidHeader():
                what = "a header is malformed"
            case http_exceptions.BadStatusLine() | http_exceptions.InvalidURLError():
                what = "its first line is malformed (https on the http port?)"
            case _:
                what = "it is malformed"
        return RequestError(f"This is no HTTP request that can be read: {what}", code="bad_http")
