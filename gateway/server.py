"""Runs the application: listens, drains on SIGTERM, starts workers that share the port."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import structlog
from aiohttp import web
from prometheus_client.multiprocess import mark_process_dead

from gateway import metrics
from gateway.app import build_admin, build_app
from gateway.context import GATEWAY
from gateway.listening import runner_of
from gateway.reloading import RELOADER, Source
from gateway.settings import Settings, SettingsError
from gateway.tls import server_context

log = structlog.get_logger()

_WORKER_CHECK_S = 0.1


class ListenError(Exception):
    """The address can't be listened on."""


def run(settings: Settings, source: Source | None = None, *, worker: bool = False) -> None:
    """Serves until told to stop. Raises ListenError where the address can't be had."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(settings, source, worker=worker))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it can be had (not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve(settings: Settings, source: Source | None = None, *, worker: bool = False) -> None:
    """Serves until SIGTERM or SIGINT; then stops accepting and lets what runs finish.

    A worker shares its ports with others, and is told by their parent alone.
    """
    app = build_app(settings, source)
    tls = server_context(settings.tls)
    async with _runner(app, settings) as runner:
        site = await _listening(runner, settings.host, settings.port, tls, worker)
        app[RELOADER].listening = tls
        async with _admin(app, settings, worker):
            stop = _stop_signal(worker)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, app[RELOADER].ask)
            log.info("listening", url=f"{_address(runner, tls)}/v1")
            await stop.wait()
            await site.stop()
            await _drain(app, settings.timeouts.drain)


@asynccontextmanager
async def _admin(app: web.Application, settings: Settings, worker: bool) -> AsyncIterator[None]:
    """The second port, up until the last generation has ended."""
    admin = settings.admin
    if admin.port is None:
        yield
        return
    async with _runner(build_admin(app), settings) as runner:
        await _listening(runner, admin.host, admin.port, None, worker, "admin.")
        log.info("listening for operation", url=_address(runner, None))
        yield


@asynccontextmanager
async def _runner(app: web.Application, settings: Settings) -> AsyncIterator[web.AppRunner]:
    runner = runner_of(app, settings)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


async def _listening(
    runner: web.AppRunner,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    share: bool,
    section: str = "--",
) -> web.TCPSite:
    site = web.TCPSite(runner, host, port, ssl_context=tls, reuse_port=share or None, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise ListenError(
            f"can't listen on {host}:{port}: {error.strerror}; "
            f"choose another {section}host or {section}port"
        ) from error
    return site


def _address(runner: web.AppRunner, tls: ssl.SSLContext | None) -> str:
    host, port = runner.addresses[0][:2]
    return f"{'https' if tls else 'http'}://{host}:{port}"


def _stop_signal(worker: bool) -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # A terminal sends SIGINT to workers as well; they hear of it from their parent.
    numbers = (signal.SIGTERM,) if worker else (signal.SIGTERM, signal.SIGINT)

    def first() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            # A container's first process does not die of a signal that it leaves alone.
            alone = os.getpid() != 1
            signal.signal(number, signal.SIG_DFL if alone else _end_at_once)

    for number in numbers:
        loop.add_signal_handler(number, first)
    return stop


def _end_at_once(number: int, _: object) -> None:
    os._exit(128 + number)


async def _drain(app: web.Application, seconds: float) -> None:
    admission = app[GATEWAY].admission
    log.info("draining", generations=admission.taken, limit_s=seconds)
    if left := await admission.drain(seconds):
        log.warning("cut off", generations=left)


# ---- workers ------------------------------------------------------------------------------------


def serve_workers(count: int, arguments: Sequence[str]) -> int:
    """Runs `count` gateways on one port (SO_REUSEPORT); returns the exit status.

    That is the worst of theirs. One that ends by itself takes the others with it: whoever
    supervises us starts all anew.
    """
    command = [sys.executable, "-m", "gateway", *arguments, "--worker"]
    received: list[int] = []
    with _metrics_folder() as folder:
        env = {**os.environ, metrics.FOLDER: folder}
        with _noted(received):
            workers = [subprocess.Popen(command, env=env) for _ in range(count)]
        stops = _tend(workers, received, folder)
    if len(stops) > 1:
        return 128 + stops[-1]
    return max(_status(worker.returncode) for worker in workers)


def _status(code: int) -> int:
    """A worker's, as a shell has it; being told to end before it listened is no fault."""
    if code == -signal.SIGTERM:
        return 0
    return code if code >= 0 else 128 - code


@contextmanager
def _metrics_folder() -> Iterator[str]:
    """Where workers count, so that any of them can tell of all."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="relaygen-metrics-")
    except OSError as error:
        raise SettingsError(
            f"settings: workers: several count in a temporary folder, which can't be made: {error};"
            " let TMPDIR name a folder that can be written, or use one worker"
        ) from None
    with folder as path:
        yield path


@contextmanager
def _noted(received: list[int]) -> Iterator[None]:
    """Signals are noted, from the start on or (what workers must not die of) after the block."""

    def note(number: int, _: object) -> None:
        received.append(number)

    signal.signal(signal.SIGTERM, note)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # which workers inherit
    yield
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)


def _tend(workers: list[subprocess.Popen[bytes]], received: list[int], folder: str) -> list[int]:
    """Passes signals on until all workers have ended; returns those that asked for the end."""
    stops: list[int] = []
    told = False
    while living := [worker for worker in workers if worker.returncode is None]:
        while received:
            number = received.pop(0)
            if number == signal.SIGHUP:
                _tell(living, signal.SIGHUP)
                continue
            stops.append(number)
            if len(stops) > 1 or not told:  # a second one would cut off what still runs
                _tell(living, signal.SIGTERM)
            told = True
        ended = [worker for worker in living if worker.poll() is not None]
        for worker in ended:
            mark_process_dead(worker.pid, folder)  # type: ignore[no-untyped-call]
        if ended and not told:
            _tell(living, signal.SIGTERM)
            told = True
        time.sleep(_WORKER_CHECK_S)
    return stops


def _tell(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        worker.send_signal(number)
