"""Teacher forcing by dialect: how a model would have gone on at every token of a given text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from gateway.calibrate.sides import Connected
from gateway.errors import GatewayError, RequestError, UpstreamError
from relaygen.calibration.margins import margin


class Value(NamedTuple):
    """At one token: p(top-1) - p(top-2), 0..1, raw, and whether the token is top-1.

    None where it is unknown.
    """

    margin: float | None
    hit: bool | None


UNKNOWN = Value(None, None)


class Top(NamedTuple):
    """The alternatives at one position, as (id, logprob)."""

    alternatives: tuple[tuple[int, float], ...]

    def value(self, token: int) -> Value:
        """Of a token at this position."""
        found = margin([logprob for _, logprob in self.alternatives])
        if found is None:
            return UNKNOWN
        likeliest = max(self.alternatives, key=lambda pair: pair[1])[0]
        return Value(found, likeliest == token)


class Scorer(ABC):
    def __init__(self, side: Connected) -> None:
        self.side = side
        self._texts: dict[int, str] = {}

    @property
    def room(self) -> int | None:
        """Tokens that it can be given, prompt and all; None where there is no limit known."""
        context = self.side.info.context
        return None if context is None else context - 1

    async def values(self, prompt: Sequence[int], ids: Sequence[int]) -> list[Value]:
        """One value for each of `ids`, after `prompt`. Those beyond its context are unknown."""
        fits = ids if self.room is None else ids[: max(0, self.room - len(prompt))]
        found = await self._read(prompt, fits) if fits else []
        return [*found, *[UNKNOWN] * (len(ids) - len(found))]

    async def _read(self, prompt: Sequence[int], ids: Sequence[int]) -> list[Value]:
        try:
            found = await self._values(list(prompt), list(ids))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            url = self.side.engine.url
            raise UpstreamError(f"{url} told no scores that can be read: {error!r}") from error
        if len(found) != len(ids):
            url = self.side.engine.url
            raise UpstreamError(f"{url} scored {len(found)} of {len(ids)} tokens")
        return found

    @abstractmethod
    async def _values(self, prompt: list[int], ids: list[int]) -> list[Value]: ...

    async def cut(self, text: str) -> tuple[tuple[int, ...], list[str]]:
        """A text as the scorer's tokens, and the text of each: U+FFFD where it is no character."""
        ids = await self.side.engine.tokenize(self.side.model, text)
        return ids, [await self.token_text(i) for i in ids]

    async def token_text(self, token: int) -> str:
        """The text of one id by itself, asked for once."""
        if token not in self._texts:
            engine = self.side.engine
            self._texts[token] = await engine.detokenize(self.side.model, (token,))
        return self._texts[token]


class VllmScorer(Scorer):
    """`prompt_logprobs` of one request: the two likeliest and the token itself, at each position.

    The server computes them over the whole vocabulary for all of a prefill step: where memory is
    short, start it with a lower --max-num-batched-tokens.
    """

    async def _values(self, prompt: list[int], ids: list[int]) -> list[Value]:
        body = {
            "model": self.side.engine.wire_model(self.side.model),
            "prompt": prompt + ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 2,
        }
        answer = await self.side.engine.upstream.post("/v1/completions", body)
        # One entry for each token of the prompt; the first has none before it: null.
        entries = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
        return [
            UNKNOWN if entry is None else _vllm_top(entry).value(token)
            for entry, token in zip(entries, ids, strict=True)
        ]


def _vllm_top(entry: dict[str, dict[str, Any]]) -> Top:
    return Top(tuple((int(token), told["logprob"]) for token, told in entry.items()))


class SglangScorer(Scorer):
    """`/generate` with the logprobs of its input, from the last token of the prompt on."""

    async def _values(self, prompt: list[int], ids: list[int]) -> list[Value]:
        body = {
            "input_ids": prompt + ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            # The entry at the start itself is always null.
            "logprob_start_len": max(0, len(prompt) - 1),
            "top_logprobs_num": 2,
        }
        answer = await self.side.engine.upstream.post("/generate", body)
        tops = answer["meta_info"]["input_top_logprobs"][-len(ids) :]
        return [
            UNKNOWN if not top else Top(tuple((int(i), lp) for lp, i, *_ in top)).value(token)
            for top, token in zip(tops, ids, strict=True)
        ]


class Forcing(Enum):
    """How a llama.cpp server is made to write given tokens: what it was not refused so far."""

    IDS = 1
    TEXT = 2
    NOT = 3


# Where a grammar allows no token at all (b11549).
_NO_WAY_ON = "empty grammar stack"


class LlamaCppScorer(Scorer):
    """A grammar forces the tokens; the probabilities that are told are those before it.

    Newer servers' grammars name tokens by id, older ones' give a text, which may come out as other
    tokens than it was: then it goes on from the first difference, whose place is still scored.
    A token that is no whole character can't be forced, and is scored as the one after a prefix.
    """

    forcing = Forcing.IDS

    async def _values(self, prompt: list[int], ids: list[int]) -> list[Value]:
        values: list[Value] = []
        while len(values) < len(ids):
            at = len(values)
            run = await self._run(ids, at)
            tokens, tops = await self._forced(prompt + ids[:at], run)
            same = _common(tokens, ids[at:])
            # What comes after the last one that is the same was judged from the same prefix.
            judged = zip(tops[: same + 1], ids[at : at + same + 1], strict=False)
            new = [top.value(token) if top else UNKNOWN for top, token in judged]
            values += new or [UNKNOWN]
        return values

    async def _run(self, ids: list[int], at: int) -> list[int]:
        """The tokens from there on that can be forced in one go."""
        if self.forcing is Forcing.NOT:
            return []
        end = at
        while end < len(ids) and await self._whole(ids[end]):
            end += 1
        return ids[at:end]

    async def _whole(self, token: int) -> bool:
        """Whether a token is text by itself: no part of a character, and not an end of turn."""
        text = await self.token_text(token)
        return bool(text) and "\ufffd" not in text

    async def _forced(
        self, prefix: list[int], run: list[int]
    ) -> tuple[list[int], list[Top | None]]:
        """The tokens that came, and the alternatives at each; one more than forced, if there is."""
        while run:
            how = self.forcing
            try:
                return await self._ask(prefix, len(run) + 1, await self._grammar(run, how))
            except GatewayError as error:
                if not _of_grammar(error):
                    raise
                run = self._less(how, run, error)
        return await self._ask(prefix, 1, None)

    def _less(self, how: Forcing, run: list[int], error: GatewayError) -> list[int]:
        """What to force after a refusal; others may have been refused the same meanwhile."""
        if _NO_WAY_ON in error.message:
            return []  # of these tokens, not of all grammars
        if self.forcing is how:
            self.forcing = Forcing.TEXT if how is Forcing.IDS else Forcing.NOT
        return [] if self.forcing is Forcing.NOT else run

    async def _grammar(self, run: list[int], how: Forcing) -> str:
        if how is Forcing.IDS:
            return "root ::= " + " ".join(f"<[{token}]>" for token in run)
        text = await self.side.engine.detokenize(self.side.model, tuple(run))
        return f"root ::= {grammar_string(text)}"

    async def _ask(
        self, prefix: list[int], count: int, grammar: str | None
    ) -> tuple[list[int], list[Top | None]]:
        body = {
            "prompt": prefix,
            "n_predict": count,
            "n_probs": 2,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": True,
            "post_sampling_probs": False,
            "stream": False,
            **({} if grammar is None else {"grammar": grammar}),
        }
        answer = await self.side.engine.upstream.post("/completion", body)
        tokens = [int(token) for token in answer["tokens"]]
        return tokens, _tops(tokens, answer.get("completion_probabilities") or [])


def _tops(tokens: list[int], entries: list[dict[str, Any]]) -> list[Top | None]:
    """The alternatives by token; tokens that end inside a character have no entry."""
    tops: list[Top | None] = []
    left = iter(entries)
    entry = next(left, None)
    for token in tokens:
        if entry is not None and entry["id"] == token:
            tops.append(Top(tuple((t["id"], t["logprob"]) for t in entry["top_logprobs"])))
            entry = next(left, None)
        else:
            tops.append(None)
    return tops


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _of_grammar(error: GatewayError) -> bool:
    return "grammar" in error.message or "samplers" in error.message


def grammar_string(text: str) -> str:
    r"""A text as a literal of llama.cpp's grammars: JSON's escapes, but none for surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\\b", "\\x08").replace("\\f", "\\x0C")


SCORERS: dict[str, type[Scorer]] = {
    "vllm": VllmScorer,
    "sglang": SglangScorer,
    "llamacpp": LlamaCppScorer,
}


def scorer_for(side: Connected) -> Scorer:
    """Raises RequestError where the engine can't score a text that is given to it."""
    kind = SCORERS.get(side.info.dialect)
    if kind is None:
        able = ", ".join(SCORERS)
        raise RequestError(
            f"{side.info.dialect} ({side.engine.url}) does not tell how likely it finds a given "
            f"text; serve that model on one of {able}, or take `--scorer large`: the large model's "
            "own margins, as it wrote the traces"
        )
    return kind(side)
