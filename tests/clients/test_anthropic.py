"""What the anthropic SDK sees on /v1/messages beside chats: its blocks, events, counts and keys."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.support import ANSWER, POLICY, QUESTION, Client, Running, client, scripted
from tests.clients.tool_caller import ARGUMENTS, CHAT, TOOL, ToolCaller
from tests.gateway.fakes import FakeVllm, Tokenizer, writes

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sdk() -> AsyncIterator[Client]:
    async with client("anthropic") as found:
        yield found


def asked(running: Running, **more: Any) -> dict[str, Any]:
    given = {"url": running.url, "key": "any", "model": POLICY, "messages": MESSAGES}
    return {**given, "temperature": 0, **more}


async def test_the_thinking_and_the_answer_are_blocks_of_their_own(
    running: Running, sdk: Client
) -> None:
    thinking, text = await sdk("blocks", **asked(running))
    assert thinking["type"] == "thinking"
    assert thinking["thinking"].strip().startswith("We are asked")
    assert "signature" in thinking
    assert text["type"] == "text"
    assert text["text"].endswith(f"is {ANSWER}.")


async def test_a_stream_has_anthropics_events_in_their_order(running: Running, sdk: Client) -> None:
    kinds = await sdk("events", **asked(running))
    kinds = [kind for kind in kinds if kind not in ("ping", "content_block_delta signature_delta")]
    assert kinds == [
        "message_start",
        "content_block_start thinking",
        "content_block_delta thinking_delta",
        "content_block_stop",
        "content_block_start text",
        "content_block_delta text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_a_conversation_goes_on_with_blocks_and_a_system_prompt(
    running: Running, sdk: Client
) -> None:
    blocks = await sdk("blocks", **asked(running))
    messages = [*MESSAGES, {"role": "assistant", "content": blocks}, *MESSAGES]
    system = [{"type": "text", "text": "Be brief."}]
    told = await sdk("create", **asked(running, messages=messages, system=system))
    assert told["text"], told
    assert told["finish"] == "stop"


async def test_a_stop_sequence_ends_the_reply(running: Running, sdk: Client) -> None:
    told = await sdk("create", **asked(running, stop_sequences=["never", "value"]))
    assert told["text"].strip() == "The"
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "value")


async def test_tokens_are_counted_as_the_reply_counts_them(running: Running, sdk: Client) -> None:
    reply = await sdk("create", **asked(running, max_tokens=5))
    assert await sdk("count", **asked(running)) == reply["prompt_tokens"]


async def test_a_stream_begins_with_the_prompts_tokens(running: Running, sdk: Client) -> None:
    message = await sdk("started", **asked(running))
    assert message["usage"]["input_tokens"] == await sdk("count", **asked(running))
    assert message["role"] == "assistant"
    assert message["content"] == []
    assert message["stop_reason"] is None


async def test_a_tools_result_reaches_the_engine(tmp_path: Path, sdk: Client) -> None:
    engine = ToolCaller(model="big")
    async with scripted(tmp_path, engine, FakeVllm(model="tiny")) as served:
        given = {"url": served.url, "key": "any", "model": "pair", "tools": [TOOL]}
        given |= {"tool_choice": "required"}
        blocks = await sdk("blocks", messages=MESSAGES, **given)
        [call] = [block for block in blocks if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42"}
        turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        await sdk("create", messages=[*MESSAGES, *turns], **given)
    sent = engine.asked(CHAT)[-1].body["messages"]
    [told] = [message for message in sent if message["role"] == "tool"]
    assert told["content"] == "42"
    [caller] = [message for message in sent if message.get("tool_calls")]
    assert caller["tool_calls"][0]["id"] == told["tool_call_id"]
    assert json.loads(caller["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS


async def test_the_key_may_come_as_a_bearer_token(tmp_path: Path, sdk: Client) -> None:
    words = Tokenizer()
    script = writes("<think>", "Yes", "</think>")
    large = FakeVllm(script, model="big", tokenizer=words)
    small = FakeVllm(writes("12"), model="tiny", tokenizer=words)
    async with scripted(tmp_path, large, small, api_keys=("sk-right",)) as served:
        given = {"url": served.url, "model": "pair", "messages": MESSAGES}
        right = await sdk("bearer", token="sk-right", **given)
        wrong = await sdk("bearer", token="sk-wrong", **given)
    assert right["text"] == "12", right
    assert "AuthenticationError" in wrong["raised"]


async def test_an_error_has_anthropics_shape(running: Running, sdk: Client) -> None:
    found = await sdk("create", **asked(running, model="gpt-9"))
    assert found["body"]["type"] == "error"
    assert found["body"]["error"]["type"] == "not_found_error"
    assert "gpt-9" in found["body"]["error"]["message"]
