"""Requests that one engine serves whole: bytes there, bytes back, nothing understood."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import orjson
import structlog
from aiohttp import web
from multidict import CIMultiDict

from gateway import sse
from gateway.backends import Replica
from gateway.chats import chat_chunks
from gateway.engines.answers import reading
from gateway.engines.reading import chunk_object
from gateway.errors import GatewayError, UpstreamError
from gateway.http1 import Response
from gateway.openai_api import parse_object
from gateway.streaming import UNBUFFERED, EventStream
from gateway.timing import in_time
from gateway.tracing import context_of
from gateway.upstream import BUSY, REFUSED_KEY, Upstream, encoded, raise_for_error
from gateway.wire import Wire

log = structlog.get_logger()

# RFC 9110, 7.6.1, and what describes our own connection to the client.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)
# An engine's own affairs with us, or words to a browser about our whole address.
_NOT_FOR_CLIENTS = frozenset(
    {
        "alt-svc",
        "api-key",
        "authentication-info",
        "authorization",
        "clear-site-data",
        "cookie",
        "location",  # would lead the client, with its key, to the engine itself
        "proxy-authentication-info",
        "set-cookie",
        "set-cookie2",
        "strict-transport-security",
        "www-authenticate",
        "x-api-key",
    }
)
# Say how a body is to be read. Not X-Conversation-Id, with which llama.cpp outlives its client.
_SENT_ON = frozenset({"accept", "anthropic-beta", "anthropic-version", "content-type"})
_ELSEWHERE = (*BUSY, 502, 503, 504)
"""Statuses for which another replica may do."""
_FORM_MODEL = re.compile(rb'[; ]name="model"')
_MAX_MODEL_CHARS = 512


async def pass_through(
    request: web.Request, replica: Replica, path: str, data: bytes | None, *, last: bool
) -> web.StreamResponse:
    """Sends `data` to the engine and its answer to the client, as it comes, whatever its status.

    Unless it is the `last` to be asked, one that is busy or fails raises UpstreamError instead.
    Raises it as well for what fails before the answer began; the replica is told of the rest.
    """
    upstream = replica.upstream
    if query := request.rel_url.raw_query_string:
        path += f"?{query}"
    sent_on = {k: v for k, v in request.headers.items() if k.lower() in _SENT_ON}
    headers = {**sent_on, **context_of(request.headers)}
    async with upstream.request(request.method, path, data, headers) as answer:
        # Where our key is refused it is ours that is wrong, not the client's.
        if answer.status in REFUSED_KEY or (not last and answer.status in _ELSEWHERE):
            await raise_for_error(answer, upstream.url)
        if answer.status >= 400:
            told = await upstream.refusal(answer)
            replica.told(answer.status)
            return web.Response(body=told, status=answer.status, headers=_kept_headers(answer))
        response = web.StreamResponse(status=answer.status, headers=_kept_headers(answer))
        if answer.content_type != "text/event-stream" and answer.content_length is not None:
            response.content_length = answer.content_length
        await response.prepare(request)
        try:
            async with in_time(request), aclosing(upstream.stream(answer)) as chunks:
                async for chunk in chunks:
                    await response.write(chunk)
            replica.succeeded()
            await response.write_eof()
        except UpstreamError as error:
            replica.failed(error)
            await _break_off(request, response, answer, error)
        except ConnectionError:
            log.info("the client left", path=path)
        return response


async def _break_off(
    request: web.Request,
    response: web.StreamResponse,
    answer: Response,
    error: UpstreamError,
) -> None:
    """A cut upstream becomes a cut here, and never looks like an end."""
    log.warning("passthrough broke off", error=error.message)
    if answer.content_type == "text/event-stream":
        await response.write(sse.event(orjson.dumps(error.body())))
    if request.transport is not None:
        request.transport.close()


async def translated(
    request: web.Request, replica: Replica, body: Mapping[str, Any], wire: Wire
) -> web.StreamResponse:
    """A chat that the engine serves whole, told to the client by another API.

    Raises GatewayError for what fails before the answer began; the replica is told of the rest.
    """
    upstream = replica.upstream
    async with upstream.request("POST", "/v1/chat/completions", encoded(body)) as answer:
        await raise_for_error(answer, upstream.url)
        if not body.get("stream"):
            completion = chunk_object(await upstream.whole(answer), upstream.url)
            with reading(upstream.url, "a completion"):
                told = orjson.dumps(wire.whole(completion))
            replica.succeeded()
            replica.succeeded()
            return web.Response(body=told, content_type="application/json")
        stream = EventStream(request, wire)
        try:
            async with in_time(request):
                await _translate(upstream, answer, stream)
            replica.succeeded()
        except GatewayError as error:
            if not stream.begun:
                raise
            if isinstance(error, UpstreamError):
                replica.failed(error)
            log.warning("passthrough broke off", error=error.message)
            await stream.send(wire.error(error))
        return stream.response


async def _translate(upstream: Upstream, answer: Response, stream: EventStream) -> None:
    async with aclosing(chat_chunks(upstream, answer)) as chunks:
        async for chunk in chunks:
            with reading(upstream.url, "a chunk"):
                told = stream.wire.chunk(chunk)
            await stream.send(told)
            if stream.left:
                return
    with reading(upstream.url, "a reply"):
        told = stream.wire.end()
    await stream.send(told)


def for_model(body: Mapping[str, Any], model: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's request made one of the large model's own: its name, our fields taken out."""
    ours = {key: value for key, value in body.items() if key != "relaygen"}
    return {**sampling, **ours, "model": model}


def renamed(content: bytes, content_type: str, model: str) -> bytes:
    """A body of any kind, with another model named in it. RequestError: it names none."""
    if content_type.startswith("multipart/") and (found := _form_model(content)):
        return content[: found.start] + model.encode() + content[found.stop :]
    return encoded(for_model(parse_object(content), model, {}))


def model_in(content: bytes, content_type: str) -> str | None:
    """The model that a body of any kind names: JSON, or a form with files."""
    if content_type.startswith("multipart/"):
        found = _form_model(content)
        return content[found].decode(errors="replace") if found else None
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else None


def _form_model(content: bytes) -> slice | None:
    """Where the value of a form's field `model` stands; looked for in one pass."""
    at = 0
    while named := _FORM_MODEL.search(content, at):
        head = content.find(b"\r\n\r\n", named.end())
        if head < 0:
            return None
        at = head + 4
        end = content.find(b"\r\n", at, at + _MAX_MODEL_CHARS + 2)
        if end > at:
            return slice(at, end)
    return None


def _kept_headers(answer: Response) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in answer.headers.get("Connection", "").split(",")}
    dropped = _HOP_BY_HOP | _NOT_FOR_CLIENTS | named
    kept = CIMultiDict(
        (name, value)
        for name, value in answer.headers.items()
        if name.lower() not in dropped and not name.lower().startswith("access-control-")
    )
    if answer.content_type == "text/event-stream":
        for name, value in UNBUFFERED.items():
            kept.setdefault(name, value)
    return kept
