"""A TCP proxy in front of one engine that breaks connections by plan.

    proxy = Proxy("large0", port, is_decode=engine.is_decode)
    await proxy.start()
    proxy.plan = Schedule(seed=1, rate=0.05)

It forwards bytes and reads of them only where a message begins and ends, so that a fault can be
aimed at an answer by its number and its offset although connections are kept alive.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tests.chaos.framing import Message
from tests.chaos.schedule import HARMLESS, Fault, Kind, Peace, Plan

HOST = "127.0.0.1"
GARBAGE = b"\x00\xff\xfe\r\n\x80garbage\x00\r\n"
_READ_BYTES = 64 * 1024
_DRIP_BYTES = 7
_DRIP_S = 0.001
_DRIPPED = 300
"""Bytes that come by drops, until the answer flows again."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that struck; `request` is what it was an answer to, if to anything."""

    fault: Fault
    replica: str
    path: str = ""
    request: bytes = b""


@dataclass(slots=True, eq=False)
class Exchange:
    """A request, its answer, and what the answer is to suffer."""

    request: Message = field(default_factory=Message)
    answer: Message = field(default_factory=Message)
    decode: bool = False
    fault: Fault | None = None
    fired: bool = False

    @property
    def finished(self) -> bool:
        """Whether the client got the whole answer as the engine wrote it."""
        spoiled = self.fired and self.fault is not None and self.fault.kind not in HARMLESS
        return self.answer.done and not spoiled


class _Over(Exception):
    """The connection has been broken by a fault."""


class Proxy:
    """Listens on a free port for one engine. `plan` may be changed at any time."""

    def __init__(
        self, name: str, port: int, is_decode: Callable[[str], bool] = lambda path: False
    ) -> None:
        self.name = name
        self.engine_port = port
        self.is_decode = is_decode
        self.plan: Plan = Peace()
        self.port = 0
        self.fired: list[Fired] = []
        self.accepted = 0
        self.passages: set[Passage] = set()
        """Open connections."""
        self._numbers = {True: 0, False: 0}
        self._server: asyncio.Server | None = None
        self._rising: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    async def start(self) -> None:
        """Listens; again on the same port, after it was down."""
        self._server = await asyncio.start_server(self._accept, HOST, self.port, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._rising is not None:
            self._rising.cancel()
        self._fall()
        await self.until(lambda: not self.passages)

    def down(self, seconds: float) -> None:
        """Dies, and listens again after `seconds`."""
        if self._server is not None:
            self._fall()
            self._rising = asyncio.create_task(self._rise(seconds))

    def _fall(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for passage in self.passages:
            passage.reset()

    async def _rise(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.start()

    # ---- what it tells --------------------------------------------------------------------------

    @property
    def unfinished(self) -> list[Exchange]:
        """Decodes that the client has not seen the end of, on connections it keeps open."""
        exchanges = [p.exchange for p in self.passages if p.exchange is not None]
        return [e for e in exchanges if e.decode and not e.finished]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for something that the end of a connection brings about."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    # ---- connections ----------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.accepted = self.accepted, self.accepted + 1
        if fault := self.plan.of_connection(self.name, number):
            self.fired.append(Fired(fault, self.name))
            reset(writer)
            return
        passage = Passage(self, reader, writer)
        self.passages.add(passage)
        try:
            await passage.run()
        finally:
            self.passages.discard(passage)
            self._news.set()

    def aim(self, exchange: Exchange) -> None:
        """The head of a request is there: what its answer is to suffer."""
        exchange.decode = self.is_decode(exchange.request.path)
        number = self._numbers[exchange.decode]
        self._numbers[exchange.decode] += 1
        exchange.fault = self.plan.of_answer(self.name, number, exchange.decode)

    def strike(self, fault: Fault, exchange: Exchange) -> None:
        exchange.fired = True
        request = exchange.request
        self.fired.append(Fired(fault, self.name, request.path, bytes(request.body)))
        if fault.kind is Kind.DOWN:
            others = [p.exchange for p in self.passages if p.exchange not in (None, exchange)]
            hit = [e.request for e in others if e is not None and not e.finished]
            self.fired += [Fired(fault, self.name, r.path, bytes(r.body)) for r in hit]
            self.down(fault.seconds)


class Passage:
    """One accepted connection and its own one to the engine."""

    def __init__(
        self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._dripped = _DRIPPED
        self.exchange: Exchange | None = None

    def reset(self) -> None:
        reset(self._writer)

    async def run(self) -> None:
        """Until either side closes; then the other one is closed too."""
        try:
            reader, writer = await asyncio.open_connection(HOST, self._proxy.engine_port)
        except OSError:
            self.reset()
            return
        ways = [
            asyncio.create_task(self._to_engine(writer)),
            asyncio.create_task(self._to_client(reader)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.transport.abort()
            self._writer.close()

    async def _to_engine(self, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await self._reader.read(_READ_BYTES):
                self._asked(data)
                writer.write(data)
                await writer.drain()

    def _asked(self, data: bytes) -> None:
        if self.exchange is None or self.exchange.request.done:
            self.exchange = Exchange()
            self._dripped = _DRIPPED
        request = self.exchange.request
        headed = bool(request.start)
        request.feed(data)
        if request.start and not headed:
            self._proxy.aim(self.exchange)

    async def _to_client(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError, _Over):
            while data := await reader.read(_READ_BYTES):
                await self._answer(data)

    async def _answer(self, data: bytes) -> None:
        exchange = self.exchange
        assert exchange is not None, "an engine speaks only when asked"
        before = exchange.answer.seen
        fault = exchange.fault
        if fault is None or exchange.fired or fault.offset >= before + len(data):
            exchange.answer.feed(data)
            await self._send(data)
            return
        whole = fault.offset - before
        await self._send(data[:whole])
        self._proxy.strike(fault, exchange)
        exchange.answer.feed(data)
        await self._suffer(fault)
        await self._send(data[whole:])

    async def _suffer(self, fault: Fault) -> None:
        """Returns where the answer goes on."""
        match fault.kind:
            case Kind.DELAY:
                await asyncio.sleep(fault.seconds)
            case Kind.GARBAGE:
                self._writer.write(GARBAGE)
            case Kind.DRIP:
                self._dripped = 0
            case Kind.HALF_CLOSE:
                self._writer.write_eof()
                await asyncio.Event().wait()
            case Kind.STALL:
                await asyncio.Event().wait()
            case Kind.RESET:
                self.reset()
                raise _Over
            case Kind.CUT | Kind.DOWN | Kind.REFUSE:
                raise _Over

    async def _send(self, data: bytes) -> None:
        while data and self._dripped < _DRIPPED:
            drop, data = data[:_DRIP_BYTES], data[_DRIP_BYTES:]
            self._dripped += len(drop)
            self._writer.write(drop)
            await asyncio.sleep(_DRIP_S)
        if data:
            self._writer.write(data)
            await self._writer.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """RST, not FIN."""
    sock: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
