"""llama.cpp's server (checked on b11549): ids ride on logprobs, templates at /apply-template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import ChunkReader, Engine, EngineInfo, Prompt, Sampling
from gateway.upstream import Upstream
from relaygen.events import DecodeRequest, Piece, TopLogprob

_RENAMED = {"repetition_penalty": "repeat_penalty"}


class LlamaCppEngine(Engine):
    dialect = "llamacpp"

    def __init__(self, upstream: Upstream) -> None:
        super().__init__(upstream)
        self._begin: tuple[int, ...] | None = None

    async def probe(self) -> EngineInfo:
        props = await self.upstream.get("/props")
        models = (await self.upstream.get("/v1/models"))["data"]
        names = [name for model in models for name in (model["id"], *model.get("aliases", ()))]
        return EngineInfo(
            dialect=self.dialect,
            version=str(props.get("build_info", "")),
            models=tuple(dict.fromkeys(names)),
            context=props["default_generation_settings"]["n_ctx"],
            vocabulary=await self.vocabulary(names[0]),
        )

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        text = str((await self.upstream.post("/apply-template", request))["prompt"])
        ids = await self.tokenize(model, text)
        if self._begin is None:
            self._begin = await self._beginning(model)
        # A template may or may not write the BOS that the tokenizer wants: once, either way.
        begun = ids[: len(self._begin)] == self._begin
        return Prompt(ids if begun else self._begin + ids, text)

    async def _beginning(self, model: str) -> tuple[int, ...]:
        """The ids that the tokenizer puts before any text: its BOS, or none."""
        begun = await self.tokenize(model, "a", special=True)
        plain = await self.tokenize(model, "a")
        return begun[: begun.index(plain[0])]

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        body = {"content": text, "add_special": special, "parse_special": True}
        return tuple((await self.upstream.post("/tokenize", body))["tokens"])

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        return str((await self.upstream.post("/detokenize", {"tokens": ids}))["content"])

    async def _prompt(self, model: str, prompt: Prompt, prefix: tuple[int, ...] | str) -> Any:
        # Ids and text may be mixed: no second BOS, and the prompt's part of the cache still hits.
        return [*prompt.ids, prefix] if isinstance(prefix, str) else [*prompt.ids, *prefix]

    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        # Ids come only with logprobs; timings count the tokens, also those that have no entry.
        return {
            **{_RENAMED.get(key, key): value for key, value in sampling.fields.items()},
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "logprobs": max(1, sampling.logprobs or 0),
            "timings_per_token": True,
            "cache_prompt": True,
            "post_sampling_probs": False,  # has other chunks
        }

    def _reader(self) -> ChunkReader:
        return _LlamaCppReader()


class _LlamaCppReader(ChunkReader):
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
        predicted = (chunk.get("timings") or {}).get("predicted_n")
        if predicted is None:
            return entries or 1
        new = int(predicted) - self._predicted
        self._predicted = int(predicted)
        return new
