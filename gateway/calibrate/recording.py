"""One generation through the OpenAI SDK, token by token."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient

from gateway.calibrate.sides import Connected
from gateway.engines.base import Call, Sampling
from gateway.engines.tokenization import Prompt
from gateway.errors import GatewayError, RequestError, UnreachableError, UpstreamError
from gateway.upstream import error_of
from relaygen.calibration.margins import margin
from relaygen.events import DecodeRequest, Piece, Role

_RETRIES = 2  # of the SDK; beyond, a generation is asked for again as a whole
_TIMEOUT = openai.Timeout(1800.0, connect=10.0)
_CLIENT_ERRORS = (400, 404, 413, 422)


@dataclass(slots=True)
class Recording:
    """What was written, one entry a token. `ids` is empty where those of some tokens are not known.

    `hits` tells whether the token that was drawn is the likeliest.
    """

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    hits: list[bool | None] = field(default_factory=list)
    finish: str = ""
    first_s: float = 0.0
    total_s: float = 0.0


def sdk(side: Connected) -> AsyncOpenAI:
    """A client for the paths that the engine's adapter asks for, which are not all below /v1."""
    return AsyncOpenAI(
        base_url=side.engine.url,
        api_key=side.side.api_key or "none",
        max_retries=_RETRIES,
        timeout=_TIMEOUT,
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )


async def record(
    client: AsyncOpenAI, side: Connected, prompt: Prompt, request: DecodeRequest, sampling: Sampling
) -> Recording:
    """The generation, whole. Raises GatewayError where the engine refuses, breaks or is away."""
    while True:
        call = await side.engine._call(side.model, prompt, request, sampling)
        try:
            pieces, times = await _pieces(client, side, call)
        except RequestError as error:
            if not side.engine._lower_logprobs(error, sampling):
                raise
            continue
        recording = await _recorded(side, pieces, estimated=call.reader.estimated)
        recording.finish = str(call.reader.finish)
        recording.first_s, recording.total_s = times
        return recording


def decode_request(prefix: tuple[int, ...] | str, max_tokens: int, seed: int) -> DecodeRequest:
    return DecodeRequest(Role.LARGE, 0, prefix, max_tokens=max_tokens, seed=seed)


async def _pieces(
    client: AsyncOpenAI, side: Connected, call: Call
) -> tuple[list[Piece], tuple[float, float]]:
    """All pieces, the end of turn not with them, and the times of the first and the last."""
    pieces: list[Piece] = []
    start = time.perf_counter()
    first = last = 0.0
    with _mapped(side.engine.url):
        async with _stream(client, side, call) as stream:
            async for chunk in stream:
                new = call.reader.read(chunk) if isinstance(chunk, dict) else []
                if new:
                    last = time.perf_counter() - start
                    first = first or last
                    pieces += new
    finish = call.reader.finish
    if finish is None or finish in ("abort", "error"):
        raise UpstreamError(f"The engine at {side.engine.url} broke a generation off ({finish})")
    if finish == "stop" and pieces and not pieces[-1].text:
        pieces.pop()  # the end of turn, which only some engines tell
    return pieces, (round(first, 6), round(last, 6))


@asynccontextmanager
async def _stream(
    client: AsyncOpenAI, side: Connected, call: Call
) -> AsyncIterator[AsyncStream[object]]:
    body = {key: value for key, value in call.body.items() if value is not None}
    path = call.path.removeprefix("/v1") if side.engine.upstream._bare else call.path
    stream = await client.post(
        path, body=body, cast_to=object, stream=True, stream_cls=AsyncStream[object]
    )
    try:
        yield stream
    finally:
        await stream.close()
        if call.reader.finish is None:
            side.engine.abandon(call.body)


@contextmanager
def _mapped(url: str) -> Iterator[None]:
    """Turns the SDK's errors, and a chunk's that can't be read, into ours."""
    try:
        yield
    except openai.APIStatusError as error:
        told = error_of(error.response.content)
        message = str(told.get("message") or error.message)
        status = error.status_code
        if status < 500:
            raise RequestError(message, status=status) from error
        raise UpstreamError(f"The engine at {url} failed: {message}", status=status) from error
    except openai.APIConnectionError as error:
        why = error.__cause__ or error
        raise UnreachableError(f"The connection to the engine at {url} broke: {why}") from error
    except openai.APIError as error:  # told inside the stream
        body: Any = error.body
        code = body.get("code", body.get("http_status_code")) if isinstance(body, dict) else None
        if code in _CLIENT_ERRORS:
            raise RequestError(error.message, status=code) from error
        raise UpstreamError(f"The engine at {url} failed: {error.message}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UpstreamError(f"The engine at {url} sent what can't be read: {error!r}") from error


async def _recorded(side: Connected, pieces: list[Piece], *, estimated: bool) -> Recording:
    found = Recording()
    whole = True
    for piece in pieces:
        count = 1 if estimated else max(1, piece.tokens)
        ids = piece.ids if len(piece.ids) == count else await _ids_of(side, piece.text, count)
        whole = whole and bool(ids)
        found.ids += ids
        # The last one completes the character that the others are parts of.
        found.texts += [*[""] * (count - 1), piece.text]
        found.margins += [*[None] * (count - 1), _margin(piece)]
        found.hits += [*[None] * (count - 1), _hit(piece)]
    if not whole:
        found.ids = []
    return found


async def _ids_of(side: Connected, text: str, count: int) -> tuple[int, ...]:
    """The ids of a text whose tokens the engine did not tell: as it cuts it, if the count fits."""
    if not side.engine.ids or not text:
        return ()
    try:
        ids = await side.engine.tokenize(side.model, text)
    except GatewayError:
        return ()
    return ids if len(ids) == count else ()


def _margin(piece: Piece) -> float | None:
    return margin([top.logprob for top in piece.top])


def _hit(piece: Piece) -> bool | None:
    if piece.logprob is None or len(piece.top) < 2:
        return None
    return piece.logprob >= max(top.logprob for top in piece.top)
