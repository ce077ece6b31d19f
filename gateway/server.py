"""Runs the application: listens, drains on SIGTERM, starts workers that share the port."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import structlog
from aiohttp import web

from gateway.app import build_app
from gateway.context import GATEWAY
from gateway.listening import runner_of
from gateway.settings import Settings

log = structlog.get_logger()

_WORKER_CHECK_S = 0.2


class ListenError(Exception):
    """The address can't be listened on."""


def run(settings: Settings, *, share_port: bool = False) -> None:
    """Serves until told to stop. Raises ListenError where the address can't be had."""
    asyncio.run(serve(settings, share_port=share_port))


async def serve(settings: Settings, *, share_port: bool = False) -> None:
    """Serves until SIGTERM or SIGINT; then stops accepting and lets what runs finish."""
    app = build_app(settings)
    runner = runner_of(app, settings)
    await runner.setup()
    try:
        site = web.TCPSite(
            runner, settings.host, settings.port, reuse_port=share_port or None, backlog=1024
        )
        try:
            await site.start()
        except OSError as error:
            raise ListenError(
                f"can't listen on {settings.host}:{settings.port}: {error.strerror}; "
                "choose another --host or --port"
            ) from error
        host, port = runner.addresses[0][:2]
        stop = _stop_signal()
        log.info("listening", url=f"http://{host}:{port}/v1")
        await stop.wait()
        await site.stop()
        await _drain(app, settings.timeouts.drain)
    finally:
        await runner.cleanup()


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def first() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, first)
    return stop


async def _drain(app: web.Application, seconds: float) -> None:
    admission = app[GATEWAY].admission
    log.info("draining", generations=admission.taken, limit_s=seconds)
    if left := await admission.drain(seconds):
        log.warning("cut off", generations=left)


def serve_workers(count: int, arguments: Sequence[str]) -> int:
    """Runs `count` gateways on one port (SO_REUSEPORT); the worst exit status of them.

    One that ends by itself takes the others with it: whoever supervises us starts all anew.
    """
    command = [sys.executable, "-m", "gateway", *arguments, "--worker"]
    workers: list[subprocess.Popen[bytes]] = []
    told = False

    def stop(number: int, _: object) -> None:
        nonlocal told
        told = True
        for worker in workers:
            worker.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    # A terminal sends it to the workers as well. Not SIG_IGN: they would inherit that.
    signal.signal(signal.SIGINT, lambda number, _: None)
    workers.extend(subprocess.Popen(command) for _ in range(count))
    while all(worker.poll() is None for worker in workers):
        time.sleep(_WORKER_CHECK_S)
    if not told:  # a second signal would cut off what the others let finish
        stop(signal.SIGTERM, None)
    return max(abs(worker.wait()) for worker in workers)
