"""`relaygen serve` as a process: its start, its end, and what it tells when it can't start."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest

from gateway.cli import main
from tests.gateway.fakes import FakeVllm, Gate, writes
from tests.gateway.fakes.script import silence
from tests.gateway.processes import START_S, Running, free_port, relaygen, serve
from tests.gateway.support import (
    GONE_S,
    POLICY,
    USER,
    WAIT_S,
    Stage,
    leaving,
    openai_client,
    within,
)


async def test_starts_without_the_heavy_libraries(stage: Stage) -> None:
    arguments = await serve(stage, FakeVllm(model="big"))
    async with relaygen(*arguments, python=("-X", "importtime")) as running:
        url = (await within(START_S, running.said("listening")))["url"]
        async with openai_client(url.removesuffix("/v1")) as client:
            reply = await client.chat.completions.create(model=POLICY, messages=USER)
        assert reply.choices[0].message.content == "ok"
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    imported = {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in "".join(running.seen).splitlines()
        if line.startswith("import time:")
    }
    assert "aiohttp" in imported
    assert imported.isdisjoint({"transformers", "openai", "tiktoken", "torch", "jinja2"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_running_generation_finish(stage: Stage, number: int) -> None:
    gate = Gate()
    arguments = await serve(stage, FakeVllm(writes("one", gate, " two"), model="big"))
    async with relaygen(*arguments) as running:
        url = await running.url()
        async with openai_client(url) as client, openai_client(url) as kept:
            await kept.models.list()
            chunks = await client.chat.completions.create(model=POLICY, messages=USER, stream=True)
            await within(WAIT_S, gate.reached.wait())
            running.process.send_signal(number)
            await within(WAIT_S, running.said("draining"))
            async with openai_client(url) as late:
                with pytest.raises(openai.APIConnectionError):
                    await late.models.list()
            # A connection that was open before is told instead.
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await kept.chat.completions.create(model=POLICY, messages=USER)
            gate.opened.set()
            texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(texts) == "one two"
        assert await running.ended() == 0


async def test_a_generation_that_takes_too_long_is_cut_off(stage: Stage) -> None:
    gate = Gate()
    large = FakeVllm(writes("one", gate), model="big")
    arguments = await serve(stage, large)
    async with relaygen(*arguments, env={"RELAYGEN_TIMEOUTS__DRAIN": "0.1"}) as running:
        url = await running.url()
        async with openai_client(url) as client:
            chunks = await client.chat.completions.create(model=POLICY, messages=USER, stream=True)
            await within(WAIT_S, gate.reached.wait())
            running.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIConnectionError):
                async for _ in chunks:
                    pass
        assert await running.ended() == 0
    await within(GONE_S, large.decodes[0].left.wait())


async def test_a_port_in_use_is_told(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with relaygen("serve", "--port", str(port)) as running:
            assert await running.ended() == 1
    said = "".join(running.seen)
    assert f"can't listen on 127.0.0.1:{port}" in said
    assert "Traceback" not in said


async def test_a_host_that_is_not_ours_is_told() -> None:
    async with relaygen("serve", "--host", "192.0.2.1", "--port", "0") as running:
        assert await running.ended() == 1
    said = "".join(running.seen)
    assert "can't listen on 192.0.2.1" in said
    assert "Traceback" not in said


# ---- a second signal, and exit statuses ---------------------------------------------------------


@asynccontextmanager
async def draining(
    stage: Stage, first: int, *more: str, workers: int = 1, env: Mapping[str, str] = {}
) -> AsyncIterator[tuple[Running, FakeVllm]]:
    """A gateway that was told to stop while a generation runs that never ends by itself."""
    large = FakeVllm(writes("one", silence()), model="big")
    arguments = await serve(stage, large)
    if workers > 1:
        arguments += ["--port", str(free_port()), "--workers", str(workers)]
    async with relaygen(*arguments, *more, env=env) as running:
        urls = [await running.url() for _ in range(workers)]
        async with leaving(urls[0], stream=True):
            await within(WAIT_S, large.decode())
            running.process.send_signal(first)
            for _ in range(workers):
                await within(START_S, running.said("draining"))
            yield running, large


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(stage: Stage, second: int) -> None:
    async with draining(stage, signal.SIGTERM) as (running, large):
        running.process.send_signal(second)
        assert await running.ended() == -second  # 143 or 130 to a shell
        await within(GONE_S, large.decodes[0].left.wait())


async def test_a_second_signal_ends_workers_at_once(stage: Stage) -> None:
    async with draining(stage, signal.SIGTERM, workers=2) as (running, large):
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 128 + signal.SIGINT
        await within(GONE_S, large.decodes[0].left.wait())


async def test_workers_are_cut_off_after_the_limit(stage: Stage) -> None:
    limit = {"RELAYGEN_TIMEOUTS__DRAIN": "0.1"}
    async with draining(stage, signal.SIGINT, workers=2, env=limit) as (running, _):
        assert await running.ended() == 0


async def test_workers_that_cannot_listen_are_told(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ("serve", "--port", str(port), "--policies", str(stage.folder))
        async with relaygen(*arguments, "--workers", "2") as running:
            assert await running.ended() == 1
    assert f"can't listen on 127.0.0.1:{port}" in "".join(running.seen)


def test_wrong_usage_is_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--prot", "1"])
    assert caught.value.code == 2


async def test_workers_share_a_port_and_end_together(stage: Stage) -> None:
    arguments = await serve(stage, FakeVllm(model="big"))
    arguments += ["--port", str(free_port()), "--workers", "2"]
    async with relaygen(*arguments) as running:
        urls = {await running.url() for _ in range(2)}
        async with openai_client(urls.pop()) as client:
            assert (await client.models.list()).data[0].id == POLICY
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does: to all of them
        assert await running.ended() == 0


async def test_a_worker_that_dies_takes_the_others_with_it(stage: Stage) -> None:
    arguments = await serve(stage, FakeVllm(model="big"))
    arguments += ["--port", str(free_port()), "--workers", "2"]
    async with relaygen(*arguments) as running:
        for _ in range(2):
            await running.url()
        os.kill(children(running.process.pid)[0], signal.SIGKILL)
        assert await running.ended() == 128 + signal.SIGKILL


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


# ---- the second port ----------------------------------------------------------------------------


async def seen(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_the_second_port_has_what_is_for_operation(stage: Stage) -> None:
    arguments = await serve(stage, FakeVllm(model="big"))
    own = {"RELAYGEN_ADMIN__PORT": "0", "RELAYGEN_API_KEYS": '["secret"]'}
    async with relaygen(*arguments, env=own) as running:
        admin = (await within(START_S, running.said("listening for operation")))["url"]
        url = await running.url()
        found = {
            (port, path): (await seen(base + path))[0]
            for port, base in (("main", url), ("admin", admin))
            for path in ("/healthz", "/metrics", "/v1/models")
        }
        assert found == {
            ("main", "/healthz"): 200,
            ("main", "/metrics"): 404,
            ("main", "/v1/models"): 401,
            ("admin", "/healthz"): 200,
            ("admin", "/metrics"): 200,
            ("admin", "/v1/models"): 401,
        }
        assert (await seen(f"{url}/readyz"))[0] == 404
        assert "policies" in (await seen(f"{admin}/readyz"))[1]


async def test_the_second_port_tells_while_it_drains(stage: Stage) -> None:
    admin = f"http://127.0.0.1:{(port := free_port())}"
    own = {"RELAYGEN_ADMIN__PORT": str(port)}
    async with draining(stage, signal.SIGTERM, env=own) as (running, _):
        assert (await seen(f"{admin}/readyz"))[0] == 503
        assert "\nrelaygen_in_flight 1.0\n" in (await seen(f"{admin}/metrics"))[1]
        running.process.send_signal(signal.SIGTERM)


async def test_a_second_port_in_use_is_told(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ("serve", "--port", "0", "--policies", str(stage.folder))
        async with relaygen(*arguments, env={"RELAYGEN_ADMIN__PORT": str(port)}) as running:
            assert await running.ended() == 1
    said = "".join(running.seen)
    assert f"can't listen on 127.0.0.1:{port}: " in said
    assert "choose another admin.host or admin.port" in said
    assert "Traceback" not in said
