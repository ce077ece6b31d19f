"""Fake engines that also score: one made-up model behind the three dialects that can."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from tests.gateway.fakes import FakeLlamaCpp, FakeSglang, FakeVllm
from tests.gateway.fakes.engines import COMPLETIONS
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.fakes.tokens import Tokenizer

NEVER = 7
"""An id that no token has: what the model would say where it does not agree."""


def judged(tokenizer: Tokenizer, prefix: Sequence[int], token: int) -> list[tuple[int, float]]:
    """The two likeliest after a prefix, which is all that they depend on, and on agreeing."""
    number = zlib.crc32(tokenizer.decode(prefix).encode())
    first, second = -0.01 - (number % 50) / 100, -1.0 - (number % 7) / 2
    likeliest = [(token, first), (NEVER, second)]
    return likeliest if number % 3 else [(NEVER, first), (token, second)]


def words(prompt: str) -> Iterable[str]:
    """A generation that depends on the question."""
    question = prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
    thought = [f" {word}" for word in question.split()]
    return ["<think>", "\n", "We", *thought, ".", " So", *thought[:2], "</think>", " Done", "."]


class _Scoring:
    """Counts what runs at once, and is slow if told so."""

    delay_s = 0.0
    busy = most = 0
    judging = 0
    """Requests that scored."""

    async def answer(self, request: Request, connection: Connection) -> None:
        slow = request.path in (COMPLETIONS, "/generate", "/completion")
        self.busy += slow
        self.most = max(self.most, self.busy)
        try:
            if slow and self.delay_s:
                await asyncio.sleep(self.delay_s)
            await super().answer(request, connection)  # type: ignore[misc]
        finally:
            self.busy -= slow


class ScoringVllm(_Scoring, FakeVllm):
    async def _answer(self, request: Request, connection: Connection) -> None:
        if request.path != COMPLETIONS or "prompt_logprobs" not in request.body:
            await super()._answer(request, connection)
            return
        self.judging += 1
        ids = request.body["prompt"]
        assert len(ids) < self.context
        entries = [None, *(self._entry(ids, at) for at in range(1, len(ids)))]
        connection.json({"choices": [{"text": "x", "prompt_logprobs": entries}]})

    def _entry(self, ids: list[int], at: int) -> dict[str, Any]:
        top = judged(self.tokenizer, ids[:at], ids[at])
        return {str(i): {"logprob": lp, "rank": r} for r, (i, lp) in enumerate(top, 1)}


class ScoringSglang(_Scoring, FakeSglang):
    async def other(self, request: Request, connection: Connection) -> None:
        if request.path != "/generate":
            await super().other(request, connection)
            return
        self.judging += 1
        body = request.body
        ids, start = body["input_ids"], body["logprob_start_len"]
        tops: list[Any] = [None]
        for at in range(start + 1, len(ids)):
            tops.append([(lp, i, None) for i, lp in judged(self.tokenizer, ids[:at], ids[at])])
        connection.json({"text": "x", "meta_info": {"input_top_logprobs": tops}})


class ScoringLlamaCpp(_Scoring, FakeLlamaCpp):
    """`knows_ids`: grammars may name tokens. A text is else forced one character a token where
    `splits`, as a model may that likes other tokens better."""

    knows_ids = True
    knows_text = True
    splits: str | None = None
    unsure = False
    """Speculative decoding: no probabilities."""

    async def other(self, request: Request, connection: Connection) -> None:
        if request.path != "/completion":
            await super().other(request, connection)
            return
        self.judging += 1
        grammar = request.body.get("grammar")
        if refusal := self._refusal(grammar):
            connection.json({"error": {"code": 400, "message": refusal}}, 400)
            return
        prefix = list(request.body["prompt"])
        forced = self._forced(grammar)[: request.body["n_predict"]]
        if len(forced) < request.body["n_predict"]:
            forced.append(self.tokenizer.eos)
        # What is forced has no say in what is likeliest.
        entries = [
            self._entry(prefix + forced[:at], token)
            for at, token in enumerate(forced)
            if self._shown(token)
        ]
        connection.json({"tokens": forced, "completion_probabilities": entries})

    def _refusal(self, grammar: str | None) -> str | None:
        if grammar is None:
            return None
        by_ids = "<[" in grammar
        able = self.knows_ids if by_ids else self.knows_text
        if able and not (by_ids and not all(map(self._shown, self._forced(grammar)))):
            return None
        return "Failed to parse grammar"

    def _forced(self, grammar: str | None) -> list[int]:
        if grammar is None:
            return []
        if "<[" in grammar:
            return [int(i) for i in re.findall(r"<\[(\d+)\]>", grammar)]
        text = grammar.removeprefix('root ::= "').removesuffix('"')
        text = text.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
        if self.splits and self.splits in text:
            before, _, after = text.partition(self.splits)
            encode = self.tokenizer.encode
            letters = [self.tokenizer.id_of(letter) for letter in self.splits]
            return encode(before) + letters + encode(after)
        return self.tokenizer.encode(text)

    def _shown(self, token: int) -> bool:
        """Tokens that are no whole character have no entry."""
        return self.tokenizer.piece(token).isascii()

    def _entry(self, prefix: list[int], token: int) -> dict[str, Any]:
        top = self.tops(prefix)
        return {"id": token, "top_logprobs": [{"id": i, "logprob": lp} for i, lp in top]}

    def tops(self, prefix: list[int]) -> list[tuple[int, float]]:
        return [] if self.unsure else judged(self.tokenizer, prefix, self.expected(prefix))

    def expected(self, prefix: list[int]) -> int:
        """The token of the trace that a prefix leads to."""
        return self.next_of.get(tuple(prefix), NEVER)

    def learn(self, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """What the traces have after each prefix."""
        whole = [*prompt, *ids]
        for at in range(len(prompt), len(whole)):
            self.next_of[tuple(whole[:at])] = whole[at]

    @property
    def next_of(self) -> dict[tuple[int, ...], int]:
        known: dict[tuple[int, ...], int] = self.__dict__.setdefault("_next_of", {})
        return known
