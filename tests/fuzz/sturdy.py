"""Fake engines that answer with an error what they can't make sense of, as real ones do."""

from __future__ import annotations

from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Request, Script, story
from tests.gateway.fakes.http import Connection
from tests.gateway.support import STORY


class _Sturdy(FakeEngine):
    async def answer(self, request: Request, connection: Connection) -> None:
        try:
            await super().answer(request, connection)
        except Exception as error:  # noqa: BLE001 - whatever it trips over
            # Not 500, which the fuzzers look for.
            connection.json({"error": {"message": type(error).__name__}}, 501)
            connection.close()


class SturdyVllm(_Sturdy, FakeVllm):
    pass


class SturdyLlamaCpp(_Sturdy, FakeLlamaCpp):
    pass


def any_prompt() -> Script:
    """The story from wherever the prompt has come to, and a few words after any other prompt."""
    told = story(*STORY)

    def go_on(prompt: str) -> list[str | bytes]:
        try:
            return list(told(prompt))
        except AssertionError:
            return [" ok", "."]

    return go_on
