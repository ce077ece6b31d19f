"""A policy's own tokenizer: rendering here gives what the engine's rendering gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.errors import RequestError, UpstreamError
from gateway.tokenizers import LocalTokenizer
from tests.gateway.fakes import FakeVllm, Tokenizer
from tests.gateway.support import USER, Stage, ask

FOLDER = Path(__file__).parents[2] / "gateway" / "demo" / "pair" / "large-hf"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And  twice that?\n"},
]


class OfTheFolder(Tokenizer):
    """The folder's tokenizer, as an engine would load it."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(FOLDER / "tokenizer.json"))
        self.bos = None
        self.eos = self._fast.token_to_id("<|im_end|>")

    def id_of(self, piece: str | bytes) -> int:
        text = piece.decode() if isinstance(piece, bytes) else piece
        [token] = self._fast.encode(text, add_special_tokens=False).ids
        return int(token)

    def piece(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Any) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=False))


async def test_renders_what_the_engine_renders() -> None:
    engine = FakeVllm(tokenizer=OfTheFolder())
    text = engine.rendered(MESSAGES)
    prompt = await LocalTokenizer(str(FOLDER)).render("m", {"messages": MESSAGES})
    assert prompt.text == text
    assert list(prompt.ids) == engine.tokenizer.encode(text)


async def test_renders_the_engines_ids_for_the_client(stage: Stage) -> None:
    tokenizer = OfTheFolder()
    large, small = (
        FakeVllm(lambda _: ["4", "2"], model=m, tokenizer=tokenizer) for m in ("big", "tiny")
    )
    specs = {
        role: {"backend": role, "model": model, "tokenizer": str(FOLDER)}
        for role, model in (("large", "big"), ("small", "tiny"))
    }
    served = await stage.pair(large, small, **specs)
    reply = await ask(served, messages=MESSAGES)
    assert reply["choices"][0]["message"]["content"] == "42"
    assert large.decodes[0].body["prompt"] == tokenizer.encode(large.rendered(MESSAGES))
    assert all(r.body.get("messages") != MESSAGES for r in large.asked("/tokenize"))


async def test_its_vocabulary_is_the_engines() -> None:
    engine = FakeVllm(tokenizer=OfTheFolder())
    local = LocalTokenizer(str(FOLDER))
    text = "a text, 12 and 北"
    assert list(await local.tokenize("m", text)) == engine.tokenizer.encode(text)


async def test_ids_become_text_again() -> None:
    local = LocalTokenizer(str(FOLDER))
    text = "What is 12 + 30?\n<|im_end|>"
    assert await local.detokenize("m", await local.tokenize("m", text)) == text


@pytest.mark.parametrize(
    "request_fields",
    [
        {"messages": [{"role": "user"}]},
        {"messages": MESSAGES, "chat_template_kwargs": 5},
        {"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": False}},
        {"messages": MESSAGES, "continue_final_message": True},
    ],
)
async def test_messages_that_cannot_be_rendered_are_the_clients_error(
    request_fields: dict[str, Any],
) -> None:
    with pytest.raises(RequestError):
        await LocalTokenizer(str(FOLDER)).render("m", request_fields)


async def test_a_tokenizer_that_is_not_there_is_named(stage: Stage) -> None:
    large = {"backend": "large", "model": "big", "tokenizer": str(stage.folder / "none")}
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"), large=large)
    with pytest.raises(openai.InternalServerError, match="can't be loaded"):
        await ask(served, messages=USER)


@pytest.mark.parametrize("inside", [True, False])
async def test_a_clients_template_does_not_run_here(inside: bool) -> None:
    program = {"chat_template": "{{ 'a' * 300000000 }}"}
    request = {"messages": USER, **({"chat_template_kwargs": program} if inside else program)}
    with pytest.raises(RequestError, match="chat_template"):
        await LocalTokenizer(str(FOLDER)).render("m", request)


async def test_ids_that_are_no_tokens_are_told() -> None:
    with pytest.raises(UpstreamError):
        await LocalTokenizer(str(FOLDER)).detokenize("m", (-1,))
