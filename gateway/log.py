"""Structured logs. Every line carries the request id that is bound to the running request."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from gateway.settings import Log


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
