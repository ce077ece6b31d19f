"""The benchmark measures what it says: engines, load and the comparison with a base."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI

from benchmarks.compare import ratios, regressions
from gateway.bench.engine import NAMES
from gateway.bench.prefixes import BLOCK, PrefixCache
from gateway.bench.script import ANSWER, Script
from gateway.bench.stage import POLICY, Stage, loaded, staged
from gateway.cli import main


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged(tokens=40, large_run=7, small_run=5, token_ms="1,1") as stage:
        yield stage


async def test_the_gateway_relays_the_engines_script(stage: Stage) -> None:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="-", max_retries=0) as client:
        reply: Any = await client.chat.completions.create(
            model=POLICY, messages=[{"role": "user", "content": "Hi"}]
        )
    message, usage = reply.choices[0].message, reply.usage.relaygen
    script = Script(40, 7, 5)
    assert message.reasoning_content == "".join(script.texts[1:41])
    assert message.content == " answer" * ANSWER
    assert usage["handoffs"] == len(script.ends) + (len(script.ends) % 2 == 0)
    assert len((await stage.engines())["handoff_ms"]) == len(script.ends)


async def test_load_counts_what_comes(stage: Stage) -> None:
    told = await loaded(stage.large, NAMES[0], streams=2, requests=2)
    assert told["errors"] == 0
    assert told["frames"] == 4 * (1 + 40 + 1 + ANSWER + 2)
    assert told["tokens"] == 4 * (1 + 40 + 1 + ANSWER)
    assert len(told["first_ms"]) == len(told["total_ms"]) == 4
    assert stage.cpu_s() > 0
    assert stage.rss_kib() > 1000


def chunk(data: str) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data.encode())


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = chunk('data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
DONE = chunk("data: [DONE]\n\n")
END = b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "errors"),
    [
        (STREAM + TOKEN + DONE + END, 0),
        (STREAM + TOKEN, 1),
        (STREAM + TOKEN + END, 1),
        (STREAM + TOKEN + chunk('data: {"error":{"message":"no"}}\n\n') + DONE + END, 1),
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 2\r\n\r\n{}", 1),
    ],
    ids=["whole", "cut", "no end", "an error event", "refused"],
)
async def test_load_notices_what_broke(answer: bytes, errors: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        told = await loaded(f"http://127.0.0.1:{port}", "any")
    assert told["errors"] == errors
    assert told["refused"][9:12] == ("429" if b"429" in answer else "")


async def test_streams_end_where_they_are_told_to(stage: Stage) -> None:
    told = await loaded(stage.large, NAMES[0], max_tokens=3)
    assert (told["errors"], told["frames"]) == (0, 3 + 2)


async def test_engines_remember_prompts_and_what_followed_them() -> None:
    async with staged(tokens=64, large_run=20, small_run=20, prefill_us=10) as stage:
        await stage.relay(prompt=160)
        first = await stage.engines()
        await stage.relay(prompt=160)
        second = await stage.engines()
    assert 2 * 160 < first["prefilled"] < 3 * 160, "each model reads the prompt once"
    assert first["cached"] > 160, "the large model finds it again after a handoff"
    again = second["prefilled"] - first["prefilled"]
    assert again < first["prefilled"] // 4
    assert second["cached"] - first["cached"] > first["cached"]
    assert second["running"] == 0


async def test_a_client_that_leaves_ends_its_stream() -> None:
    async with staged(tokens=500, token_ms="20,20") as stage:
        address = urlsplit(stage.large)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = b'{"messages":[{"role":"user","content":"Hi"}],"stream":true}'
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await reader.readuntil(b"data: ")
        assert (await stage.engines())["running"] == 1
        writer.transport.abort()
        async with asyncio.timeout(10):
            while (told := await stage.engines())["running"]:
                await asyncio.sleep(0.01)
    assert told["aborted"] == 1


def test_whole_blocks_of_a_known_beginning_are_cached() -> None:
    cache = PrefixCache(blocks=8)
    prompt = list(range(3 * BLOCK + 5))
    assert cache.add(prompt) == 0
    assert cache.add(prompt) == 3 * BLOCK
    assert cache.add([*prompt[: 2 * BLOCK], *range(1000, 1000 + BLOCK)]) == 2 * BLOCK
    assert cache.add([7, *prompt]) == 0
    known = PrefixCache()
    first, other = list(range(2 * BLOCK)), list(range(90, 90 + 2 * BLOCK))
    known.add(first)
    known.add(other)
    assert known.add([*first[:BLOCK], *other[BLOCK:]]) == BLOCK, "what came before differs"
    for start in range(2000, 2000 + 100 * BLOCK, BLOCK):
        cache.add(list(range(start, start + BLOCK)))
    assert cache.add(prompt) == 0, "the oldest are forgotten"


def test_the_command_writes_what_it_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert main(["bench", "--quick", "--only", "first_token", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {row["scenario"] for row in report["rows"]} == {"first_token"}
    assert report["machine"]["cores"]
    assert "first_token" in capsys.readouterr().out


def test_an_unknown_scenario_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "nothing"]) == 1
    assert "--only: unknown nothing; there are first_token, " in capsys.readouterr().err


def row(what: str, ratio: float | None, unit: str = "ms") -> dict[str, object]:
    return {"scenario": "s", "what": what, "ratio": ratio, "unit": unit}


def test_the_comparison_fails_on_what_became_slower() -> None:
    base = ratios({"rows": [row("first", 2.0), row("rate", 0.5, "tokens/s"), row("own", None)]})
    assert base == {"s: first": 2.0, "s: rate": 2.0}
    assert regressions(base, base) == []
    near = ratios({"rows": [row("first", 2.2), row("rate", 0.46, "tokens/s")]})
    assert regressions(base, near) == []
    slow = ratios({"rows": [row("first", 2.4), row("rate", 0.4, "tokens/s")]})
    assert [line.partition(" ")[0] for line in regressions(base, slow)] == ["s:", "s:"]
    assert regressions(base, {"s: first": 1.0}) == ["s: rate: not measured"]
