"""Clients that stall, and bytes that are no HTTP: bounded in time and size, told in JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from gateway.context import GATEWAY
from tests.gateway.fakes import FakeVllm, Gate, writes
from tests.gateway.support import GONE_S, POLICY, USER, WAIT_S, Served, Stage, until_ready, within
from tests.gateway.test_cancellation import idle

SOON = {"timeouts": {"client": 0.2}}
LATE = {"timeouts": {"client": 600}}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    error: dict[str, Any]


class Wire:
    """A client with its hands on the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def rest(self) -> bytes:
        """All until the server closes."""
        try:
            return await within(WAIT_S, self.reader.read())
        except ConnectionError:
            return b""

    async def answer(self) -> Answer:
        """One whole answer; the connection may stay."""
        head = await within(WAIT_S, self.reader.readuntil(b"\r\n\r\n"))
        first, *lines = head.decode().strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = await within(WAIT_S, self.reader.readexactly(int(headers["content-length"])))
        return Answer(int(first.split()[1]), headers, json.loads(body).get("error", {}))


@asynccontextmanager
async def wire(served: Served, receive: int | None = None) -> AsyncIterator[Wire]:
    """`receive`: the size of the client's own buffer, and little more is taken ahead."""
    host = urlsplit(served.url)
    sock = socket.socket()
    if receive is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host.hostname, host.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive or 2**16)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def pair(stage: Stage, settings: dict[str, Any], *script: Any) -> tuple[Served, FakeVllm]:
    large = FakeVllm(writes(*(script or ("ok",))), model="big", context=1_000_000)
    return await stage.pair(large, FakeVllm(model="tiny", context=1_000_000), settings), large


def asked(**fields: Any) -> bytes:
    body = json.dumps({"model": POLICY, "messages": USER, **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


# ---- heads and bodies that do not come ----------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST /v1/ch", HEAD], ids=["nothing", "a line", "a head"])
async def test_a_request_that_does_not_come_ends_its_connection(stage: Stage, sent: bytes) -> None:
    served, _ = await pair(stage, SOON)
    async with wire(served) as client:
        client.send(sent)
        assert await client.rest() == b""


async def test_a_second_request_that_stops_in_its_head_ends_the_connection(stage: Stage) -> None:
    served, _ = await pair(stage, SOON)
    async with wire(served) as client:
        client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer()).status == 200
        client.send(b"GET /healthz HT")
        assert await client.rest() == b""


async def test_an_idle_connection_stays_open_between_requests(stage: Stage) -> None:
    served, _ = await pair(stage, SOON)
    async with wire(served) as client:
        for _ in range(2):
            client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await client.answer()).status == 200
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.reader.read(1), 0.5)


async def test_a_generation_may_last_longer_than_a_client_may_stall(stage: Stage) -> None:
    gate = Gate()
    served, _ = await pair(stage, SOON, "one", gate, "two")
    async with wire(served) as client:
        client.send(asked())
        await within(WAIT_S, gate.reached.wait())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.5)
        gate.opened.set()
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("part", [b"", b"{" * 100])
async def test_a_body_that_does_not_come_is_a_408_and_the_end(stage: Stage, part: bytes) -> None:
    served, large = await pair(stage, SOON)
    async with wire(served) as client:
        client.send(HEAD + b"Content-Length: 9999\r\n\r\n" + part)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.error["type"] == "invalid_request_error"
        assert "timeouts.client" in answer.error["message"]
        assert answer.headers["connection"] == "close"
    assert large.decodes == []
    assert served.app[GATEWAY].admission.taken == 0


async def test_a_body_that_drips_is_a_408(stage: Stage) -> None:
    served, _ = await pair(stage, SOON)
    async with wire(served) as client:
        client.send(HEAD + b"Content-Length: 9999\r\n\r\n")

        async def drip() -> None:
            while True:
                client.send(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        try:
            assert (await client.answer()).status == 408
        finally:
            dripping.cancel()


async def test_a_large_body_may_take_its_time_as_long_as_it_comes(stage: Stage) -> None:
    served, _ = await pair(stage, {"timeouts": {"client": 2.0}})
    body = json.dumps({"model": "nobody", "padding": "x" * 8 * 20_000}).encode()
    async with wire(served) as client:
        client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 20_000):  # 8 x 0.3 s: more than all the time together
            client.send(body[start : start + 20_000])
            await asyncio.sleep(0.3)
        assert (await client.answer()).status == 404


async def test_a_length_over_the_limit_is_refused_before_the_body_comes(stage: Stage) -> None:
    served, _ = await pair(stage, {**LATE, "limits": {"body_mib": 1}})
    async with wire(served) as client:
        client.send(HEAD + b"Content-Length: 2000000\r\n\r\n")
        assert (await client.answer()).status == 413


async def test_a_key_is_asked_for_before_the_body_comes(stage: Stage) -> None:
    served, _ = await pair(stage, {**LATE, "api_keys": ["secret"]})
    async with wire(served) as client:
        client.send(HEAD + b"Content-Length: 2000000\r\n\r\n")
        assert (await client.answer()).status == 401


# ---- answers that are not taken -----------------------------------------------------------------

FLOOD = [f" {'x' * 40_000}"] * 300
"""Far more than all the sockets' buffers on the way."""


@pytest.mark.parametrize(
    ("path", "model"), [("/v1/chat/completions", POLICY), ("/v1/completions", "big")]
)
async def test_a_client_that_takes_nothing_is_cut_off_and_its_engine_left(
    stage: Stage, path: str, model: str
) -> None:
    served, large = await pair(stage, SOON, *FLOOD, Gate())
    await until_ready(served, 200)
    body = {"model": model, "messages": USER, "prompt": "x", "stream": True, "max_tokens": 9999}
    content = json.dumps(body).encode()
    head = HEAD.replace(b"/v1/chat/completions", path.encode())
    async with wire(served, receive=4096) as client:
        with capture_logs() as logs:
            client.send(head + b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
            async with asyncio.timeout(WAIT_S):
                while not large.decodes:
                    await asyncio.sleep(0.01)
            await within(WAIT_S, large.decodes[0].left.wait())
        await idle(served)
    [told] = [line for line in logs if "takes nothing" in line["event"]]
    assert told["log_level"] == "warning"


async def test_a_slow_client_that_takes_some_is_not_cut_off(stage: Stage) -> None:
    served, large = await pair(stage, {"timeouts": {"client": 1.0}}, *FLOOD, Gate())
    async with wire(served, receive=64 * 1024) as client:
        client.send(asked(stream=True))
        for _ in range(12):  # 12 x 0.2 s: longer than it could take nothing
            await within(WAIT_S, client.reader.readexactly(64 * 1024))
            await asyncio.sleep(0.2)
        assert not large.decodes[0].left.is_set()
    await within(GONE_S, large.decodes[0].left.wait())


# ---- what is no HTTP ----------------------------------------------------------------------------

SHOULD = {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"hello there\r\n\r\n", 400),
        (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 20_000), 431),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-a: %s\r\n\r\n" % (b"a" * 20_000), 431),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n%s\r\n" % (b"a: b\r\n" * 5000), 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-a: \x00\r\n\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}nonsense\r\n", 400),
        (HEAD + b"Transfer-Encoding: odd\r\n\r\n{}", 400),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n", 400),
    ],
)
async def test_what_cannot_be_read_is_told_in_openais_shape_and_nothing_of_our_insides(
    stage: Stage, sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    served, _ = await pair(stage, LATE)
    with caplog.at_level(logging.DEBUG), capture_logs() as logs:
        async with wire(served) as client:
            client.send(sent)
            answer = await client.answer()
            assert await client.rest() == b""
    assert answer.status == status
    assert set(answer.error) == SHOULD
    assert answer.error["type"] == "invalid_request_error"
    if status == 431:
        assert "limits.header_kib (16 KiB)" in answer.error["message"]
    for word in ("aiohttp", "Traceback", "0x", "\\x", "b'"):
        assert word not in answer.error["message"]
    assert [r for r in caplog.records if r.levelno > logging.DEBUG] == []
    assert [line["log_level"] for line in logs if line["event"].startswith("request")] == [
        "warning"
    ]


async def test_long_headers_fit_where_the_limit_is_raised(stage: Stage) -> None:
    served, _ = await pair(stage, {"limits": {"header_kib": 32}})
    async with wire(served) as client:
        client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-a: %s\r\n\r\n" % (b"a" * 20_000))
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("given", [b"a\tb", b"\xff", b"a" * 129, b"\x01"])
async def test_a_request_id_that_could_harm_is_replaced(stage: Stage, given: bytes) -> None:
    served, _ = await pair(stage, LATE)
    async with wire(served) as client:
        client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-request-id: %s\r\n\r\n" % given)
        answer = await client.answer()
        if answer.status == 200:
            assert answer.headers["x-request-id"].startswith("req_")
        assert given.decode("latin-1") not in str(answer.headers)


async def test_of_what_a_client_gives_only_its_request_id_comes_back_in_headers(
    stage: Stage,
) -> None:
    served, _ = await pair(stage, LATE)
    body = json.dumps({"model": "mark-m\r\nx-evil: 1", "user": "mark-u"}).encode()
    async with wire(served) as client:
        client.send(
            b"POST /v1/chat/completions?mark-q%%0d%%0ax-evil:1 HTTP/1.1\r\nHost: mark-h\r\n"
            b"x-request-id: mine-1\r\nOrigin: mark-o\r\nCookie: mark-c\r\nx-mark: mark-x\r\n"
            b"Accept: mark-a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = await client.answer()
    assert answer.headers.pop("x-request-id") == "mine-1"
    assert "mark" not in str(answer.headers)
    assert "x-evil" not in answer.headers
