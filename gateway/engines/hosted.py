"""Any other OpenAI-style API (DeepSeek, Mistral, OpenRouter, Together, Fireworks, ...).

Nothing is asked that OpenAI's API has not: no ids, no tokenizer. With a tokenizer of the policy's
it goes on from text by `/v1/completions`; else by chat, from an unfinished assistant message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import Call, Continuation, Engine, EngineInfo, Identity, Sampling
from gateway.engines.chat import Chat, Parser, Prefill
from gateway.engines.reading import ChunkReader, token_pieces
from gateway.engines.tokenization import Prompt
from gateway.errors import BusyError, RequestError, UpstreamError
from gateway.estimate import estimate_method, estimate_tokens, load_encoding
from gateway.upstream import Upstream
from relaygen.events import DecodeRequest, Piece
from relaygen.policy import Thinking

_COUNT = {"role": "user", "content": "Count from one to three."}
_BEGUN = "The capital of Fran"
_UNLIMITED = 8192  # a chat has no limit of its own, but /v1/completions one of 16
_BY_HOST = {"deepseek": Prefill.PREFIX_REASONING, "mistral": Prefill.PREFIX}


class HostedEngine(Engine):
    dialect = "openai"
    ids = False
    renders = False
    tools = False
    ignores = frozenset({"min_tokens"})

    def __init__(self, upstream: Upstream, continuation: Continuation = "completions") -> None:
        super().__init__(upstream, continuation)
        named = [form for host, form in _BY_HOST.items() if host in self.url]
        self.prefills = (*named, Prefill.TRAILING)[:1]
        self._shown: dict[tuple[str, Thinking], bool] = {}

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

    @property
    def counts(self) -> str:
        return f"by the server's usage; what is cut off is estimated, by {estimate_method()}"

    async def _continues(self, model: str, thinking: Thinking, closed: bool, form: Prefill) -> bool:
        """No template can be asked: a word begun, with nothing to do with the question, is.

        A server that opens a new turn counts to three instead; one that repeats the message does
        go on with it.
        """
        if form is not Prefill.TRAILING:
            return True  # the form that this API's own documentation names
        if (model, thinking) not in self._shown:
            self._shown[model, thinking] = await self._goes_on_with_a_word(model, thinking)
        return self._shown[model, thinking]

    async def _goes_on_with_a_word(self, model: str, thinking: Thinking) -> bool:
        """Tried inside a thought, which shows as well whether thoughts are told apart there."""
        begun = f"{thinking.open}\n{_BEGUN}"
        messages = [_COUNT, {"role": "assistant", "content": begun}]
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        try:
            answer = await self.upstream.post("/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
            content = message.get("content")
            thought = message.get("reasoning_content") or message.get("reasoning")
        except BusyError as error:
            raise UpstreamError(f"{self.url} refused to be tried: {error.message}") from error
        except RequestError:
            return False
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise UpstreamError(f"{self.url} answered oddly to be tried: {error!r}") from error
        apart = _goes_on(thought, begun)
        self._seen(model).splits |= apart
        return apart or _goes_on(content, begun)

    def _seen(self, model: str) -> Parser:
        return self._parsers.setdefault(model, Parser(repeats=True))

    async def _parser(self, model: str, chat: Chat) -> Parser:
        return self._seen(model)

    async def _chat_call(
        self, model: str, chat: Chat, request: DecodeRequest, sampling: Sampling
    ) -> Call:
        call = await super()._chat_call(model, chat, request, sampling)
        if Prefill.PREFIX in self.prefills:
            # Mistral refuses fields that it doesn't know; the usage it tells unasked.
            seed = call.body.pop("seed")
            del call.body["stream_options"]
            call.body["random_seed"] = None if seed is None else abs(seed)
        return call

    async def _prompt(self, model: str, prompt: Prompt, prefix: tuple[int, ...] | str) -> Any:
        assert isinstance(prefix, str), "a hosted API takes no ids"
        return (prompt.text or "").removeprefix(prompt.bos) + prefix

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        raise _no_tokenizer(self.url)

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        raise _no_tokenizer(self.url)

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        raise _no_tokenizer(self.url)

    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        return {
            **self._known(sampling),
            "max_tokens": request.max_tokens or _UNLIMITED,
            "seed": request.seed,
            "logprobs": None if sampling.logprobs is None else self._logprobs(sampling),
        }

    def _reader(self, sampling: Sampling) -> ChunkReader:
        return HostedReader()


def _goes_on(text: object, begun: str) -> bool:
    """Whether it is the rest of the word, or what was begun and the rest."""
    rest = str(text or "").removeprefix(begun).lstrip().removeprefix(_BEGUN)
    return rest.lstrip().startswith("ce")


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
