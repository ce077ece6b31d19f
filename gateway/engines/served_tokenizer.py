"""What vLLM and SGLang have in common: a tokenizer behind /tokenize, and ids in every chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.engines.answers import ids_in
from gateway.engines.base import Engine, Identity, Sampling
from gateway.engines.plain_chunks import plain_pieces
from gateway.engines.reading import ChunkReader, token_pieces
from gateway.engines.tokenization import Prompt, template_kwargs
from relaygen.events import Piece


class ServedTokenizerEngine(Engine):
    template_fields: ClassVar[tuple[str, ...]] = (
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
    )

    async def _identity(self, version: object) -> Identity:
        models = (await self.upstream.get("/v1/models"))["data"]
        return Identity(
            version=str(version or ""),
            models=tuple(model["id"] for model in models),
            context=models[0].get("max_model_len") if models else None,
        )

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        fields = {key: request[key] for key in self.template_fields if key in request}
        if kwargs := template_kwargs(request):
            fields["chat_template_kwargs"] = kwargs
        answer = await self.upstream.post("/tokenize", {"model": model, **fields})
        return Prompt(ids_in(answer, "tokens", self.url))

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        return ids_in(await self.upstream.post("/tokenize", body), "tokens", self.url)

    def _reader(self, sampling: Sampling) -> ChunkReader:
        return TokenIdsReader(top=bool(sampling.logprobs))


class TokenIdsReader(ChunkReader):
    """`top`: with the alternatives of each token."""

    def __init__(self, *, top: bool = True) -> None:
        super().__init__()
        self._top = top

    def plain(self, events: list[bytes]) -> list[Piece] | None:
        return plain_pieces(events, top=self._top)

    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        return token_pieces(choice)
