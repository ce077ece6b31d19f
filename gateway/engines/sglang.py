"""SGLang (0.5.23, from its source): ids always, and an explicit abort."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import structlog

from gateway.engines.base import Call, Continuation, Engine, Identity, Sampling
from gateway.engines.chat import Prefill
from gateway.engines.reading import ChunkReader, token_pieces
from gateway.engines.tokenization import Prompt, common_start, template_kwargs
from gateway.errors import GatewayError
from gateway.upstream import Upstream
from relaygen.events import DecodeRequest, Piece
from relaygen.policy import Thinking

log = structlog.get_logger()

_TEMPLATE_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "tools")


class SglangEngine(Engine):
    """A text prompt would get a BOS that no field turns off: it is always sent ids."""

    dialect = "sglang"
    prefills = (Prefill.APPENDED,)

    def __init__(self, upstream: Upstream, continuation: Continuation = "completions") -> None:
        super().__init__(upstream, continuation)
        self._aborts: set[asyncio.Task[None]] = set()
        self._added: tuple[int, ...] | None = None
        """What /tokenize adds where it was told not to: newer versions drop the field."""

    async def identify(self) -> Identity:
        # /health would generate a token, and take a second.
        await self.upstream.check("/ready")
        models = (await self.upstream.get("/v1/models"))["data"]
        info = await self.upstream.get("/server_info")
        return Identity(
            version=str(info.get("version", "")),
            models=tuple(model["id"] for model in models),
            context=models[0].get("max_model_len") if models else None,
        )

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        fields = {key: request[key] for key in _TEMPLATE_FIELDS if key in request}
        if kwargs := template_kwargs(request):
            fields["chat_template_kwargs"] = kwargs
        answer = await self.upstream.post("/tokenize", {"model": model, **fields})
        ids, begin = tuple(answer["tokens"]), await self.begin(model)
        # Rendered text is tokenized like any other: a BOS that the template wrote is then a second.
        twice = bool(begin) and ids[: 2 * len(begin)] == begin + begin
        return Prompt(ids[len(begin) :] if twice else ids)

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        ids = await self._tokenized(model, text, special=special)
        if special:
            return ids
        if self._added is None:
            texts = (self._tokenized(model, text, special=False) for text in "a7")
            self._added = common_start(*await asyncio.gather(*texts))
        return ids[len(self._added) :]

    async def _tokenized(self, model: str, text: str, *, special: bool) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        return tuple((await self.upstream.post("/tokenize", body))["tokens"])

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        body = {"model": model, "tokens": ids, "skip_special_tokens": False}
        return str((await self.upstream.post("/detokenize", body))["text"])

    async def _continues(self, model: str, thinking: Thinking, closed: bool, form: Prefill) -> bool:
        return True  # it puts the message after the rendered prompt as it is, whatever the template

    async def _prompt(self, model: str, prompt: Prompt, prefix: tuple[int, ...] | str) -> Any:
        if isinstance(prefix, str):
            prefix = await self.tokenize(model, prefix) if prefix else ()
        return [*(prompt.ids or ()), *prefix]

    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        return {
            **self._known(sampling),
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens or None,
            "seed": request.seed,
            "logprobs": self._logprobs(sampling),
            "return_token_ids": True,
            "skip_special_tokens": False,
            **self._rid(),
        }

    def _reader(self) -> ChunkReader:
        return SglangReader()

    def _chat_fields(self) -> dict[str, Any]:
        return {
            "skip_special_tokens": False,
            "separate_reasoning": False,
            "logprobs": True,  # chats tell no ids: these count the tokens
            **self._rid(),
        }

    def _rid(self) -> dict[str, Any]:
        return {"rid": f"relaygen-{uuid.uuid4().hex}"}

    def _abandon(self, call: Call) -> None:
        """Closing the connection alone frees the request only two seconds later."""
        task = asyncio.get_running_loop().create_task(self._abort(call.body["rid"]))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        try:
            await self.upstream.check("/abort_request", {"rid": rid, "abort_all": False})
        except GatewayError as error:
            log.warning("abort failed", engine=self.url, rid=rid, error=error.message)


class SglangReader(ChunkReader):
    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        return token_pieces(choice)
