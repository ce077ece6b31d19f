"""Simulated engines: the fakes of every dialect, writing transcripts a token at a time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.chaos.transcripts import continuation, question_in
from tests.gateway.fakes import (
    Connection,
    FakeEngine,
    FakeLlamaCpp,
    FakeSglang,
    FakeTgi,
    FakeVllm,
    Request,
    Tokenizer,
)
from tests.gateway.fakes.decode import Decode, Reply, Sink, Stream, Whole
from tests.gateway.fakes.script import Act


class Writer(FakeEngine):
    """Goes on with the transcript that the prompt has begun; a pause before every token."""

    pace_s = 0.0005

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.strays: list[str] = []
        """Prompts that were no beginning of a transcript: the gateway lost or made up something."""

    async def _decode(self, request: Request, connection: Connection) -> None:
        reply = self.reply(request)
        try:
            acts: list[Act] = [*continuation(self.prompt_bytes(reply.prompt))]
        except AssertionError as error:
            self.strays.append(str(error))
            connection.json({"error": {"message": str(error), "code": 500}}, 500)
            return
        streams = self.streams(request)
        sink: Sink = Stream(self, connection, reply) if streams else Whole(connection, reply)
        await self.run(reply, acts, sink)

    async def run(self, reply: Reply, acts: list[Act], sink: Sink) -> None:
        decode = _Paced(reply, sink, self.tokenizer, self.tokens_per_chunk)
        decode.pace_s = self.pace_s
        await decode.run(acts)

    def prompt_bytes(self, ids: list[int]) -> bytes:
        return b"".join(map(self.tokenizer.piece, ids))

    def trial_of(self, request: bytes) -> int | None:
        """The trial that a request's body belongs to, if it shows its question."""
        question = question_in(request) or question_in(self._decoded(request))
        return question.trial if question else None

    def _decoded(self, request: bytes) -> bytes:
        try:
            prompt = json.loads(request).get("prompt")
        except ValueError:
            return b""
        ids = [i for i in prompt if isinstance(i, int)] if isinstance(prompt, list) else []
        return self.prompt_bytes(ids)


class _Paced(Decode):
    pace_s = 0.0

    async def _step(self, act: Act) -> str | None:
        await asyncio.sleep(self.pace_s)
        return await super()._step(act)


class _Vllm(FakeVllm, Writer):
    pass


class _LlamaCpp(FakeLlamaCpp, Writer):
    pass


class _Sglang(FakeSglang, Writer):
    pass


class _Tgi(FakeTgi, Writer):
    pass


DIALECTS: dict[str, type[Writer]] = {
    "vllm": _Vllm,
    "llamacpp": _LlamaCpp,
    "sglang": _Sglang,
    "tgi": _Tgi,
}


def engine(dialect: str, model: str, tokenizer: Tokenizer, **options: Any) -> Writer:
    return DIALECTS[dialect](model=model, tokenizer=tokenizer, **options)
