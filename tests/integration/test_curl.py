"""curl, as the README's readers use it, against the relay on real engines."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.support import ANSWER, POLICY, QUESTION, Running, busy, idle_soon, tiny_relay
from tests.gateway.support import WAIT_S, events, within

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl"),
]

CHAT = {"model": POLICY, "messages": [{"role": "user", "content": QUESTION}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with tiny_relay() as found:
        yield found


@asynccontextmanager
async def curl(url: str, body: dict[str, Any], *flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--show-error", "--noproxy", "*", *flags,
        "--header", "Content-Type: application/json", "--data", json.dumps(body),
        f"{url}/v1/chat/completions", stdin=asyncio.subprocess.DEVNULL, stdout=PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def told(url: str, body: dict[str, Any], *flags: str) -> bytes:
    async with curl(url, body, *flags) as process:
        out, _ = await within(60, process.communicate())
        assert process.returncode == 0
        return bytes(out)


async def test_a_reply_in_one_piece(running: Running) -> None:
    reply = json.loads(await told(running.url, CHAT))
    assert reply["choices"][0]["message"]["content"].endswith(f"is {ANSWER}.")


async def test_a_stream_comes_as_it_is_written_and_ends_with_done(running: Running) -> None:
    async with curl(running.url, {**CHAT, "stream": True}, "--no-buffer") as process:
        assert process.stdout
        first = await within(WAIT_S, process.stdout.readuntil(b"\n\n"))
        rest = await within(60, process.stdout.read())
    *chunks, done = events(first + rest)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text.endswith(f"is {ANSWER}.")


async def test_the_engine_is_idle_within_a_second_of_curl_being_killed(running: Running) -> None:
    endless = {"relaygen": {"mode": "large"}, "ignore_eos": True, "max_tokens": 1900}
    async with curl(running.url, {**CHAT, **endless, "stream": True}, "--no-buffer") as process:
        assert process.stdout
        await within(WAIT_S, process.stdout.readuntil(b"\n\n"))
        assert await busy(running.large)
    await idle_soon(running.large)


async def test_an_error_has_its_status_and_says_what_to_do(running: Running) -> None:
    flags = ("--include", "--write-out", "\n%{http_code}")
    answer = await told(running.url, {**CHAT, "model": "gpt-9"}, *flags)
    head, _, rest = answer.decode().replace("\r", "").partition("\n\n")
    body, _, status = rest.rpartition("\n")
    assert status == "404"
    assert "content-type: application/json" in head.lower()
    assert "x-request-id: req_" in head.lower()
    assert json.loads(body)["error"]["code"] == "model_not_found"
    assert POLICY in json.loads(body)["error"]["message"]


async def test_with_fail_an_error_is_an_exit_status(running: Running) -> None:
    async with curl(running.url, {"model": POLICY}, "--fail") as process:
        await within(WAIT_S, process.communicate())
    assert process.returncode == 22
