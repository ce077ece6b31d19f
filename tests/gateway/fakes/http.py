"""A small HTTP/1.1 server with its hands on the socket, to break connections in every way."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Request:
    """One request as it came, and what became of it. `left` is set when the client closed on it."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    connection: int
    left: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.content)
        return body


class Connection(asyncio.Protocol):
    """One accepted connection: reads requests one after the other, lets the server answer each."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self.number = 0
        self._buffer = b""
        self._news = asyncio.Event()
        self.gone = asyncio.Event()
        self.unread = asyncio.Event()
        """Set while the client reads more slowly than we write."""
        self.read = asyncio.Event()
        """Set when it has caught up again."""
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.number = len(self._server.connections)
        self._server.connections.append(self)
        self._task = asyncio.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
        self._news.set()

    def pause_writing(self) -> None:
        self.unread.set()
        self.read.clear()

    def resume_writing(self) -> None:
        self.unread.clear()
        self.read.set()

    async def _serve(self) -> None:
        while (request := await self._read()) is not None:
            self.requests += 1
            self._server.requests.append(request)
            self._server.arrived.set()
            if await self._server.refuses(self):
                return
            answer = asyncio.create_task(self._server.answer(request, self))
            gone = asyncio.create_task(self.gone.wait())
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                gone.cancel()
                request.answered.set()
                answer.result()
                continue
            request.left.set()
            answer.cancel()
            return

    async def _read(self) -> Request | None:
        while b"\r\n\r\n" not in self._buffer:
            if not await self._more():
                return None
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        while len(self._buffer) < length:
            if not await self._more():
                return None
        content, self._buffer = self._buffer[:length], self._buffer[length:]
        return Request(method, path, headers, content, self.number)

    async def _more(self) -> bool:
        self._news.clear()
        await self._news.wait()
        return not self.gone.is_set()

    # ---- answers --------------------------------------------------------------------------------

    def json(self, body: object, status: int = 200, **headers: str) -> None:
        self.whole(json.dumps(body).encode(), status, **headers)

    def whole(self, body: bytes, status: int = 200, **headers: str) -> None:
        head = {"content-type": "application/json", **headers, "content-length": str(len(body))}
        self.transport.write(_head(status, head) + body)

    def begin(self, content_type: str = "text/event-stream; charset=utf-8", **headers: str) -> None:
        """A chunked reply starts."""
        head = {"content-type": content_type, **headers, "transfer-encoding": "chunked"}
        self.transport.write(_head(200, head))

    def send(self, data: bytes) -> None:
        """Part of a chunked reply."""
        if data:
            self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self.transport.write(b"0\r\n\r\n")

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        sock: socket.socket = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
    return "\r\n".join(lines).encode()


class FakeServer:
    """Listens on a free port of 127.0.0.1. Subclasses answer."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.arrived = asyncio.Event()
        self.connections: list[Connection] = []
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listens; a second start, after a stop, takes the same port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def _accept(self) -> Connection:
        return Connection(self)

    async def stop(self) -> None:
        """Refuses new connections and closes those it has."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self.connections:
            if not connection.gone.is_set():
                connection.transport.abort()
                await connection.gone.wait()

    async def refuses(self, connection: Connection) -> bool:
        """Whether the connection dies under the request just read."""
        return False

    async def answer(self, request: Request, connection: Connection) -> None:
        raise NotImplementedError

    def asked(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path == path]

    async def request(self, path: str, number: int = 0, seconds: float = 5.0) -> Request:
        """The request with this number on a path, as soon as it is there."""
        return await self.arrival(lambda: self.asked(path), number, seconds)

    async def arrival(
        self, those: Callable[[], list[Request]], number: int, seconds: float
    ) -> Request:
        async with asyncio.timeout(seconds):
            while len(those()) <= number:
                self.arrived.clear()
                await self.arrived.wait()
        return those()[number]
