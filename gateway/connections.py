"""The connections to all engines: kept open between requests, opened where none is at hand."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from dataclasses import dataclass
from ipaddress import ip_address
from socket import SOCK_STREAM
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohappyeyeballs

from gateway.errors import UnreachableError, UpstreamError
from gateway.http1 import Connection, DisconnectedError, Response
from gateway.settings import Timeouts

# uvicorn (vLLM, SGLang) and llama.cpp close a connection that was idle for 5 s; let go before.
KEEPALIVE_S = 4.0
_HAPPY_EYEBALLS_S = 0.25


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens. `url` is what people call it; `tls` is None for plain HTTP."""

    url: str
    host: str
    port: int
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None = None) -> Address:
        """`tls` says whom to trust, where the URL is https; by default whom the system trusts."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        context = (tls or ssl.create_default_context()) if secure else None
        return cls(url, parts.hostname or "", parts.port or (443 if secure else 80), context)


@dataclass(slots=True)
class Asked:
    """A request that was written, and the connection that its answer comes by."""

    address: Address
    request: bytes
    bodiless: bool
    connection: Connection
    fresh: bool
    """Whether that was opened for it."""


class Connections:
    """Use as an async context manager: its end closes them all."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._idle: defaultdict[Address, list[Connection]] = defaultdict(list)
        self._open: set[Connection] = set()
        self._leaving: dict[Connection, asyncio.TimerHandle] = {}
        self._opening: dict[Address, asyncio.Task[None]] = {}
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended = True
        replacing = list(self._opening.values())
        for task in replacing:
            task.cancel()
        await asyncio.gather(*replacing, return_exceptions=True)
        for connection in list(self._open):
            self._close(connection)

    @property
    def in_use(self) -> int:
        """Connections that have a request under way."""
        return len(self._open) - len(self._leaving)

    async def ask(self, address: Address, request: bytes, *, bodiless: bool = False) -> Asked:
        """Writes a request. `release` what it returns when done.

        `bodiless`: the answer is its head alone, whatever that says (HEAD).

        Raises UnreachableError where the engine can't be reached.
        """
        connection = self._at_hand(address)
        fresh = connection is None
        if connection is None:
            connection = await self._opened(address)
        connection.write(request, bodiless=bodiless)
        return Asked(address, request, bodiless, connection, fresh)

    async def answer(self, asked: Asked) -> Response:
        """The answer, from its head on.

        Raises UpstreamError where the engine can't be reached or breaks the connection.
        """
        while True:
            try:
                return await asked.connection.answer()
            except DisconnectedError as error:
                # An engine may close an idle connection just as we write to it. That one is gone
                # now; the others may be as dead, a fresh one is not.
                self._close(asked.connection)
                if asked.fresh:
                    raise UpstreamError(
                        f"The connection to the engine at {asked.address.url} broke: {error}",
                        code="engine_disconnected",
                    ).of("reset") from None
                again = await self.ask(asked.address, asked.request, bodiless=asked.bodiless)
                asked.connection, asked.fresh = again.connection, again.fresh

    def release(self, asked: Asked) -> None:
        """Keeps the connection for the next request where its answer is over, else closes it."""
        address, connection = asked.address, asked.connection
        if connection.reusable:
            connection.rest()
            self._keep(address, connection)
            return
        cut = connection.under_way and not self._ended
        self._close(connection)
        if cut and not self._idle[address] and address not in self._opening:
            self._opening[address] = asyncio.create_task(self._replace(address))

    async def _replace(self, address: Address) -> None:
        """Another in the place of one that was cut: the next request there will come soon."""
        try:
            self._keep(address, await self._opened(address))
        except UpstreamError:
            pass  # whoever needs one will be told
        finally:
            del self._opening[address]

    def _keep(self, address: Address, connection: Connection) -> None:
        self._idle[address].append(connection)
        loop = asyncio.get_running_loop()
        self._leaving[connection] = loop.call_later(KEEPALIVE_S, self._leave, address, connection)

    def _at_hand(self, address: Address) -> Connection | None:
        idle = self._idle[address]
        while idle:
            connection = idle.pop()
            self._leaving.pop(connection).cancel()
            if not connection.closed:
                return connection
            self._open.discard(connection)
        return None

    def _leave(self, address: Address, connection: Connection) -> None:
        del self._leaving[connection]
        self._idle[address].remove(connection)
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()

    async def _opened(self, address: Address) -> Connection:
        limit = self._timeouts.connect
        try:
            async with asyncio.timeout(limit):
                connection = await _connect(address, self._timeouts.idle)
        except TimeoutError:
            why = f"no connection within {limit:g} s (timeouts.connect)"
            raise _unreachable(address, why) from None
        except ssl.SSLCertVerificationError as error:
            raise UnreachableError(
                f"The certificate of the engine at {address.url} is not trusted "
                f"({error}); name its authority's file in the backend's `ca`",
                code="engine_unreachable",
            ) from error
        except OSError as error:
            raise _unreachable(address, str(error)) from error
        self._open.add(connection)
        return connection


def _unreachable(address: Address, why: str) -> UnreachableError:
    return UnreachableError(
        f"The engine at {address.url} can't be reached ({why}). Is it running?",
        code="engine_unreachable",
    )


async def _connect(address: Address, idle_s: float) -> Connection:
    loop = asyncio.get_running_loop()
    host, tls = address.host, address.tls
    if _is_ip(host):
        _, connection = await loop.create_connection(
            lambda: Connection(address.url, idle_s), host, address.port, ssl=tls
        )
        return connection
    found = await loop.getaddrinfo(host, address.port, type=SOCK_STREAM)
    socket = await aiohappyeyeballs.start_connection(
        found, happy_eyeballs_delay=_HAPPY_EYEBALLS_S, interleave=1, loop=loop
    )
    _, connection = await loop.create_connection(
        lambda: Connection(address.url, idle_s),
        sock=socket,
        ssl=tls,
        server_hostname=host if tls else None,
    )
    return connection


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
