"""What every client's SDK can do with the gateway, on the tiny pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.support import (
    ANSWER,
    POLICY,
    QUESTION,
    Client,
    Running,
    busy,
    idle_soon,
    scripted,
)
from tests.clients.tool_caller import ARGUMENTS, CHAT, NAME, TOOL, ToolCaller
from tests.gateway.fakes import FakeVllm

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]

KEY = "unused"
MESSAGES = [{"role": "user", "content": QUESTION}]
ENDLESS = {"max_tokens": 1900, "relaygen": {"mode": "large"}, "ignore_eos": True}


def chat(running: Running, **more: Any) -> dict[str, Any]:
    return {
        "url": running.url,
        "key": KEY,
        "model": POLICY,
        "messages": MESSAGES,
        "temperature": 0,
        **more,
    }


def is_the_reply(told: dict[str, Any]) -> None:
    assert told.get("raised") is None, told
    assert told["text"].endswith(f"is {ANSWER}.")
    assert "</think>" not in told["text"]
    assert told["finish"] == "stop"
    assert told["completion_tokens"] > told["prompt_tokens"] > 0


async def test_a_reply_in_one_piece(running: Running, each_client: Client) -> None:
    told = await each_client("create", **chat(running))
    is_the_reply(told)
    assert told["model"] == POLICY
    if each_client.name != "langchain":  # its ChatOpenAI drops what OpenAI's API has not
        assert told["reasoning"].startswith("\nWe are asked")


@pytest.mark.parametrize("step", ["stream", "helper", "create_async", "stream_async"])
async def test_the_same_reply_in_other_ways(
    running: Running, each_client: Client, step: str
) -> None:
    if step.endswith("_async") and each_client.name == "openai_node":
        pytest.skip("asynchronous as it is")
    told = await each_client(step, **chat(running))
    is_the_reply(told)
    whole = await each_client("create", **chat(running))
    assert told["text"] == whole["text"]
    assert told["reasoning"] == whole["reasoning"]
    assert told.get("heard", told["text"]) == told["text"]
    assert told.get("chunks", 100) > 10


async def test_max_tokens_ends_the_reply(running: Running, each_client: Client) -> None:
    told = await each_client("create", **chat(running, max_tokens=9))
    assert told["finish"] == "length"
    assert told["completion_tokens"] == 9


async def test_the_engine_is_idle_within_a_second_of_a_stream_closed_half_way(
    running: Running, each_client: Client
) -> None:
    assert await each_client("open", chunks=5, **chat(running, **ENDLESS)) == 5
    assert await busy(running.large)
    assert await each_client("close") == "closed"
    await idle_soon(running.large)


async def test_the_response_headers_tell_the_request_and_how_it_was_served(
    running: Running, each_client: Client
) -> None:
    headers = await each_client("headers", **chat(running, max_tokens=5))
    assert headers["x-request-id"].startswith("req_")
    assert headers["x-relaygen-mode"] == "relay"


async def test_tools_that_no_model_calls_leave_the_reply_as_it_is(
    running: Running, each_client: Client
) -> None:
    """The tiny models call none, and llama.cpp forces no call where the template knows none."""
    told = await each_client("tools", **chat(running, tools=[TOOL], tool_choice="required"))
    assert told == {"calls": [], "finish": "stop"}


@pytest.mark.parametrize("step", ["tools", "streamed_tools"])
async def test_a_tool_call_comes_back_parsed(
    tmp_path: Path, each_client: Client, step: str
) -> None:
    engine = ToolCaller(model="big")
    async with scripted(tmp_path, engine, FakeVllm(model="tiny")) as served:
        asked = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
        told = await each_client(step, url=served.url, key=KEY, model="pair", **asked)
    assert told == {"calls": [{"name": NAME, "arguments": ARGUMENTS}], "finish": "tool_calls"}
    sent = engine.asked(CHAT)[-1].body
    assert sent["model"] == "big"
    assert sent["tools"] == [TOOL]
    assert sent["tool_choice"] == "required"
