"""Runs one llama.cpp engine until its stdin closes, so it never outlives its parent.

    python -m gateway.demo.llamacpp --model FILE --alias NAME [--port N] [--threads N] ...
    relaygen engine ROLE [--host HOST] [--port N] ...

Prints `ready URL` on stdout when it listens. Ends with status 0 when stdin closes (the second form
goes on then), on SIGTERM and on Ctrl-C; with status 1 and a reason on stderr when it can't start.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.demo.paths import PairRole, bundled_model

_WAKES_S = 0.5
_MOST = 2**20
_ERRORS_ONLY = -1  # below llama.cpp's lowest level of the messages that every start prints


class EngineError(Exception):
    """The engine can't start; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    return run(_parser().parse_args(argv), _until_stdin_ends)


def serve_bundled(options: argparse.Namespace) -> int:
    """`relaygen engine`: one model of the bundled tiny pair, until told to stop."""
    role: PairRole = options.role
    options.model, options.alias = bundled_model(role), f"tiny-{role}"
    options.prefill_threads = None
    return run(options, _for_ever)


def run(options: argparse.Namespace, wait: Callable[[], None]) -> int:
    """Serves until `wait` returns. Returns 1 where it can't start; else it ends the process."""
    signal.signal(signal.SIGTERM, _quit)
    signal.signal(signal.SIGINT, _quit)
    try:
        server = start(options)
    except EngineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"ready {server.listening_address}\n")
    sys.stdout.flush()
    wait()
    _exit_now()
    return 0


def start(options: argparse.Namespace) -> Any:
    """A listening xllamacpp Server; its `listening_address` has the port it got."""
    if not options.model.is_file():
        raise EngineError(f"no model file at {options.model}")
    params = _params(options)
    from xllamacpp import Server

    try:
        return Server(params)
    except RuntimeError as error:
        where = f"port {options.port}" if options.port else "a free port"
        raise EngineError(
            f"llama.cpp could not serve {options.model} on {where} ({error}); "
            "check that the file is a GGUF model and that the port is free"
        ) from error


def _params(options: argparse.Namespace) -> Any:
    try:
        from xllamacpp import CommonParams
    except ImportError as error:
        raise EngineError(
            "llama.cpp for Python is not installed; run: pip install 'relaygen[demo]'"
        ) from error
    params = CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.alias}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.context * options.parallel  # llama.cpp divides it among the slots
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.prefill_threads or options.threads
    params.cache_ram_mib = 0  # a cache shared by slots would let one run profit from another
    params.warmup = True
    params.verbosity = _ERRORS_ONLY
    return params


def _for_ever() -> None:
    while True:
        time.sleep(_WAKES_S)


def _until_stdin_ends() -> None:
    """Wakes up now and then: a signal that came just before a wait, or to one of the engine's
    threads, does not end the wait, and its handler runs after it only."""
    with suppress(OSError, ValueError):
        stdin = sys.stdin.fileno()
        while not select.select([stdin], [], [], _WAKES_S)[0] or os.read(stdin, 4096):
            pass


def _quit(_signal: int, _frame: FrameType | None) -> None:
    _exit_now()


def _exit_now() -> None:
    """Skips the engine's own shutdown, which waits for open streams; it has nothing to save."""
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gateway.demo.llamacpp", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="GGUF file")
    parser.add_argument("--alias", required=True, metavar="NAME", help="model name for clients")
    parser.add_argument("--prefill-threads", type=int, metavar="N", help="for prompts (--threads)")
    _common_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `relaygen engine`."""
    parser.add_argument("role", choices=("large", "small"), help="which of the two models")
    _common_arguments(parser)


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    number = partial(_within, 1, _MOST)
    port = partial(_within, 0, 65535)
    add("--port", type=port, default=0, metavar="N", help="0 takes a free one (default)")
    add("--threads", type=number, default=1, metavar="N", help="for decoding (default 1)")
    add("--parallel", type=number, default=1, metavar="N", help="streams at once (default 1)")
    add("--context", type=number, default=2048, metavar="N", help="tokens a stream (default 2048)")


def _within(least: int, most: int, given: str) -> int:
    """Raises ArgumentTypeError."""
    if not given.isdecimal() or not least <= int(given) <= most:
        raise argparse.ArgumentTypeError(f"{given!r} is no whole number from {least} to {most}")
    return int(given)


if __name__ == "__main__":
    sys.exit(main())
