"""Every prompt of a model that has a BOS begins with exactly one; without one it holds none.

The tiny model gets a BOS at test time: the same weights with other metadata.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import pytest

from gateway.demo.paths import bundled_model
from gateway.demo.processes import gateway
from tests.integration.recorder import Exchange, Recorder, recorded_engine
from tests.integration.variants import BOOL, INTEGER, TEXT, metadata, variant

_BOS = "<|endoftext|>"
_QUESTION = "What is 47*6 + 82*5 - 19?"
_ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _QUESTION}]},
    "/v1/completions": {"prompt": f"Let me find {_QUESTION}"},
}
_FORMS = ("tokens", "text")
_STOCK = "stock"
_OPENINGS = {  # what a variant's chat template begins with
    "literal": "{{ '" + _BOS + "' }}",
    "variable": "{{ bos_token }}",
    "silent": "",
}
_POLICY = """\
version: 1
name: {form}
large: {{backend: large, model: large}}
small: {{backend: small, model: small}}
sampling: {{temperature: 0, ignore_eos: true}}
plain: relay
min_large_tokens: 1
cues: {{words: [".", ",", Now, So, is, are, "="]}}
slow: {{hold: false}}
boundary: {{ends: [".", ",", "=", "?"]}}
handoff: {form}
"""


@dataclass(frozen=True, slots=True)
class Side:
    """One model behind its recorder; `bos` tells how often its prompts must hold the BOS."""

    url: str
    recorder: Recorder
    bos: int


@asynccontextmanager
async def _side(role: str, variant: str, folder: Path) -> AsyncIterator[Side]:
    """The model with a BOS and the template of that `variant`, or the `stock` one."""
    model = bundled_model("large")
    if variant != _STOCK:
        model = _with_bos(model, folder / f"{variant}.gguf", _OPENINGS[variant])
    async with recorded_engine(model, role, parallel=2) as (url, recorder):
        yield Side(url, recorder, bos=int(variant != _STOCK))


def _with_bos(model: Path, target: Path, opening: str) -> Path:
    """A copy of `model` whose tokenizer adds a BOS and whose template begins with `opening`."""
    keys = gguf.Keys.Tokenizer
    changed = {
        keys.ADD_BOS: (BOOL, True),
        keys.BOS_ID: (INTEGER, metadata(model, keys.LIST).index(_BOS)),
        keys.CHAT_TEMPLATE: (TEXT, opening + metadata(model, keys.CHAT_TEMPLATE)),
    }
    return variant(model, target, changed)


async def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(url + path, json=body) as response,
    ):
        return await response.json()


async def _tokens(side: Side, text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": True}
    return list((await _post(side.url, "/tokenize", body))["tokens"])


async def _check(side: Side, exchange: Exchange) -> None:
    [bos] = await _tokens(side, _BOS)
    text = await _tokens(side, exchange.prefix)
    # The engine evaluated these and put nothing before or between them.
    assert exchange.prompt_tokens == len(exchange.ids) + len(text)
    assert [*exchange.ids, *text].count(bos) == side.bos
    assert exchange.ids[: side.bos] == [bos] * side.bos


async def _check_reply(url: str, sides: tuple[Side, Side], path: str, form: str) -> None:
    for side in sides:
        side.recorder.exchanges.clear()
    reply = await _post(url, path, {**_ASKS[path], "model": form, "max_tokens": 60})
    assert reply["usage"]["relaygen"]["handoffs"] >= 4
    for side in sides:
        exchanges = list(side.recorder.exchanges)
        for exchange in exchanges:
            await _check(side, exchange)
        if form == "text" or side is sides[0]:  # the ids are the prompt's and no others
            alone = await _post(side.url, path, {**_ASKS[path], "max_tokens": 1})
            assert len(exchanges[0].ids) == alone["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("large", "small"), [("literal", "silent"), ("variable", _STOCK)])
async def test_each_prompt_has_the_bos_once_or_not_at_all(
    large: str, small: str, tmp_path: Path
) -> None:
    files = [tmp_path / f"{form}.yaml" for form in _FORMS]
    for file, form in zip(files, _FORMS, strict=True):
        file.write_text(_POLICY.format(form=form))
    async with (
        _side("large", large, tmp_path) as first,
        _side("small", small, tmp_path) as second,
        gateway(files[0], first.url, second.url, flags=["--policy", str(files[1])]) as url,
    ):
        for path, form in product(_ASKS, _FORMS):
            await _check_reply(url, (first, second), path, form)
