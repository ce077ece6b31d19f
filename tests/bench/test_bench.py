"""The benchmark measures what it says: engines, load and the comparison with a base."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.compare import ratios, regressions
from gateway.bench.engine import NAMES
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
    assert len(told["first_ms"]) == len(told["total_ms"]) == 4
    assert stage.cpu_s() > 0
    assert stage.rss_kib() > 1000


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [STREAM + b"5\r\ndata:\r\n", b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"],
)
async def test_load_notices_a_cut_and_a_refusal(answer: bytes) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        told = await loaded(f"http://127.0.0.1:{port}", "any")
    assert told["errors"] == 1


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
