"""Prompts by a local tokenizer (`transformers`), for engines whose own can't be used."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from gateway.engines.tokenization import Prompt, Tokenization, template_kwargs
from gateway.errors import RequestError, UpstreamError

_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "tools")
_TEMPLATE_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# A template is a program, and would run here; the others change what is returned.
_REFUSED: tuple[str, ...] = (
    "chat_template",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
_loading = threading.Lock()


class LocalTokenizer(Tokenization):
    """A Hugging Face tokenizer by hub id or folder. Loading takes seconds: once, on first use."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._vocabulary: str | None = None

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        return await asyncio.to_thread(self._render, request)

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        tokenizer = await self._tokenizer()
        return tuple(tokenizer.encode(text, add_special_tokens=special))

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        tokenizer = await self._tokenizer()
        try:
            return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        except (OverflowError, TypeError, ValueError) as error:
            raise UpstreamError(f"{self.name} knows no such token ids: {error}") from None

    async def vocabulary(self, model: str) -> str | None:
        if self._vocabulary is None:
            self._vocabulary = await super().vocabulary(model)
        return self._vocabulary

    async def _tokenizer(self) -> Any:
        return await asyncio.to_thread(_load, self.name)

    def _render(self, request: Mapping[str, Any]) -> Prompt:
        from jinja2 import TemplateError

        tokenizer = _load(self.name)
        fields = {key: request[key] for key in _TEMPLATE_FIELDS if key in request}
        fields.setdefault("add_generation_prompt", True)
        kwargs = template_kwargs(request)
        _refuse_own_arguments({**request, **kwargs})
        refusals: tuple[type[Exception], ...] = (*_TEMPLATE_ERRORS, TemplateError)
        try:
            messages = [_readable(message) for message in request["messages"]]
            text = tokenizer.apply_chat_template(messages, tokenize=False, **fields, **kwargs)
        except refusals as error:
            raise RequestError(
                f"The chat template of {self.name} can't render these messages: {error}",
                param="messages",
            ) from error
        # The template has written what special tokens it wants.
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        bos = tokenizer.bos_token or ""
        return Prompt(ids, text, bos=bos if bos and text.startswith(bos) else "")


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as one text, tool arguments as an object."""
    read = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        read["content"] = "\n".join(str(part.get("text") or "") for part in content)
    if isinstance(message.get("tool_calls"), list):
        read["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return read


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse_own_arguments(request: Mapping[str, Any]) -> None:
    for key in _REFUSED:
        if request.get(key) is not None:
            message = f"`{key}` can't be given in a request to a policy with its own tokenizer"
            raise RequestError(message, param=key)


def _load(name: str) -> Any:
    with _loading:  # transformers' lazy modules don't bear two imports at once
        return _loaded(name)


@lru_cache(maxsize=16)
def _loaded(name: str) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, cache_dir=_cache_dir())
    except (ImportError, OSError, ValueError) as error:
        raise UpstreamError(
            f"The tokenizer {name!r} can't be loaded: {error}; give a folder or a hub id in the "
            "policy's `tokenizer`, or `auto` for the engine's own"
        ) from error


def _cache_dir() -> Path | None:
    """Where the hub's files go: None (its own place), unless that neither is there nor can be."""
    from huggingface_hub.constants import HF_HUB_CACHE

    usual = Path(HF_HUB_CACHE)
    try:
        usual.mkdir(parents=True, exist_ok=True)  # one that is there may be full, and read-only
    except OSError:
        return Path(tempfile.gettempdir(), "relaygen-hub")
    return None
