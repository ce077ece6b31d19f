"""Runs a check on made-up input until its time is over, against a gateway in a thread of its own.

`FUZZ_SECONDS` is the time of each of the parts, `FUZZ_SEED` replays a run that has failed.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from gateway import log
from gateway.settings import Log
from tests.gateway.support import Served, Stage

SECONDS = float(os.environ.get("FUZZ_SECONDS") or 20)
WAIT_S = 15.0
"""No answer may take longer, on a busy machine as well."""
LEAKS = (b"Traceback (most recent", b'File "', b"site-packages", b"/gateway/", b".py:")
"""What no client may see of us."""


def fuzz(check: Callable[..., None], *given_by: st.SearchStrategy[Any], share: float = 1.0) -> None:
    """Checks what the strategies make up, round after round, for its `share` of the time."""
    end = time.monotonic() + SECONDS * share
    first = int(os.environ.get("FUZZ_SEED") or random.randrange(2**32))
    options = settings(
        max_examples=100,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.target, Phase.shrink],
    )
    failed = False

    @wraps(check)
    def in_time(*made_up: Any, **named: Any) -> None:
        nonlocal failed
        if not failed and time.monotonic() > end:
            return  # an engine that answers junk is asked again for seconds
        try:
            check(*made_up, **named)
        except BaseException:
            failed = True
            raise

    for number in itertools.count(first):
        try:
            seed(number)(options(given(*given_by)(in_time)))()
        except BaseException:
            print(f"\nreplay with FUZZ_SEED={number}")
            raise
        if time.monotonic() > end:
            print(f"\n{number - first + 1} rounds of at most 100, seeds from {first}")
            return


# ---- a gateway for tests that are not coroutines ------------------------------------------------


@dataclass(frozen=True)
class Running:
    """What `start` returned, served by a loop in another thread."""

    served: Served
    loop: asyncio.AbstractEventLoop

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(WAIT_S)


@contextmanager
def background(folder: Path, start: Callable[[Stage], Awaitable[Served]]) -> Iterator[Running]:
    log.configure(Log(level="error", format="json"))  # a client's errors are no news here
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()

    def run(awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, loop).result(2 * WAIT_S)

    async def started() -> Served:
        return await start(Stage(folder, stack))

    try:
        yield Running(run(started()), loop)
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# ---- a client -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def ask(
    url: str, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
) -> Answer:
    """One request on a connection of its own. TimeoutError where the answer doesn't come."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()


def exchange(url: str, *writes: bytes) -> bytes:
    """What comes back for raw bytes, until the gateway closes: the client says it has no more."""
    host = urlsplit(url)
    with socket.create_connection((host.hostname, host.port), timeout=WAIT_S) as connection:
        try:
            for data in writes:
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except TimeoutError:
            raise
        except OSError:  # it has closed before all was sent
            return b""


def alive(url: str) -> None:
    assert ask(url, "GET", "/healthz").json == {"status": "alive"}


# ---- what every answer keeps to -----------------------------------------------------------------


def proper(answer: Answer, path: str, method: str = "POST") -> None:
    """No fault of ours, no word about our insides, and errors in the shape of the client's API."""
    assert answer.status != 500, answer.content
    assert not [leak for leak in LEAKS if leak in answer.content]
    assert answer.headers["x-request-id"]
    if answer.status >= 400 and method != "HEAD":
        if answer.headers["x-relaygen-mode"] != "passthrough":  # that may be an engine's own
            error_shaped(answer.json, anthropic=path.startswith("/v1/messages"))
    elif "text/event-stream" in (answer.headers["content-type"] or ""):
        ended(answer.content)


def error_shaped(body: Any, *, anthropic: bool) -> None:
    error = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    if anthropic:
        assert body["type"] == "error"
    else:
        assert {"param", "code"} <= error.keys()


def ended(stream: bytes) -> None:
    """The stream says itself how it ended: by an end of its API's own, or by an error."""
    last = [event for event in stream.split(b"\n\n") if b"data:" in event][-1]
    ends = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b'"error"')
    assert any(end in last for end in ends), stream[-500:]
