"""Fake engines over real sockets: their dialects, and their ways to misbehave."""

from tests.gateway.fakes.engines import FakeEngine, FakeLlamaCpp, FakeVllm
from tests.gateway.fakes.http import Connection, FakeServer, Request
from tests.gateway.fakes.script import (
    Error,
    Fin,
    Gate,
    Raw,
    Reset,
    Script,
    silence,
    story,
    writes,
)
from tests.gateway.fakes.tokens import Tokenizer

__all__ = [
    "Connection",
    "Error",
    "FakeEngine",
    "FakeLlamaCpp",
    "FakeServer",
    "FakeVllm",
    "Fin",
    "Gate",
    "Raw",
    "Request",
    "Reset",
    "Script",
    "Tokenizer",
    "silence",
    "story",
    "writes",
]
