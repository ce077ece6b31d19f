"""TGI (router of 2026-01, from its source): texts in, tokens out, by its native endpoint.

Its OpenAI-style completions endpoint tells no tokens, so decodes go to `/generate_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.answers import objects_of, reading, text_in
from gateway.engines.base import Call, Engine, Identity, Sampling, with_max_tokens
from gateway.engines.reading import ChunkReader, finish_reason
from gateway.engines.tokenization import Prompt, common_start
from gateway.errors import RequestError
from relaygen.events import DecodeRequest, Piece, TopLogprob

_TEMPLATE_FIELDS = ("messages", "tools", "tool_choice", "chat_template_kwargs")
_MODEL = "tgi"
"""Any other name is taken for a LoRA adapter's."""
# What /generate_stream takes of the fields that clients send. Not presence_penalty: TGI would make
# it a repetition penalty of x + 2.
_PARAMETERS = frozenset(
    {
        "adapter_id",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "watermark",
    }
)
_SEEDS = 2**63
_HEAD_CHARS = 64  # more than any BOS has


class TgiEngine(Engine):
    """Takes texts alone, and puts the BOS before every one of them."""

    dialect = "tgi"
    ids = False
    max_logprobs = 5
    _bos: str | None = None
    """Its text, once a prompt began with it."""

    async def identify(self) -> Identity:
        info = await self.upstream.get("/info")
        return Identity(
            version=str(info.get("version", "")),
            models=tuple(dict.fromkeys([str(info["model_id"]), _MODEL])),
            context=info.get("max_total_tokens"),
        )

    def wire_model(self, model: str) -> str:
        return _MODEL

    # ---- prompts --------------------------------------------------------------------------------

    async def render(self, model: str, request: Mapping[str, Any]) -> Prompt:
        if request["messages"][-1].get("role") == "assistant":
            raise RequestError(
                "The last of `messages` is the assistant's, which TGI does not go on from exactly; "
                "end with another role",
                param="messages",
            )
        fields = {key: request[key] for key in _TEMPLATE_FIELDS if key in request}
        answer = await self.upstream.post("/chat_tokenize", {"model": _MODEL, **fields})
        with reading(self.url, "a rendered prompt"):
            tokens = objects_of(answer["tokenize_response"], self.url)
        ids = tuple(token["id"] for token in tokens)
        begin = await self.begin(model)
        once = ids if ids[: len(begin)] == begin else begin + ids
        return Prompt(once, text_in(answer, "templated_text", self.url))

    async def begin(self, model: str) -> tuple[int, ...]:
        if self._begin is None:
            one, other = await self._tokens("a"), await self._tokens("7")
            self._begin = common_start([t["id"] for t in one], [t["id"] for t in other])
        return self._begin

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> tuple[int, ...]:
        ids = tuple(token["id"] for token in await self._tokens(text))
        return ids if special else ids[len(await self.begin(model)) :]

    async def _tokens(self, text: str) -> list[dict[str, Any]]:
        return objects_of(await self.upstream.post("/tokenize", {"inputs": text}), self.url)

    async def detokenize(self, model: str, ids: tuple[int, ...]) -> str:
        if ids == self._begin:
            return ""  # it adds them to every text itself
        raise RequestError(
            "TGI can't turn token ids into text; send `prompt` as a text", param="prompt"
        )

    # ---- decoding -------------------------------------------------------------------------------

    async def _call(
        self, model: str, prompt: Prompt, request: DecodeRequest, sampling: Sampling
    ) -> Call:
        text = prompt.text or ""
        if isinstance(request.prefix, str):
            text += request.prefix
        body = {
            "inputs": await self._without_bos(model, text),
            "parameters": self._fields(request, sampling),
        }
        return Call("/generate_stream", body, self._reader(sampling))

    async def _without_bos(self, model: str, text: str) -> str:
        """TGI writes the BOS itself: one that the text begins with would be a second."""
        if self._bos is None:
            self._bos = await self._bos_of(text, await self.begin(model))
        return text.removeprefix(self._bos or "")

    async def _bos_of(self, text: str, begin: tuple[int, ...]) -> str | None:
        """The text of the BOS, if this one begins with it."""
        head = (await self._tokens(text[:_HEAD_CHARS]))[len(begin) :][: len(begin)] if begin else []
        if not head or tuple(token["id"] for token in head) != begin:
            return None
        # Offsets are of bytes or of characters, as the tokenizer is: only all of a BOS is one.
        with reading(self.url, "a token"):
            stop = int(head[-1]["stop"])
        bos = text.encode()[:stop].decode(errors="ignore")
        whole = tuple(token["id"] for token in await self._tokens(bos)) == begin + begin
        return bos if whole else text[:stop]

    def ignored(self, fields: Mapping[str, Any]) -> list[str]:
        return sorted(fields.keys() - _PARAMETERS)

    def _fields(self, request: DecodeRequest, sampling: Sampling) -> dict[str, Any]:
        parameters = {
            **_valid({k: v for k, v in sampling.fields.items() if k in _PARAMETERS}),
            "max_new_tokens": request.max_tokens,
            "details": True,
            "return_full_text": False,
            "top_n_tokens": self._logprobs(sampling) or None,
            "seed": self._seed(request.seed),
        }
        return {key: value for key, value in parameters.items() if value is not None}

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in body.items() if key != "presence_penalty"}
        return with_max_tokens(super().whole(kept))

    def _seed(self, seed: int | None) -> int | None:
        return None if seed is None else seed % _SEEDS

    def _reader(self, sampling: Sampling) -> ChunkReader:
        return TgiReader()


def _valid(given: dict[str, Any]) -> dict[str, Any]:
    """TGI refuses the values by which others switch a parameter off: they are left out.

    Without a temperature it would take the likeliest token; its OpenAI-style endpoints sample.
    """
    off = {
        "temperature": lambda value: value <= 0,
        "top_p": lambda value: value >= 1,
        "top_k": lambda value: value <= 0,
        "typical_p": lambda value: value >= 1,
    }
    left = {k: v for k, v in given.items() if not (k in off and _is(off[k], v))}
    greedy = "temperature" in given and "temperature" not in left
    if greedy:  # any of the others would make it sample, whatever `do_sample` says
        left = {k: v for k, v in left.items() if k not in off}
    return {**left, "do_sample": not greedy}


def _is(test: Any, value: Any) -> bool:
    return isinstance(value, int | float) and bool(test(value))


class TgiReader(ChunkReader):
    """One token an event; the last has the details, and no [DONE] follows."""

    def read(self, chunk: dict[str, Any]) -> list[Piece]:
        token, details = chunk["token"], chunk.get("details")
        text = str(token["text"])
        if details:
            self.finish = finish_reason(details["finish_reason"])
            self.tokens = details.get("generated_tokens")
            self.done = True
            if self.finish == "stop":
                text = ""  # the end of the turn, which is no text
        top = tuple(
            TopLogprob(t["text"], t["logprob"], t["id"]) for t in chunk.get("top_tokens") or ()
        )
        return [Piece(text, (token["id"],), 1, token.get("logprob"), top)]

    def _pieces(self, choice: dict[str, Any], chunk: dict[str, Any]) -> list[Piece]:
        raise AssertionError("TGI's events have no choices")
