"""Rendering and tokenizing: what engines and our own tokenizers have in common."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.engines.chat import Chat
from gateway.errors import RequestError, UpstreamError

# Words, digits, blanks, code, accents, scripts, symbols: where two vocabularies or pre-tokenizers
# differ, some of it is cut differently or numbered differently.
VOCABULARY_PROBE = (
    "Therefore, the SUM of 12345 and 3.14159 isn't 42; we've\n\n\tdef f(x):\n    return x**2\r\n"
    "naïve façade Straße Ελληνικά Русский עברית العربية हिन्दी ไทย 中文 日本語 한국어 🎉 ∑∫√≠≤ "
    "{}[]<>|\\/ http://a.b/c?d=e&f=g#h  double  spaces   triple ---- ==== 0123456789 AaBbCc xyzzy "
    "antidisestablishmentarianism supercalifragilistic !!! ??? ... “quotes” ‘single’ 1e-9 0xFF\n"
)

_TAIL_IDS = 12
TAIL_CHARS = 64
_TAILS_KEPT = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: `ids` as the engine tokenized it, and their text where it is known.

    With `chat` the engine is sent messages instead; ids and text are then known only where it
    tells how it renders them. `bos` is the BOS that the text begins with, where a server that
    takes texts would put a second one before it.
    """

    ids: tuple[int, ...] | None
    text: str | None = None
    chat: Chat | None = None
    bos: str = ""


class Tokenization(ABC):
    """Renders and tokenizes: an engine, or a tokenizer of our own."""

    def __init__(self) -> None:
        self._tails: dict[tuple[int, ...], str] = {}
        self._fixed: dict[str, tuple[int, ...]] = {}
        self._begin: tuple[int, ...] | None = None

    @abstractmethod
    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        """The prompt of a chat request's `messages` (and its template fields)."""

    @abstractmethod
    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text; with `special`, after the BOS that the model wants."""

    @abstractmethod
    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        """The text of some ids, special tokens with it."""

    async def vocabulary(self, model: str) -> str | None:
        """Fingerprint: equal where the vocabulary and the way to cut text into it are equal."""
        ids = await self.tokenize(model, VOCABULARY_PROBE)
        return hashlib.sha256(orjson.dumps(ids)).hexdigest()[:16]

    async def begin(self, model: str) -> tuple[int, ...]:
        """The ids that the tokenizer puts before any text: its BOS, or none."""
        if self._begin is None:
            begun = await self.tokenize(model, "a", special=True)
            plain = await self.tokenize(model, "a")
            if not plain or plain[0] not in begun:
                raise UpstreamError(f"The tokenizer of {model!r} tells no ids of a letter")
            self._begin = begun[: begun.index(plain[0])]
        return self._begin

    async def fixed_ids(self, model: str, text: str) -> tuple[int, ...]:
        """Token ids of a text that is needed again and again: asked for once."""
        if text not in self._fixed:
            self._fixed[text] = await self.tokenize(model, text)
        return self._fixed[text]

    async def text(self, model: str, prompt: Prompt) -> str:
        """The whole text of a prompt."""
        if prompt.text is not None:
            return prompt.text
        return await self.detokenize(model, prompt.ids or ())

    async def tail(self, model: str, prompt: Prompt, length: int = TAIL_CHARS) -> str:
        """The last `length` characters of the prompt's text, or a few more.

        Templates end alike: a short tail is asked for once.
        """
        if prompt.text is not None:
            return prompt.text[-length:]
        ids = prompt.ids or ()
        if length > TAIL_CHARS:
            return await self.detokenize(model, ids[-length:])  # no token is empty
        ids = ids[-_TAIL_IDS:]
        if ids not in self._tails:
            if len(self._tails) >= _TAILS_KEPT:
                self._tails.clear()
            self._tails[ids] = await self.detokenize(model, ids)
        return self._tails[ids]


def common_start(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """What two texts that share nothing begin with alike: what the tokenizer adds by itself."""
    pairs = enumerate(zip(one, other, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), 0)
    return tuple(one[:length])


def template_kwargs(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template is given beside the messages, as vLLM's chat endpoint gathers it."""
    beside = ("reasoning_effort", "documents")
    named = {key: request[key] for key in beside if request.get(key) is not None}
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        message = f"`chat_template_kwargs` must be an object, not {given!r}"
        raise RequestError(message, param="chat_template_kwargs")
    return {**named, **given}
