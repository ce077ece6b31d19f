"""SGLang (0.5.23, from its source): ids always, and an explicit abort."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import structlog

from gateway.engines.answers import text_in
from gateway.engines.base import Call, Continuation, Identity, Sampling
from gateway.engines.chat import Prefill
from gateway.engines.served_tokenizer import ServedTokenizerEngine
from gateway.engines.tokenization import Prompt, common_start
from gateway.errors import GatewayError, RequestError
from gateway.upstream import Upstream
from relaygen.events import DecodeRequest
from relaygen.policy import Thinking

log = structlog.get_logger()


class SglangEngine(ServedTokenizerEngine):
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
        return await self._identity((await self.upstream.get("/server_info")).get("version"))

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        ids = (await super().render(model, request)).ids or ()
        begin = await self.begin(model)
        # Rendered text is tokenized like any other: a BOS that the template wrote is then a second.
        twice = bool(begin) and ids[: 2 * len(begin)] == begin + begin
        return Prompt(ids[len(begin) :] if twice else ids)

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        ids = await super().tokenize(model, text, special=special)
        if special:
            return ids
        if self._added is None:
            plain = super().tokenize
            self._added = common_start(*await asyncio.gather(plain(model, "a"), plain(model, "7")))
        return ids[len(self._added) :]

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        body = {"model": model, "tokens": ids, "skip_special_tokens": False}
        return text_in(await self.upstream.post("/detokenize", body), "text", self.url)

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

    def _chat_fields(self) -> dict[str, Any]:
        return {
            "skip_special_tokens": False,
            "separate_reasoning": False,
            "logprobs": True,  # chats tell no ids: these count the tokens
            **self._rid(),
        }

    def _rid(self) -> dict[str, Any]:
        return {"rid": f"relaygen-{uuid.uuid4().hex}"}

    def _once_more(self, error: RequestError, call: Call, sampling: Sampling) -> bool:
        """When a kept connection dies, a call is sent again: the server may know its id by then."""
        if "Duplicate request ID" not in error.message:
            return super()._once_more(error, call, sampling)
        self.abandon(call.body)
        return True

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._rid(), **super().whole(body)}

    def abandon(self, body: Mapping[str, Any]) -> None:
        """Closing the connection alone frees the request only two seconds later."""
        task = asyncio.get_running_loop().create_task(self._abort(str(body["rid"])))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        try:
            await self.upstream.check("/abort_request", {"rid": rid, "abort_all": False})
        except GatewayError as error:
            log.warning("abort failed", engine=self.url, rid=rid, error=error.message)
