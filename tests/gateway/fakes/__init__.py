"""Fake engines over real sockets: their dialects, and their ways to misbehave."""

from tests.gateway.fakes.engines import FakeEngine
from tests.gateway.fakes.hosted import FakeHosted
from tests.gateway.fakes.http import Connection, FakeServer, Request
from tests.gateway.fakes.llamacpp import FakeLlamaCpp
from tests.gateway.fakes.script import (
    Error,
    Fin,
    Gate,
    Raw,
    Reset,
    Script,
    ToolCall,
    silence,
    story,
    writes,
)
from tests.gateway.fakes.sglang import FakeSglang
from tests.gateway.fakes.tgi import FakeTgi
from tests.gateway.fakes.tokens import Tokenizer
from tests.gateway.fakes.vllm import FakeVllm

__all__ = [
    "Connection",
    "Error",
    "FakeEngine",
    "FakeHosted",
    "FakeLlamaCpp",
    "FakeServer",
    "FakeSglang",
    "FakeTgi",
    "FakeVllm",
    "Fin",
    "Gate",
    "Raw",
    "Request",
    "Reset",
    "Script",
    "Tokenizer",
    "ToolCall",
    "silence",
    "story",
    "writes",
]
