"""The client of engines, byte for byte: what an HTTP server may send, and what it must not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway import http1
from gateway.connections import Connections
from gateway.errors import RequestError, UpstreamError
from gateway.settings import Timeouts
from gateway.upstream import Upstream
from tests.gateway.support import alive

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HI = OK + b"Content-Length: 2\r\n\r\nhi"


class Engine:
    """Writes the given answers, one a request; None closes the connection instead."""

    def __init__(self, *answers: bytes | None, closes: bool = False) -> None:
        self._answers = list(answers)
        self._closes = closes
        self.connections = 0
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self._answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if self._closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def upstream(engine: Engine, **timeouts: float) -> AsyncIterator[Upstream]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with Connections(Timeouts(**timeouts)) as connections:
            yield Upstream(connections, url, "secret")
    finally:
        server.close()


async def body(engine: Upstream, path: str = "/x") -> bytes:
    async with engine.request("GET", path, None) as response:
        return await engine.whole(response)


@pytest.mark.parametrize(
    "answer",
    [
        HI,
        CHUNKED + b"1\r\nh\r\n1\r\ni\r\n0\r\n\r\n",
        CHUNKED + b"2;name=value\r\nhi\r\n0\r\nTrailer: 1\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nX-Interim: 1\r\n\r\n" + HI,
    ],
)
async def test_a_body_of_any_framing_is_read_and_the_connection_kept(answer: bytes) -> None:
    engine = Engine(answer, HI)
    async with upstream(engine) as there:
        assert await body(there) == b"hi"
        assert await body(there) == b"hi"
    assert engine.connections == 1
    assert b"authorization: bearer secret" in engine.heads[0].lower()


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        HI + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother",
    ],
)
async def test_a_connection_that_can_not_be_used_again_is_not(answer: bytes) -> None:
    engine = Engine(answer, HI)
    async with upstream(engine) as there:
        assert await body(there) == b"hi"
        assert await body(there) == b"hi"
    assert engine.connections == 2


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async with upstream(Engine(OK + b"\r\nhi", closes=True)) as there:
        assert await body(there) == b"hi"


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (OK + b"Content-Length: 9\r\n\r\nhi", "truncated"),
        (CHUNKED + b"2\r\nhi\r\n", "truncated"),
        (CHUNKED + b"zz\r\nhi\r\n", "reset"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "reset"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "reset"),
        (None, "reset"),
    ],
)
async def test_what_breaks_is_told_as_what_it_is(answer: bytes | None, cause: str) -> None:
    async with upstream(Engine(answer, closes=True)) as there:
        with pytest.raises(UpstreamError) as caught:
            await body(there)
    assert caught.value.cause == cause
    assert there.url in caught.value.message


async def test_a_head_without_an_end_is_given_up() -> None:
    async with upstream(Engine(OK + b"X: " + b"y" * 100_000)) as there:
        with pytest.raises(UpstreamError, match=r"no HTTP|a head of over 65536 bytes"):
            await body(there)


async def test_a_silent_engine_is_given_up() -> None:
    async with upstream(Engine(CHUNKED), idle=0.05) as there:
        with pytest.raises(UpstreamError, match=r"timeouts\.idle") as caught:
            await body(there)
    assert caught.value.cause == "timeout"


async def test_nothing_breaks_out_of_a_head() -> None:
    async with upstream(Engine(HI)) as there:
        with pytest.raises(RequestError):
            await body(there, "/x HTTP/1.1\r\nX: y")


async def test_a_cut_answer_leaves_a_fresh_connection_at_hand() -> None:
    engine = Engine(CHUNKED + b"2\r\nhi\r\n", HI)
    async with upstream(engine) as there:
        async with there.request("GET", "/x", None) as response:
            assert await response.read() == b"hi"
        while engine.connections < 2:
            await asyncio.sleep(0)
        assert await body(there) == b"hi"
    assert engine.connections == 2


async def test_a_head_alone_is_all_of_an_answer_to_head() -> None:
    engine = Engine(OK + b"Content-Length: 9\r\n\r\n", HI)
    async with upstream(engine) as there:
        async with there.request("HEAD", "/x", None) as response:
            assert (response.status, response.content_length) == (200, 9)
            assert await response.read() == b""
        assert await body(there) == b"hi"


async def test_a_clients_header_takes_the_place_of_ours_however_it_is_written() -> None:
    engine = Engine(HI)
    async with upstream(engine) as there:
        headers = {"content-type": "multipart/form-data", "authorization": "Bearer theirs"}
        async with there.request("POST", "/x", b"", headers) as response:
            await response.read()
    names = [line.split(b":")[0].lower() for line in engine.heads[0].splitlines()]
    assert names.count(b"content-type") == names.count(b"authorization") == 1
    assert b"multipart/form-data" in engine.heads[0]
    assert b"theirs" not in engine.heads[0]


async def test_paths_of_clients_leave_nothing_behind() -> None:
    engine = Engine(*[HI] * 40)
    async with upstream(engine) as there:
        for number in range(40):
            assert await body(there, f"/x?{number}") == b"hi"
        assert len(there._heads) <= 16


async def test_answers_are_freed_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(*[HI, CHUNKED + b"2\r\nhi\r\n"] * 5)
    answers = alive(monkeypatch, http1, "_Answer")
    gc.disable()
    try:
        async with upstream(engine) as there:
            for _ in range(10):
                async with there.request("GET", "/x", None) as response:
                    assert await response.read() == b"hi"
            del response
            async with asyncio.timeout(5):  # for those whose connection is being closed
                while answers:
                    await asyncio.sleep(0)
    finally:
        gc.enable()
