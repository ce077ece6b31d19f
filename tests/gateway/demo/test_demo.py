"""`relaygen demo` as a user runs it: real engines, the real gateway, signals."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

_ENDS_WITHIN_S = 15.0


@asynccontextmanager
async def _demo(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "demo", "--port", "0", *flags, stdout=PIPE, stderr=STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _read_to(process: Process, text: str) -> str:
    """The output up to the line that holds `text`."""
    assert process.stdout
    seen = ""
    while text not in seen:
        line = await process.stdout.readline()
        assert line, f"the demo ended before {text!r}:\n{seen}"
        seen += line.decode()
    return seen


async def _end(process: Process) -> tuple[int, str]:
    assert process.stdout
    async with asyncio.timeout(_ENDS_WITHIN_S):
        rest = await process.stdout.read()
        return await process.wait(), rest.decode()


def _children(process: Process) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


async def _all_end(pids: list[int]) -> bool:
    """Whether none of the processes runs any more, soon."""
    for _ in range(300):
        if not any(_runs(pid) for pid in pids):
            return True
        await asyncio.sleep(0.02)
    return False


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


async def test_once_shows_a_relayed_reply_and_the_comparison(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    async with _demo("--once", "--problems", "3", "--json", str(file)) as process:
        status, output = await _end_slowly(process)
    assert status == 0, output
    for shown in ("[large]", "[small]", "handoffs,", "large alone", "small alone", "relay"):
        assert shown in output
    found = json.loads(file.read_text())
    relay, large = found["modes"]["relay"], found["modes"]["large"]
    assert found["problems"] == 3
    assert relay["handoffs"] > 0 and relay["small_tokens"] > 0 and relay["large_tokens"] > 0
    assert relay["handoff_ms_p50"] > 0
    assert large["small_tokens"] == 0 and large["handoffs"] == 0
    assert found["relay_to_large"] > 0 and found["relay_to_ideal"] > 0
    assert len(found["graded"]) == 3


async def _end_slowly(process: Process) -> tuple[int, str]:
    assert process.stdout
    output = (await process.stdout.read()).decode()
    return await process.wait(), output


@linux
@pytest.mark.parametrize(
    "moment",
    [
        "starting the large engine",
        "starting the gateway",
        "comparing large, small and relay",
        "The gateway stays up",
    ],
)
async def test_ctrl_c_leaves_nothing(moment: str) -> None:
    async with _demo("--problems", "2") as process:
        await _read_to(process, moment)
        children = _children(process)
        process.send_signal(signal.SIGINT)
        status, rest = await _end(process)
        assert status == 130
        assert "Traceback" not in rest
        assert await _all_end(children)


@linux
async def test_nothing_outlives_a_killed_demo() -> None:
    async with _demo("--problems", "1") as process:
        await _read_to(process, "The gateway stays up")
        children = _children(process)
        assert len(children) == 3
        process.kill()
        assert await _all_end(children)


async def test_a_taken_port_is_told_and_another_one_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with _demo("--port", port, "--once", "--problems", "1") as process:
            status, output = await _end_slowly(process)
    assert status == 0, output
    assert f"port {port} is taken: the gateway takes a free one" in output


async def test_a_bad_policy_is_told_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("version: 1\nname: x\n")
    async with _demo("--policy", str(file)) as process:
        status, output = await _end_slowly(process)
    assert status == 1
    assert "cues: required, but missing" in output
    assert "starting" not in output and "Traceback" not in output


async def test_a_question_of_ones_own_and_markdown() -> None:
    flags = ("--once", "--problems", "1", "--markdown", "--question", "What is 12*3 + 45*2?")
    async with _demo(*flags) as process:
        status, output = await _end_slowly(process)
    assert status == 0, output
    assert "> What is 12*3 + 45*2?" in output
    assert "| relay |" in output
