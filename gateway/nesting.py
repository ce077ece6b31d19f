"""How deep JSON from outside may be nested. Pure."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 200
"""orjson reads 1,024 levels and writes 254, and Python's own stack ends between: ours come atop."""


def too_deep(content: bytes, value: Any) -> bool:
    """Whether `value`, read from `content`, has more levels than can be passed on."""
    if content.count(b"[") + content.count(b"{") <= MAX_DEPTH:
        return False
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        children = (v.values() if isinstance(v, dict) else v for v in level)
        level = [c for inside in children for c in inside if isinstance(c, dict | list)]
        if not level:
            return False
    return True
