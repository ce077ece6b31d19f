"""HTTP to one engine: pooled connections, retries on dead ones, errors mapped in one place."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from aiohttp import ClientResponse, ClientSession, TraceConfig
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError

from gateway.errors import (
    BusyError,
    GatewayError,
    RequestError,
    UnreachableError,
    UpstreamError,
)
from gateway.settings import Timeouts

# uvicorn (vLLM, SGLang) and llama.cpp close a connection that was idle for 5 s; let go before.
KEEPALIVE_S = 4.0
_MAX_ERROR_BYTES = 64 * 1024
_MAX_DIGITS = 5  # of a Retry-After: a day
BUSY = (408, 425, 429)
"""Statuses of 4xx that tell of the moment: another replica may do, or the same one later."""
# Whole completions with logprobs have some MiB, a million token ids 8.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
REFUSED_KEY = (401, 403)
"""Statuses by which an engine refuses the gateway's key."""


class _Protocol(ResponseHandler):
    """aiohttp 3.14 forgets the body when its C parser refuses a chunk: a reader waits forever."""

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        body = self._payload
        super().set_exception(exc, *cause)
        refused = isinstance(exc, HttpProcessingError)
        if refused and body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError(f"no HTTP: {exc}"))


class _Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEPALIVE_S)
        kind: type[ResponseHandler] = _Protocol
        self._factory = partial(kind, loop=self._loop)


def client_session(timeouts: Timeouts) -> ClientSession:
    """The one HTTP client of the process. Cookies, proxies and compression are off."""
    trace = TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return ClientSession(
        connector=_Connector(),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=timeouts.connect, sock_read=timeouts.idle
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trace_configs=[trace],
        headers={"Accept-Encoding": "identity"},
        read_bufsize=256 * 1024,
    )


async def _note_reuse(session: ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx["reused"] = True


class Upstream:
    """One engine's base URL (without /v1) and how to talk to it."""

    def __init__(
        self,
        session: ClientSession,
        url: str,
        api_key: str | None = None,
        *,
        bare: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._session = session
        self._tls = tls or True
        self.url = url
        self._bare = bare
        """Whether the API lies at the URL itself, with no /v1 (DeepSeek's .../beta)."""
        self._key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def get(self, path: str) -> Any:
        """The JSON answer of a GET."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer of a POST."""
        return await self._json("POST", path, encoded(body))

    async def check(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """A GET, or a POST, whose answer matters by its status alone."""
        data = None if body is None else encoded(body)
        async with self.request("GET" if data is None else "POST", path, data) as response:
            await raise_for_error(response, self.url)
            await self.whole(response)

    async def _json(self, method: str, path: str, data: bytes | None) -> Any:
        async with self.request(method, path, data) as response:
            await raise_for_error(response, self.url)
            content = await self.whole(response)
            try:
                return orjson.loads(content)
            except orjson.JSONDecodeError:
                raise UpstreamError(f"{self.url}{path} answered with something not JSON") from None

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[ClientResponse]:
        """An open response, whatever its status. Leaving early closes the connection.

        Our key is masked in every error of the block: an engine may tell it back.
        """
        response = await self._send(method, path, data, headers or {})
        try:
            yield response
        except GatewayError as error:
            if self._key:
                error.mask(self._key)
            raise
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> ClientResponse:
        if self._bare:
            path = path.removeprefix("/v1")
        while True:
            context = {"reused": False}
            with _mapped(self.url):
                try:
                    return await self._session.request(
                        method,
                        self.url + path,
                        data=data,
                        headers={"Content-Type": "application/json", **headers, **self._headers},
                        trace_request_ctx=context,
                        allow_redirects=False,
                        ssl=self._tls,
                    )
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # A pooled connection may be closed by its server just as we write to it. It is
                    # out of the pool now; the others may be as dead, a fresh one is not.
                    if not context["reused"]:
                        raise

    async def refusal(self, response: ClientResponse) -> bytes:
        """The body of an engine's error, our key masked in it; 64 KiB of it at most."""
        content = bytearray()
        async with aclosing(self.stream(response)) as chunks:
            async for chunk in chunks:
                content += chunk
                if len(content) >= _MAX_ERROR_BYTES:
                    break
        told = bytes(content[:_MAX_ERROR_BYTES])
        return told.replace(self._key.encode(), b"***") if self._key else told

    async def stream(self, response: ClientResponse) -> AsyncGenerator[bytes]:
        """The body as the network brings it."""
        with _mapped(self.url):
            async for chunk in response.content.iter_any():
                yield chunk

    async def whole(self, response: ClientResponse) -> bytes:
        """The body in one piece. Raises UpstreamError where it is larger than any should be."""
        content = bytearray()
        async with aclosing(self.stream(response)) as chunks:
            async for chunk in chunks:
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise UpstreamError(
                        f"The engine at {self.url} answered with over {MAX_ANSWER_BYTES} bytes, "
                        "more than is read in one piece",
                        code="engine_answer_too_large",
                    )
        return bytes(content)


class _mapped:
    """Turns aiohttp's errors into ours."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case aiohttp.ClientConnectorCertificateError():
                raise UnreachableError(
                    f"The certificate of the engine at {self._url} is not trusted "
                    f"({error.certificate_error}); name its authority's file in the backend's `ca`",
                    code="engine_unreachable",
                ) from error
            case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
                raise UnreachableError(
                    f"The engine at {self._url} can't be reached ({error}). Is it running?",
                    code="engine_unreachable",
                ) from error
            case TimeoutError():
                raise UpstreamError(
                    f"The engine at {self._url} sent nothing for too long (timeouts.idle)",
                    status=504,
                    code="engine_timeout",
                ).of("timeout") from error
            case aiohttp.ClientPayloadError():
                raise UpstreamError(
                    f"The engine at {self._url} cut the connection in the middle of its answer",
                    code="engine_disconnected",
                ).of("truncated") from error
            case aiohttp.ClientError() | ssl.SSLError() | ConnectionError():
                raise UpstreamError(
                    f"The connection to the engine at {self._url} broke: "
                    f"{error or type(error).__name__}",
                    code="engine_disconnected",
                ).of("reset") from error


def encoded(body: Mapping[str, Any]) -> bytes:
    """A request body as JSON. RequestError where it can't be written: it came from the client."""
    try:
        return orjson.dumps(body)
    except TypeError as error:  # orjson reads deeper nesting than it writes
        raise RequestError(f"The request can't be passed on: {error}") from None


async def raise_for_error(response: ClientResponse, url: str) -> None:
    """Raises for a status of 400 and up: an engine's 4xx keeps its status and message."""
    if response.status < 400:
        return
    error = error_of(await _beginning(response, url))
    message = error.pop("message", None) or f"HTTP status {response.status}"
    if response.status in REFUSED_KEY:
        refused = UpstreamError(
            f"The engine at {url} refused the gateway's key (HTTP status {response.status}); "
            "whoever runs the gateway: see backends.NAME.api_key",
            code="engine_refused_key",
        )
        refused.inside = message
        raise refused.of("status")
    refusal = _refusal(response, url, message, error)
    refusal.engines = True
    raise refusal


def _refusal(
    response: ClientResponse, url: str, message: str, error: dict[str, Any]
) -> GatewayError:
    if response.status in BUSY:
        return _busy(response, message, error)
    if response.status < 500:
        return RequestError(message, status=response.status, **error)
    status = response.status if response.status == 503 else 502
    failed = UpstreamError(f"The engine at {url} failed: {message}", status=status, **error)
    return failed.of("status")


def _busy(response: ClientResponse, message: str, error: dict[str, Any]) -> BusyError:
    told = response.headers.get("Retry-After", "")
    headers = {"Retry-After": told} if told.isdecimal() and len(told) <= _MAX_DIGITS else {}
    busy = BusyError(message, status=response.status, headers=headers, **error)
    if headers:
        busy.retry_after = float(told)
    return busy


async def _beginning(response: ClientResponse, url: str) -> bytes:
    """What fits of an error's body. How it goes on, or breaks off, matters little."""
    content = b""
    with _mapped(url):
        while left := _MAX_ERROR_BYTES - len(content):
            read = await response.content.read(left)
            if not read:
                break
            content += read
    return content


def error_of(content: bytes) -> dict[str, Any]:
    """message, type, param and code of an engine's error, from whichever shape it has."""
    try:
        data = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {"message": content[:500].decode(errors="replace")}
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return {"message": _said(error)[:500]}
    message = error.get("message", error.get("detail"))  # FastAPI's own errors have a detail
    found = {key: error[key] for key in ("type", "param") if isinstance(error.get(key), str)}
    if isinstance(code := error.get("code"), str | int):
        found["code"] = code
    return found if message is None else {"message": _said(message), **found}


def _said(message: object) -> str:
    if isinstance(message, str):
        return message
    try:
        return orjson.dumps(message)[:500].decode(errors="replace")
    except TypeError:  # orjson reads deeper nesting than it writes
        return "what is nested too deeply to be told"
