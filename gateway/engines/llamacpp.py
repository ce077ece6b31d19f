"""llama.cpp's server (checked on b11549): ids ride on logprobs, templates at /apply-template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.answers import ids_in, text_in
from gateway.engines.base import Engine, Identity, Sampling, with_max_tokens
from gateway.engines.chat import Prefill
from gateway.engines.reading import ChunkReader, told_prompt
from gateway.engines.tokenization import Prompt
from relaygen.events import DecodeRequest, Piece, TopLogprob

_RENAMED = {"repetition_penalty": "repeat_penalty"}
_SEEDS = 2**32 - 1  # the last one stands for a random seed


class LlamaCppEngine(Engine):
    dialect = "llamacpp"
    prefills = (Prefill.REASONING, Prefill.REASONING_LINES, Prefill.TRAILING)
    # A grammar would have to fit the thought too, were it sent as content: "Failed to initialize
    # samplers" (b11549).
    form_prefills = frozenset({Prefill.REASONING, Prefill.REASONING_LINES})
    ignores = frozenset({"min_tokens"})

    async def identify(self) -> Identity:
        props = await self.upstream.get("/props")
        models = (await self.upstream.get("/v1/models"))["data"]
        names = [name for model in models for name in (model["id"], *model.get("aliases", ()))]
        return Identity(
            version=str(props.get("build_info", "")),
            models=tuple(dict.fromkeys(names)),
            context=props["default_generation_settings"]["n_ctx"],
        )

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        answer = await self.upstream.post("/apply-template", request)
        text = text_in(answer, "prompt", self.url)
        ids = await self.tokenize(model, text)
        begin = await self.begin(model)
        # A template may or may not write the BOS that the tokenizer wants: once, either way.
        begun = ids[: len(begin)] == begin
        return Prompt(ids if begun else begin + ids, text)

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        body = {"content": text, "add_special": special, "parse_special": True}
        return ids_in(await self.upstream.post("/tokenize", body), "tokens", self.url)

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        answer = await self.upstream.post("/detokenize", {"tokens": ids})
        return text_in(answer, "content", self.url)

    async def _prompt(self, model: str, prompt: Prompt, prefix: tuple[int, ...] | str) -> Any:
        # Ids and text may be mixed: no second BOS, and the prompt's part of the cache still hits.
        ids = prompt.ids or ()
        return [*ids, prefix] if isinstance(prefix, str) else [*ids, *prefix]

    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        # Ids come only with logprobs; timings count the tokens, also those that have no entry.
        return {
            **self._known(sampling),
            "max_tokens": request.max_tokens,
            "seed": self._seed(request.seed),
            "logprobs": max(1, self._logprobs(sampling)),
            "timings_per_token": True,
            "cache_prompt": True,
            "post_sampling_probs": False,  # has other chunks
        }

    def _known(self, sampling: Sampling) -> dict[str, Any]:
        return {_RENAMED.get(key, key): value for key, value in super()._known(sampling).items()}

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return with_max_tokens(super().whole(body))

    def _seed(self, seed: int | None) -> int | None:
        return None if seed is None else seed % _SEEDS

    def _reader(self, sampling: Sampling) -> ChunkReader:
        return LlamaCppReader()

    def _chat_fields(self) -> dict[str, Any]:
        return {"reasoning_format": "none", "timings_per_token": True, "cache_prompt": True}


class LlamaCppReader(ChunkReader):
    def __init__(self) -> None:
        super().__init__()
        self._predicted = 0

    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        text: str = choice.get("text") or ""
        entries = (choice.get("logprobs") or {}).get("content") or []
        if not text and not entries:
            return []
        new = self._count(chunk, len(entries))
        if len(entries) != 1:
            return [Piece(text, (), new)]
        entry = entries[0]
        top = tuple(TopLogprob(t["token"], t["logprob"], t["id"]) for t in entry["top_logprobs"])
        # With speculative decoding it reports 0.0 and no alternatives: unknown, not certain.
        known = top or entry["logprob"] != 0.0
        return [
            Piece(
                text,
                (entry["id"],) if new == 1 else (),
                new,
                entry["logprob"] if known else None,
                top,
            )
        ]

    def _count(self, chunk: dict[str, Any], entries: int) -> int:
        """Tokens since the last chunk: more than one where some ended inside a character."""
        timings = chunk.get("timings") or {}
        predicted = timings.get("predicted_n")
        if predicted is None:
            return entries or 1
        if self.prompt is None:
            read, cached = timings.get("prompt_n"), timings.get("cache_n")
            if type(read) is int and type(cached) is int:
                self.prompt = told_prompt(read + cached, cached)
        new = int(predicted) - self._predicted
        self._predicted = int(predicted)
        return new
