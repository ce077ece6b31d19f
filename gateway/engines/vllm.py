"""vLLM (checked on 0.32.0): ids and token texts in every chunk, templates at /tokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import (
    ChunkReader,
    Engine,
    EngineInfo,
    Prompt,
    Sampling,
    template_kwargs,
)
from relaygen.events import DecodeRequest, Piece, TopLogprob

_TEMPLATE_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)


class VllmEngine(Engine):
    dialect = "vllm"

    async def probe(self) -> EngineInfo:
        version = await self.upstream.get("/version")
        models = (await self.upstream.get("/v1/models"))["data"]
        names = tuple(model["id"] for model in models)
        return EngineInfo(
            dialect=self.dialect,
            version=str(version.get("version", "")),
            models=names,
            context=models[0].get("max_model_len") if models else None,
            vocabulary=await self.vocabulary(names[0]) if names else None,
        )

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        fields = {key: request[key] for key in _TEMPLATE_FIELDS if key in request}
        if kwargs := template_kwargs(request):
            fields["chat_template_kwargs"] = kwargs
        answer = await self.upstream.post("/tokenize", {"model": model, **fields})
        return Prompt(tuple(answer["tokens"]))

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        return tuple((await self.upstream.post("/tokenize", body))["tokens"])

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        body = {"model": model, "tokens": ids}
        return str((await self.upstream.post("/detokenize", body))["prompt"])

    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        # logprobs 0 tells each token's text; min_tokens counts this decode's tokens alone.
        fields = {
            **sampling.fields,
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens or None,
            "seed": request.seed,
            "logprobs": sampling.logprobs or 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": False,  # has ids in the place of texts
            "skip_special_tokens": False,
        }
        if isinstance(request.prefix, str):
            fields["add_special_tokens"] = False
        return fields

    def _reader(self) -> ChunkReader:
        return _VllmReader()


class _VllmReader(ChunkReader):
    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        text: str = choice.get("text") or ""
        ids: list[int] = choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        if not text and not ids:
            return []
        texts = _texts(logprobs.get("tokens") or [], text)
        if texts is None or (ids and len(texts) != len(ids)):
            # The last of several may be half a character: only a lone id surely is its text's.
            return [Piece(text, tuple(ids[:1]) if len(ids) == 1 else (), len(ids) or 1)]
        values = logprobs["token_logprobs"]
        tops = logprobs.get("top_logprobs") or [None] * len(texts)
        return [
            Piece(token, tuple(ids[i : i + 1]), 1, values[i], _top(tops[i]))
            for i, token in enumerate(texts)
        ]


def _texts(tokens: list[str], text: str) -> list[str] | None:
    """Each token's share of the chunk's text, None where they don't fit together.

    The last token may be an end of turn, which has a text of its own but none in the chunk.
    """
    if not tokens:
        return None
    if "".join(tokens) == text:
        return tokens
    if "".join(tokens[:-1]) == text:
        return [*tokens[:-1], ""]
    return None


def _top(top: dict[str, float] | None) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(text, logprob) for text, logprob in top.items()) if top else ()
