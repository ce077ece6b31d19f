"""The proxy itself: each fault is what it says, at the byte it says, and is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from tests.chaos.framing import Message
from tests.chaos.proxy import GARBAGE, HOST, Proxy
from tests.chaos.schedule import Fault, Kind, Schedule

REQUEST = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"
OTHER = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKS = [b"%x\r\n%s\r\n" % (len(part), part) for part in (b"data: one\n\n", b"data: two\n\n")]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER = HEAD + b"".join(CHUNKS) + b"0\r\n\r\n"
WAIT_S = 5.0


class Engine:
    """Answers every request with the same bytes, and keeps the connection."""

    def __init__(self, answer: bytes = ANSWER) -> None:
        self.answer = answer
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = Message()
        with suppress(ConnectionError):
            while data := await reader.read(1024):
                message.feed(data)
                if message.done:
                    writer.write(self.answer)
                    message = Message()
        self.left.set()
        writer.close()


@dataclass
class Chosen:
    """A plan of single faults, by number."""

    connections: dict[int, Fault] = field(default_factory=dict)
    decodes: dict[int, Fault] = field(default_factory=dict)
    others: dict[int, Fault] = field(default_factory=dict)

    def of_connection(self, replica: str, number: int) -> Fault | None:
        return self.connections.get(number)

    def of_answer(self, replica: str, number: int, decode: bool) -> Fault | None:
        return (self.decodes if decode else self.others).get(number)


@asynccontextmanager
async def proxied(engine: Engine, plan: Chosen) -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(engine.serve, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    proxy = Proxy("large0", port, lambda path: path == "/v1/completions")
    await proxy.start()
    proxy.plan = plan
    try:
        async with asyncio.timeout(WAIT_S):
            yield proxy
    finally:
        await proxy.stop()
        server.close()


async def ask(proxy: Proxy, request: bytes = REQUEST) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    writer.write(request)
    reader.writer = writer  # type: ignore[attr-defined]  # or it would be closed with us
    return reader


async def test_bytes_pass_both_ways_and_connections_are_kept() -> None:
    async with proxied(Engine(), Chosen()) as proxy:
        reader = await ask(proxy, REQUEST)
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        reader.writer.write(OTHER)  # type: ignore[attr-defined]
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        assert (proxy.accepted, len(proxy.passages), proxy.unfinished) == (1, 1, [])


async def test_a_cut_comes_before_the_byte_at_its_offset() -> None:
    plan = Chosen(decodes={n: Fault(Kind.CUT, n) for n in range(len(ANSWER))})
    async with proxied(Engine(), plan) as proxy:
        for offset in range(len(ANSWER)):
            assert await (await ask(proxy)).read() == ANSWER[:offset]
        assert {(f.fault.kind, f.request) for f in proxy.fired} == {(Kind.CUT, b"body")}
        await proxy.until(lambda: not proxy.passages)


async def test_a_fault_beyond_the_answer_never_strikes() -> None:
    async with proxied(Engine(), Chosen(decodes={0: Fault(Kind.CUT, len(ANSWER))})) as proxy:
        assert await (await ask(proxy)).readexactly(len(ANSWER)) == ANSWER
        assert not proxy.fired


async def test_a_reset_is_no_end() -> None:
    async with proxied(Engine(), Chosen(decodes={0: Fault(Kind.RESET, 0)})) as proxy:
        with pytest.raises(ConnectionResetError):
            await (await ask(proxy)).read()


async def test_decodes_and_other_requests_are_counted_apart() -> None:
    plan = Chosen(decodes={0: Fault(Kind.CUT, 0)})
    async with proxied(Engine(), plan) as proxy:
        for _ in range(2):
            assert await (await ask(proxy, OTHER)).readexactly(len(ANSWER)) == ANSWER
        assert await (await ask(proxy, REQUEST)).read() == b""


@pytest.mark.parametrize("kind", [Kind.DELAY, Kind.DRIP])
async def test_what_is_slow_still_comes_whole(kind: Kind) -> None:
    plan = Chosen(decodes={0: Fault(kind, len(HEAD), seconds=0.01)})
    async with proxied(Engine(), plan) as proxy:
        assert await (await ask(proxy)).readexactly(len(ANSWER)) == ANSWER
        assert not proxy.unfinished


async def test_garbage_is_put_in_and_the_rest_follows() -> None:
    at = len(HEAD) + 3
    async with proxied(Engine(), Chosen(decodes={0: Fault(Kind.GARBAGE, at)})) as proxy:
        reader = await ask(proxy)
        whole = ANSWER[:at] + GARBAGE + ANSWER[at:]
        assert await reader.readexactly(len(whole)) == whole
        assert len(proxy.unfinished) == 1


@pytest.mark.parametrize("kind", [Kind.STALL, Kind.HALF_CLOSE])
async def test_what_stays_open_is_unfinished_until_the_client_closes(kind: Kind) -> None:
    engine = Engine()
    async with proxied(engine, Chosen(decodes={0: Fault(kind, len(HEAD))})) as proxy:
        reader = await ask(proxy)
        assert await reader.readexactly(len(HEAD)) == HEAD
        if kind is Kind.HALF_CLOSE:
            assert await reader.read() == b""
        assert len(proxy.unfinished) == 1
        reader.writer.close()  # type: ignore[attr-defined]
        await proxy.until(lambda: not proxy.passages)
        await engine.left.wait()
        assert not proxy.unfinished


async def test_a_refused_connection_is_reset_at_once() -> None:
    async with proxied(Engine(), Chosen(connections={0: Fault(Kind.REFUSE)})) as proxy:
        with pytest.raises(ConnectionResetError):
            await (await ask(proxy)).read()
        assert await (await ask(proxy)).readexactly(len(ANSWER)) == ANSWER


async def test_a_replica_that_is_down_takes_all_with_it_and_comes_back() -> None:
    plan = Chosen(decodes={1: Fault(Kind.DOWN, 0, seconds=0.2)})
    async with proxied(Engine(answer=HEAD), plan) as proxy:
        first = await ask(proxy)
        assert await first.readexactly(len(HEAD)) == HEAD
        with pytest.raises(ConnectionResetError):
            await (await ask(proxy)).read()
        with pytest.raises(ConnectionResetError):
            await first.read()
        assert len(proxy.fired) == 2
        with pytest.raises(ConnectionRefusedError):
            await ask(proxy)
        proxy.plan = Chosen()
        assert await (await until_listening(proxy)).readexactly(len(HEAD)) == HEAD


async def until_listening(proxy: Proxy) -> asyncio.StreamReader:
    while True:
        with suppress(ConnectionRefusedError):
            return await ask(proxy)
        await asyncio.sleep(0.01)


# ---- the schedule -------------------------------------------------------------------------------


def faults_of(schedule: Schedule, replica: str = "large0", count: int = 400) -> list[Fault | None]:
    return [schedule.of_answer(replica, n, decode=True) for n in range(count)]


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    assert faults_of(Schedule(1, 0.5)) == faults_of(Schedule(1, 0.5))
    assert faults_of(Schedule(1, 0.5)) != faults_of(Schedule(2, 0.5))
    assert faults_of(Schedule(1, 0.5)) != faults_of(Schedule(1, 0.5), "large1")


def test_about_as_many_faults_as_the_rate_says_and_all_kinds_of_them() -> None:
    faults = [fault for fault in faults_of(Schedule(1, 0.25)) if fault]
    assert 60 <= len(faults) <= 140
    assert {fault.kind for fault in faults} == set(Kind) - {Kind.REFUSE}
    refused = [Schedule(1, 0.9).of_connection("large0", n) for n in range(100)]
    assert {fault.kind for fault in refused if fault} == {Kind.REFUSE}


def test_only_decodes_suffer_unless_told() -> None:
    of_others = [Schedule(1, 1.0).of_answer("large0", n, decode=False) for n in range(50)]
    assert not any(of_others)
    assert Schedule(1, 1.0, "requests").of_answer("large0", 0, decode=False)
