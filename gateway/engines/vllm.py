"""vLLM (checked on 0.32.0): ids and token texts in every chunk, templates at /tokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import Engine, Identity, Sampling
from gateway.engines.chat import Chat, Parser, Prefill
from gateway.engines.reading import ChunkReader, token_pieces
from gateway.engines.tokenization import Prompt, template_kwargs
from gateway.errors import RequestError
from relaygen.events import DecodeRequest, Piece

_TEMPLATE_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tools",
)


class VllmEngine(Engine):
    dialect = "vllm"
    prefills = (Prefill.CONTINUE,)
    max_logprobs = 20  # --max-logprobs, unless a server says otherwise

    async def identify(self) -> Identity:
        version = await self.upstream.get("/version")
        models = (await self.upstream.get("/v1/models"))["data"]
        return Identity(
            version=str(version.get("version", "")),
            models=tuple(model["id"] for model in models),
            context=models[0].get("max_model_len") if models else None,
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
            **self._known(sampling),
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens or None,
            "seed": request.seed,
            "logprobs": self._logprobs(sampling),
            "return_token_ids": True,
            "return_tokens_as_token_ids": False,  # has ids in the place of texts
            "skip_special_tokens": False,
        }
        if isinstance(request.prefix, str):
            fields["add_special_tokens"] = False
        return fields

    def _reader(self) -> ChunkReader:
        return VllmReader()

    def _chat_fields(self) -> dict[str, Any]:
        return {"return_token_ids": True, "skip_special_tokens": False}

    async def _parser(self, model: str, chat: Chat) -> Parser:
        try:
            return Parser(await self.fixed_ids(model, chat.thinking.close))
        except RequestError:  # its tokenizer is not open to us
            return await super()._parser(model, chat)


class VllmReader(ChunkReader):
    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        return token_pieces(choice)
