"""Runs one llama.cpp engine on 127.0.0.1 until its stdin closes, so it never outlives its parent.

    python -m gateway.demo.llamacpp --model FILE --alias NAME [--port N] [--threads N] ...

Prints `ready URL` on stdout when it listens. Ends with status 0 when stdin closes, on SIGTERM and
on Ctrl-C; with status 1 and a reason on stderr when it can't start.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_WAKES_S = 0.5
_ERRORS_ONLY = -1  # below llama.cpp's lowest level of the messages that every start prints


class EngineError(Exception):
    """The engine can't start; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the engine. Returns 1 where it can't start; once it listens, it ends the process."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _quit)
    signal.signal(signal.SIGINT, _quit)
    try:
        server = start(options)
    except EngineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"ready {server.listening_address}\n")
    sys.stdout.flush()
    _wait_for_end_of_stdin()
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
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.context * options.parallel  # llama.cpp divides it among the slots
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.prefill_threads or options.threads
    params.cache_ram_mib = 0  # a cache shared by slots would let one run profit from another
    params.warmup = True
    params.verbosity = _ERRORS_ONLY
    return params


def _wait_for_end_of_stdin() -> None:
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
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FILE", help="GGUF file")
    add("--alias", required=True, metavar="NAME", help="model name that clients ask for")
    add("--port", type=int, default=0, metavar="N", help="0 takes a free one (default)")
    add("--threads", type=int, default=1, metavar="N", help="for decoding (default %(default)s)")
    add("--prefill-threads", type=int, metavar="N", help="for prompts (default: as --threads)")
    add("--parallel", type=int, default=1, metavar="N", help="streams at once (default 1)")
    add("--context", type=int, default=2048, metavar="N", help="tokens a stream (default 2048)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
