"""Does the steps that stdin asks for: a JSON object a line in, a JSON value a line out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

_runner = asyncio.Runner()  # one loop for all steps: some clients keep connections between them


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _runner.run(coroutine)


def do(*steps: Callable[..., Any]) -> None:
    """Runs until stdin closes. `{"step": NAME, ...}` calls the function of that name."""
    out, sys.stdout = sys.stdout, sys.stderr  # clients print there at times
    by_name = {step.__name__: step for step in steps}
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            told = by_name[arguments.pop("step")](**arguments)
        except Exception as error:  # noqa: BLE001, the test says which it expects
            told = raised(error)
        out.write(json.dumps(told) + "\n")
        out.flush()


def raised(error: Exception) -> dict[str, Any]:
    """An exception: its classes' names, the most derived first, and what an SDK tells with it."""
    return {
        "raised": [kind.__name__ for kind in type(error).__mro__],
        "packages": [kind.__module__.partition(".")[0] for kind in type(error).__mro__],
        "status": getattr(error, "status_code", None),
        "body": getattr(error, "body", None),
        "message": str(error),
    }
