"""What is read of whole answers of engines: UpstreamError where it is not what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.errors import UpstreamError

MISREAD = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading JSON of another shape than is expected raises."""


def ids_in(answer: Any, key: str, url: str) -> tuple[int, ...]:
    """The token ids in a field."""
    ids = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _odd(url, f"no list of token ids in `{key}`")
    return tuple(ids)


def text_in(answer: Any, key: str, url: str) -> str:
    """The text in a field."""
    text = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(text, str):
        raise _odd(url, f"no text in `{key}`")
    return text


def objects_of(answer: Any, url: str) -> list[dict[str, Any]]:
    """An answer that is a list of objects, each with an `id` that is a number."""
    if not isinstance(answer, list) or not all(
        isinstance(item, dict) and type(item.get("id")) is int for item in answer
    ):
        raise _odd(url, "no list of tokens")
    return answer


@contextmanager
def reading(url: str, what: str) -> Iterator[None]:
    """Around code that takes an engine's JSON to have the shape that it should."""
    try:
        yield
    except MISREAD as error:
        raise UpstreamError(f"The engine at {url} sent {what} that can't be read: {error!r}") from (
            error
        )


def _odd(url: str, why: str) -> UpstreamError:
    return UpstreamError(f"The engine at {url} answered oddly: {why}", code="engine_misread")
