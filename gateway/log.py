"""Structured logs. Every line carries the request id that is bound to the running request."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor

from gateway.settings import Log


def harmless(logger: object, method: str, event: EventDict) -> EventDict:
    """Escapes what would rule the terminal or begin a line of its own, in every text and name.

    A traceback keeps its lines, each indented, so that none of them looks like a line of the log.
    """
    trace = event.pop("exception", None)
    escaped = {_escaped(str(name)): _within(value) for name, value in event.items()}
    if trace is not None:
        lines = (_escaped(line) for line in str(trace).split("\n"))
        escaped["exception"] = "\n".join(f"    {line}" for line in lines)
    return escaped


def _within(value: object) -> object:
    match value:
        case str():
            return _escaped(value)
        case dict():
            return {_within(name): _within(inner) for name, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_within(inner) for inner in value]
        case None | bool() | int() | float():
            return value
    return _escaped(repr(value))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def configure(settings: Log) -> None:
    """Set structlog up for the whole process, to standard error."""
    console = settings.format == "console" or (settings.format == "auto" and sys.stderr.isatty())
    renderer: Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        *([harmless] if console else []),  # JSON escapes by itself
        renderer,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.level.upper()]
        ),
        # One write a line: print() makes two, and workers share standard error.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
