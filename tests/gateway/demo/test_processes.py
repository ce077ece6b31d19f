"""Engines come up, and never outlive who started them. Real processes throughout."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest

from gateway.demo import processes
from gateway.demo.paths import bundled_model, bundled_policy
from gateway.demo.processes import StartError, child, llamacpp_engine, port_is_taken, tiny_pair

_SMALL = str(bundled_model("small"))
_ENDS_WITHIN_S = 20.0  # a busy machine's


async def _refuses(url: str) -> bool:
    """Whether nothing listens at `url` any more, soon."""
    port = int(url.rpartition(":")[2])
    try:
        async with asyncio.timeout(_ENDS_WITHIN_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    return True
                except ConnectionResetError:  # it ended just as we came
                    pass
                else:
                    writer.close()
                await asyncio.sleep(0.02)
    except TimeoutError:
        return False


async def _engine() -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.demo.llamacpp", "--model", _SMALL, "--alias", "x",
        stdin=PIPE, stdout=PIPE,
    )  # fmt: skip
    assert process.stdout
    line = (await process.stdout.readline()).decode()
    assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+\n", line)
    return process, line.split()[1]


async def test_both_engines_serve_their_models_and_end_with_the_block() -> None:
    async with tiny_pair() as urls, aiohttp.ClientSession() as session:
        names = []
        for url in urls:
            async with session.get(f"{url}/v1/models") as response:
                names.append((await response.json())["data"][0]["id"])
        assert names == ["tiny-large", "tiny-small"]
    assert all([await _refuses(url) for url in urls])


async def test_context_is_for_each_stream() -> None:
    async with (
        llamacpp_engine("small", parallel=3, context=1024) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/slots") as response,
    ):
        assert [slot["n_ctx"] for slot in await response.json()] == [1024] * 3


async def test_an_engine_ends_when_its_block_raises() -> None:
    with pytest.raises(RuntimeError, match="mine"):
        async with llamacpp_engine("small") as url:
            raise RuntimeError("mine")
    assert await _refuses(url)


async def test_an_engine_ends_when_its_owner_is_cancelled() -> None:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with llamacpp_engine("small") as url:
            started.set_result(url)
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    url = await started
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await _refuses(url)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_engine_ends_on_a_signal(number: signal.Signals) -> None:
    process, _ = await _engine()
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), _ENDS_WITHIN_S) == 0


async def test_an_engine_ends_when_its_stdin_closes() -> None:
    process, _ = await _engine()
    assert process.stdin
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), _ENDS_WITHIN_S) == 0


async def test_an_engine_ends_in_the_middle_of_a_stream() -> None:
    process, url = await _engine()
    body = {"prompt": "1", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        await response.content.readline()
        assert process.stdin
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), _ENDS_WITHIN_S) == 0


_PARENT = """
import asyncio
from gateway.demo.processes import child, llamacpp_engine

async def main():
    async with llamacpp_engine("small") as url, child("a server", "gateway.demo.tether",
            "http.server", "{port}", "--bind", "127.0.0.1") as server:
        print(url, server.process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_children_end_when_their_parent_is_killed() -> None:
    port = processes.free_port()
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PARENT.format(port=port), stdout=PIPE
    )
    assert parent.stdout
    engine, server = (await parent.stdout.readline()).decode().split()
    await _listens(port)
    parent.kill()
    await parent.wait()
    assert await _refuses(engine)
    assert await _refuses(f"http://127.0.0.1:{port}")
    assert await _ended(int(server))


async def _ended(pid: int) -> bool:
    """Whether the process is gone, soon."""
    try:
        async with asyncio.timeout(_ENDS_WITHIN_S):
            while _runs(pid):
                await asyncio.sleep(0.02)
    except TimeoutError:
        return False
    return True


async def _listens(port: int) -> None:
    async with asyncio.timeout(_ENDS_WITHIN_S):
        while not port_is_taken(port):
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())


async def test_a_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    async with child("a stubborn child", "tests.gateway.demo.stubborn") as stubborn:
        await asyncio.wait_for(stubborn.url, 10)
    assert stubborn.process.returncode == -signal.SIGKILL


async def test_a_taken_port_is_told_with_the_engines_own_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"(?s)the small engine ended .*port {port}") as raised:
            async with llamacpp_engine("small", port=port):
                pass
    assert "check that the file is a GGUF model and that the port is free" in str(raised.value)


async def test_a_child_that_is_not_ready_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START_S", 0.0)
    with pytest.raises(StartError, match="the small engine was not ready within 0 s"):
        async with llamacpp_engine("small"):
            pass


async def test_a_gateway_that_is_never_ready_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_START_S", 5.0)
    missing = tmp_path / "missing.yaml"
    with pytest.raises(StartError, match=r"(?s)the gateway .*missing.yaml"):
        async with processes.gateway(missing, "http://127.0.0.1:1", "http://127.0.0.1:2"):
            pass


async def test_a_gateway_that_ends_at_once_shows_its_last_lines() -> None:
    policy = bundled_policy("tiny-pair")
    with pytest.raises(StartError, match=r"(?s)the gateway ended with status 2.*--no-such-flag"):
        async with processes.gateway(policy, "http://x", "http://y", flags=["--no-such-flag"]):
            pass


def test_a_missing_package_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gateway.demo import llamacpp

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    try:
        assert llamacpp.main(["--model", _SMALL, "--alias", "x"]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "pip install 'relaygen[demo]'" in capsys.readouterr().err


def test_ports() -> None:
    assert not port_is_taken(processes.free_port())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert port_is_taken(taken.getsockname()[1])
