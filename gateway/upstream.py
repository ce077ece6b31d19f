"""HTTP to one engine: requests and answers, and its errors mapped in one place."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import orjson
from multidict import CIMultiDict

from gateway import metrics
from gateway.connections import Address, Asked, Connections
from gateway.errors import BusyError, GatewayError, RequestError, UpstreamError
from gateway.http1 import Response

_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "relaygen",
}
_NO_HEADERS: Mapping[str, str] = {}
_HEADS = 16
"""Heads of requests that are kept; the gateway's own are fewer, clients may think of any path."""
_BREAKS = re.compile(r"[\r\n\0]")
_MAX_ERROR_BYTES = 64 * 1024
_MAX_DIGITS = 5  # of a Retry-After: a day
BUSY = (408, 425, 429)
"""Statuses of 4xx that tell of the moment: another replica may do, or the same one later."""
# Whole completions with logprobs have some MiB, a million token ids 8.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
REFUSED_KEY = (401, 403)
"""Statuses by which an engine refuses the gateway's key."""


class Upstream:
    """One engine's base URL (without /v1) and how to talk to it."""

    def __init__(
        self,
        connections: Connections,
        url: str,
        api_key: str | None = None,
        *,
        name: str = "",
        bare: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.connections = connections
        self._address = Address.of(url, tls)
        self.url = url
        self._name = name
        """The backend's, for metrics."""
        self._bare = bare
        """Whether the API lies at the URL itself, with no /v1 (DeepSeek's .../beta)."""
        self._key = api_key
        self._base = urlsplit(url).path
        self._heads: dict[tuple[str, str], bytes] = {}
        self._head = {"Host": urlsplit(url).netloc.rpartition("@")[2]}
        if api_key:
            self._head["Authorization"] = f"Bearer {api_key}"

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
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> AsyncGenerator[Response]:
        """An open response, whatever its status. Leaving early closes the connection.

        Our key is masked in every error of the block: an engine may tell it back.
        """
        async with self.asked(method, path, data, headers) as asked:
            yield await self.answer(asked)

    @asynccontextmanager
    async def asked(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> AsyncGenerator[Asked]:
        """A request that was written: `answer` is what comes back. Otherwise like `request`."""
        try:
            request = self._request(method, path, data, headers)
            with self._counting():
                asked = await self.connections.ask(
                    self._address, request, bodiless=method == "HEAD"
                )
            try:
                yield asked
            finally:
                self.connections.release(asked)
        except GatewayError as error:
            if self._key:
                error.mask(self._key)
            raise

    async def answer(self, asked: Asked) -> Response:
        """The open response."""
        with self._counting():
            response = await self.connections.answer(asked)
        metrics.upstream_answered(self._name, response.status)
        return response

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except UpstreamError as error:
            metrics.upstream_unanswered(self._name, error.cause)
            raise

    def _request(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        head = None if headers else self._heads.get((method, path))
        if head is None:
            head = self._written(method, path, headers)
            if not headers and len(self._heads) < _HEADS:
                self._heads[method, path] = head
        if data is None:
            return head + b"\r\n"
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(data), data)

    def _written(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        """A request's head, but for the length of its body."""
        if self._bare:
            path = path.removeprefix("/v1")
        fields = CIMultiDict(_HEADERS)
        fields.update(headers)
        fields.update(self._head)
        lines = [f"{method} {self._base}{path} HTTP/1.1", *map(": ".join, fields.items()), ""]
        if any(_BREAKS.search(line) for line in lines):
            raise RequestError("A header or the path has a line break, which can't be passed on")
        return "\r\n".join(lines).encode(errors="surrogateescape")

    async def refusal(self, response: Response) -> bytes:
        """The body of an engine's error, our key masked in it; 64 KiB of it at most."""
        content = bytearray()
        async with aclosing(self.stream(response)) as chunks:
            async for chunk in chunks:
                content += chunk
                if len(content) >= _MAX_ERROR_BYTES:
                    break
        told = bytes(content[:_MAX_ERROR_BYTES])
        return told.replace(self._key.encode(), b"***") if self._key else told

    async def stream(self, response: Response) -> AsyncGenerator[bytes]:
        """The body as the network brings it. Raises UpstreamError where it breaks."""
        while chunk := await response.read():
            yield chunk

    async def whole(self, response: Response) -> bytes:
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


def encoded(body: Mapping[str, Any]) -> bytes:
    """A request body as JSON. RequestError where it can't be written: it came from the client."""
    try:
        return orjson.dumps(body)
    except TypeError as error:  # orjson reads deeper nesting than it writes
        raise RequestError(f"The request can't be passed on: {error}") from None


async def raise_for_error(response: Response, url: str) -> None:
    """Raises for a status of 400 and up: an engine's 4xx keeps its status and message."""
    if response.status < 400:
        return
    error = error_of(await _beginning(response))
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


def _refusal(response: Response, url: str, message: str, error: dict[str, Any]) -> GatewayError:
    if response.status in BUSY:
        return _busy(response, message, error)
    if response.status < 500:
        return RequestError(message, status=response.status, **error)
    status = response.status if response.status == 503 else 502
    failed = UpstreamError(f"The engine at {url} failed: {message}", status=status, **error)
    return failed.of("status")


def _busy(response: Response, message: str, error: dict[str, Any]) -> BusyError:
    told = response.headers.get("Retry-After", "")
    headers = {"Retry-After": told} if told.isdecimal() and len(told) <= _MAX_DIGITS else {}
    busy = BusyError(message, status=response.status, headers=headers, **error)
    if headers:
        busy.retry_after = float(told)
    return busy


async def _beginning(response: Response) -> bytes:
    """What fits of an error's body. How it goes on, or breaks off, matters little."""
    content = b""
    while len(content) < _MAX_ERROR_BYTES and (read := await response.read()):
        content += read
    return content[:_MAX_ERROR_BYTES]


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
