"""Any other OpenAI-style API (DeepSeek, Mistral, OpenRouter, Together, Fireworks, ...).

Nothing is asked that OpenAI's API has not: no ids, no tokenizer. With a tokenizer of the policy's
it goes on from text by `/v1/completions`; else by chat, from an unfinished assistant message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import Engine, EngineInfo, Identity, Sampling
from gateway.engines.chat import Prefill
from gateway.engines.reading import ChunkReader, token_pieces
from gateway.engines.tokenization import Prompt
from gateway.errors import RequestError
from gateway.estimate import estimate_tokens, load_encoding
from relaygen.events import DecodeRequest, Piece
from relaygen.policy import Thinking

_COUNT = {"role": "user", "content": "Count from one to three."}
_BEGUN = "The capital of Fran"
_BY_HOST = {"deepseek": Prefill.PREFIX_REASONING, "mistral": Prefill.PREFIX}


class HostedEngine(Engine):
    dialect = "openai"
    ids = False
    renders = False
    tools = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        named = [form for host, form in _BY_HOST.items() if host in self.url]
        self.prefills = (*named, Prefill.TRAILING)[:1]
        self._shown: bool | None = None

    async def identify(self) -> Identity:
        try:
            models = (await self.upstream.get("/v1/models")).get("data") or []
        except RequestError as error:
            if error.status not in (404, 405):
                raise
            models = []  # some list none
        return Identity("", tuple(model["id"] for model in models), None)

    async def probe(self, identity: Identity) -> EngineInfo:
        load_encoding()
        return EngineInfo(
            dialect=self.dialect,
            version=identity.version,
            models=identity.models,
            context=identity.context,
            vocabulary=None,
            ids=False,
            continuation=self.continuation,
        )

    async def _continues(self, model: str, thinking: Thinking, closed: bool, form: Prefill) -> bool:
        """No template can be asked: a word begun, with nothing to do with the question, is.

        A server that opens a new turn counts to three instead; one that repeats the message does
        go on with it.
        """
        if form is not Prefill.TRAILING:
            return True  # the form that this API's own documentation names
        if self._shown is None:
            self._shown = await self._goes_on_with_a_word(model)
        return self._shown

    async def _goes_on_with_a_word(self, model: str) -> bool:
        begun = {"role": "assistant", "content": _BEGUN}
        body = {"model": model, "messages": [_COUNT, begun], "max_tokens": 8, "temperature": 0}
        answer = await self.upstream.post("/v1/chat/completions", body)
        text = str(answer["choices"][0]["message"].get("content") or "")
        return text.removeprefix(_BEGUN).lstrip().startswith("ce")

    async def _prompt(self, model: str, prompt: Prompt, prefix: tuple[int, ...] | str) -> Any:
        assert isinstance(prefix, str) or not prefix, "a hosted API takes no ids"
        return (prompt.text or "").removeprefix(prompt.bos) + (prefix if prefix else "")  # type: ignore[operator]

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        raise _no_tokenizer(self.url)

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        raise _no_tokenizer(self.url)

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        raise _no_tokenizer(self.url)

    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        return {
            **self._known(sampling),
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "logprobs": None if sampling.logprobs is None else self._logprobs(sampling),
        }

    def _reader(self) -> ChunkReader:
        return HostedReader()


def _no_tokenizer(url: str) -> RequestError:
    return RequestError(
        f"The server at {url} has no tokenizer; name one in the policy's `tokenizer`, or set its "
        "backend's `continuation` to chat"
    )


class HostedReader(ChunkReader):
    """Counts tokens by logprobs where there are some, else by an estimate."""

    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and logprobs.get("tokens"):
            return token_pieces(choice)
        text: str = choice.get("text") or ""
        if not text:
            return []
        self.estimated = True
        return [Piece(text, (), estimate_tokens(text))]
