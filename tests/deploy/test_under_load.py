"""A gateway of two workers under load: what it counts is what clients count, Prometheus can scrape
it, and its policy is changed with no request lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.fakes import FakeVllm, Tokenizer
from tests.gateway.fakes.script import story
from tests.gateway.processes import Running, free_port, relaygen
from tests.gateway.support import POLICY, STORY, USER, Stage, openai_client, policy_of, within

GENERATIONS = 200
STREAMS = 20
SLOW_S = 60.0


@dataclass(frozen=True)
class Loaded:
    """A running gateway, and the policy that it watches."""

    url: str
    client: AsyncOpenAI
    policy: Path
    written: dict[str, Any]
    running: Running


@asynccontextmanager
async def loaded(stage: Stage) -> AsyncIterator[Loaded]:
    same = Tokenizer()
    large, small = (FakeVllm(story(*STORY), model=m, tokenizer=same) for m in ("big", "tiny"))
    await stage.engine(large)
    await stage.engine(small)
    written = policy_of(large, small)
    policy = stage.write("policy.yaml", written)
    port = free_port()
    arguments = ["serve", "--port", str(port), "--workers", "2", "--policy", str(policy)]
    arguments += ["--large", large.url, "--small", small.url]
    async with relaygen(*arguments) as running:
        url = await running.url()
        await running.url()  # the other worker's
        reading = asyncio.create_task(_read(running))
        async with openai_client(url) as client:
            yield Loaded(url, client, policy, written, running)
        reading.cancel()


async def _read(running: Running) -> None:
    """Else it would wait for us once the pipe is full."""
    assert running.process.stderr is not None
    while line := await running.process.stderr.readline():
        running.seen.append(line.decode())


async def generations(gateway: Loaded, count: int) -> list[dict[str, Any]]:
    """The usage of so many streams, some at a time."""
    free = asyncio.Semaphore(STREAMS)

    async def one() -> dict[str, Any]:
        async with free:
            stream = await gateway.client.chat.completions.create(
                model=POLICY, messages=USER, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        return dict(chunks[-1].to_dict()["usage"])  # type: ignore[call-overload]

    return await asyncio.gather(*(one() for _ in range(count)))


async def scraped(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        assert response.status == 200
        return await response.text()


def told(usages: list[dict[str, Any]]) -> Counter[str]:
    """What clients were told, summed up."""
    found: Counter[str] = Counter()
    for usage in usages:
        ours = usage["relaygen"]
        found["generations"] += 1
        for name in ("large_tokens", "small_tokens", "handoffs", "segments", "discarded_tokens"):
            found[name] += ours[name]
    return found


def counted(text: str) -> Counter[str]:
    """The same, as the metrics have it."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            match sample.name:
                case "relaygen_generations_total" if sample.labels["outcome"] == "done":
                    found["generations"] += round(sample.value)
                case "relaygen_tokens_total":
                    found[f"{sample.labels['role']}_tokens"] += round(sample.value)
                case "relaygen_handoffs_total":
                    found["handoffs"] += round(sample.value)
                case "relaygen_segment_tokens_count":
                    found["segments"] += round(sample.value)
                case "relaygen_discarded_tokens_total":
                    found["discarded_tokens"] += round(sample.value)
    return found


async def test_what_is_counted_is_what_clients_were_told(stage: Stage) -> None:
    async with loaded(stage) as gateway:
        usages = await within(SLOW_S, generations(gateway, GENERATIONS))
        text = await scraped(gateway.url)
    assert told(usages)["generations"] == GENERATIONS
    assert counted(text) == told(usages)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
async def test_promtool_finds_nothing_wrong(stage: Stage) -> None:
    async with loaded(stage) as gateway:
        await within(SLOW_S, generations(gateway, STREAMS))
        text = await scraped(gateway.url)
    assert _promtool(text) == (0, "", "")


def _promtool(text: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus")
async def test_prometheus_scrapes_it(stage: Stage, tmp_path: Path) -> None:
    async with loaded(stage) as gateway, prometheus(tmp_path, gateway.url) as server:
        usages = await within(SLOW_S, generations(gateway, GENERATIONS))
        expected = float(GENERATIONS)
        async with asyncio.timeout(SLOW_S):
            query = 'sum(relaygen_generations_total{outcome="done"})'
            while (await server.value(query)) != expected:
                await asyncio.sleep(0.1)
        tokens = await server.value("sum(relaygen_tokens_total)")
        assert tokens == sum(usage["completion_tokens"] for usage in usages)
        assert await server.value("min_over_time(up[1h])") == 1
        [target] = (await server.get("/api/v1/targets"))["data"]["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")


class Server:
    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **query: str) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self._url + path, params=query) as response,
        ):
            return json.loads(await response.text())

    async def value(self, query: str) -> float | None:
        found = (await self.get("/api/v1/query", query=query))["data"]["result"]
        return float(found[0]["value"][1]) if found else None


@asynccontextmanager
async def prometheus(folder: Path, url: str) -> AsyncIterator[Server]:
    host = url.removeprefix("http://")
    jobs = [{"job_name": "relaygen", "static_configs": [{"targets": [host]}]}]
    config = {"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *("prometheus", f"--config.file={folder}/prometheus.yml"),
        *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        server = Server(f"http://{address}")
        async with asyncio.timeout(SLOW_S):
            while True:
                try:
                    if await server.value("up") is not None:
                        break
                except (aiohttp.ClientError, ValueError):
                    pass
                await asyncio.sleep(0.1)
        yield server
    finally:
        process.terminate()
        await within(SLOW_S, process.wait())


# ---- a policy is changed ------------------------------------------------------------------------


async def test_a_policy_is_changed_under_load_and_no_request_fails(stage: Stage) -> None:
    async with loaded(stage) as gateway:
        load = Load(gateway)
        async with load.running():
            await load.more(3 * STREAMS)
            assert set(load.answered_by) == {"small"}
            gateway.policy.write_text(yaml.safe_dump({**gateway.written, "answer": "large"}))
            await load.until("large")
            gateway.policy.write_text("answer: [nonsense")
            await until_refused(gateway)
            load.answered_by.clear()
            await load.more(3 * STREAMS)
            assert set(load.answered_by) == {"large"}
            assert load.failed == []


class Load:
    """Streams that begin anew whenever they end; who wrote each one's answer."""

    def __init__(self, gateway: Loaded) -> None:
        self._gateway = gateway
        self.answered_by: list[str] = []
        self.failed: list[Exception] = []
        self._came = asyncio.Condition()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def more(self, count: int) -> None:
        """So many more have ended."""
        wanted = len(self.answered_by) + len(self.failed) + count
        await self._until(lambda: len(self.answered_by) + len(self.failed) >= wanted)

    async def until(self, role: str) -> None:
        """Nothing but this role's answers, for a round of all streams."""
        await self._until(lambda: set(self.answered_by[-2 * STREAMS :]) == {role})

    async def _until(self, holds: Any) -> None:
        async with asyncio.timeout(SLOW_S), self._came:
            await self._came.wait_for(holds)

    async def _stream(self) -> None:
        while True:
            try:
                role = await self._one()
            except Exception as error:  # noqa: BLE001 - any of them is a request lost
                self.failed.append(error)
            else:
                self.answered_by.append(role)
            async with self._came:
                self._came.notify_all()

    async def _one(self) -> str:
        stream = await self._gateway.client.chat.completions.create(
            model=POLICY,
            messages=USER,
            stream=True,
            extra_body={"relaygen": {"trace": True}},
        )
        chunks = [chunk.to_dict() async for chunk in stream]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
        return str(chunks[-1]["relaygen"]["role"])  # type: ignore[index]


async def until_refused(gateway: Loaded) -> None:
    async with asyncio.timeout(SLOW_S):
        while "relaygen_refused_files 1.0" not in await scraped(gateway.url):
            await asyncio.sleep(0.1)
    while not any('"policy refused"' in line for line in gateway.running.seen):
        await asyncio.sleep(0.1)
