"""Estimates of token counts, for servers that neither count nor tokenize.

`tiktoken` counts, once its encoding is loaded: it fetches it at first use, and no request waits for
that. Until then, or without a network for good, four characters make a token (OpenAI's rule of
thumb).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache

_ENCODING = "o200k_base"
_CHARS_A_TOKEN = 4


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has: at least one, unless it is empty."""
    return _estimator().count(text) if text else 0


def estimate_method() -> str:
    """What `estimate_tokens` counts by now."""
    return _estimator().method


def load_encoding() -> None:
    """Loads tiktoken's encoding in the background, from its cache or the network."""
    _estimator().load()


class Estimator:
    """Counts by characters until its encoding is there."""

    def __init__(self, encoder: Callable[[], Callable[[str], int]]) -> None:
        self._encoder = encoder
        self._count: Callable[[str], int] | None = None
        self._thread: threading.Thread | None = None

    @property
    def method(self) -> str:
        return _ENCODING if self._count else f"{_CHARS_A_TOKEN} characters a token"

    def count(self, text: str) -> int:
        return self._count(text) if self._count else -(-len(text) // _CHARS_A_TOKEN)

    def load(self) -> threading.Thread:
        """Starts to load, once; a daemon, as tiktoken's fetch has no time-out."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, name="encoding", daemon=True)
            self._thread.start()
        return self._thread

    def _load(self) -> None:
        try:
            self._count = self._encoder()
        except (ImportError, OSError, ValueError):  # requests' errors are OSErrors
            self._count = None


def _tiktoken() -> Callable[[str], int]:
    import tiktoken

    encoding = tiktoken.get_encoding(_ENCODING)
    return lambda text: len(encoding.encode(text, disallowed_special=()))


@lru_cache(maxsize=1)
def _estimator() -> Estimator:
    return Estimator(_tiktoken)
