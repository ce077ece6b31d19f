"""Runs a Python module that ends when its stdin closes, so it never outlives its parent.

python -m gateway.demo.tether MODULE [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress

_GRACE_S = 5.0


def _follow_stdin() -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


def main() -> None:
    """Runs the module named by the first argument as `python -m` would, tethered to stdin."""
    threading.Thread(target=_follow_stdin, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
