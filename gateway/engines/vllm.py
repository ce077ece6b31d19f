"""vLLM (checked on 0.32.0): ids and token texts in every chunk, templates at /tokenize."""

from __future__ import annotations

from typing import Any

from gateway.engines.answers import text_in
from gateway.engines.base import Identity, Sampling
from gateway.engines.chat import Chat, Parser, Prefill
from gateway.engines.served_tokenizer import ServedTokenizerEngine
from gateway.errors import RequestError
from relaygen.events import DecodeRequest


class VllmEngine(ServedTokenizerEngine):
    dialect = "vllm"
    prefills = (Prefill.CONTINUE,)
    max_logprobs = 20  # --max-logprobs, unless a server says otherwise

    template_fields = (*ServedTokenizerEngine.template_fields, "chat_template")

    async def identify(self) -> Identity:
        return await self._identity((await self.upstream.get("/version")).get("version"))

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        body = {"model": model, "tokens": ids}
        return text_in(await self.upstream.post("/detokenize", body), "prompt", self.url)

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

    def _chat_fields(self) -> dict[str, Any]:
        return {"return_token_ids": True, "skip_special_tokens": False}

    async def _parser(self, model: str, chat: Chat) -> Parser:
        try:
            return Parser(await self.fixed_ids(model, chat.thinking.close))
        except RequestError:  # its tokenizer is not open to us
            return await super()._parser(model, chat)
