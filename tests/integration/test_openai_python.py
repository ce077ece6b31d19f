"""The openai package, in every way that it can ask, against the relay on real engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.support import (
    ANSWER,
    POLICY,
    QUESTION,
    Running,
    busy,
    idle_soon,
    scripted,
    tiny_relay,
)
from tests.clients.tool_caller import ARGUMENTS, NAME, TOOL, ToolCaller
from tests.gateway.fakes import Error, FakeVllm, Gate, Tokenizer, writes
from tests.gateway.support import USER, WAIT_S, ask, openai_client, within

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {
    "model": POLICY,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
}
ENDLESS = {"relaygen": {"mode": "large"}, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with tiny_relay() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(running.url) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reply(client: AsyncOpenAI) -> Any:
    return await client.chat.completions.create(**CHAT)


# ---- chat ---------------------------------------------------------------------------------------


async def test_create(reply: Any) -> None:
    choice, usage = reply.choices[0], reply.usage
    assert choice.message.content.endswith(f"is {ANSWER}.")
    assert choice.message.reasoning_content.startswith("\nWe are asked")
    assert choice.finish_reason == "stop"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    ours = usage.relaygen
    assert usage.completion_tokens == ours["large_tokens"] + ours["small_tokens"]


async def test_stream(client: AsyncOpenAI, reply: Any) -> None:
    options = {"include_usage": True}
    stream = await client.chat.completions.create(**CHAT, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == reply.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens


async def test_stream_helper(client: AsyncOpenAI, reply: Any) -> None:
    async with client.chat.completions.stream(**CHAT) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == reply.choices[0].message.content


async def test_the_synchronous_client(running: Running, reply: Any) -> None:
    def texts() -> list[str | None]:
        with OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
            whole = client.chat.completions.create(**CHAT).choices[0].message.content
            chunks = list(client.chat.completions.create(**CHAT, stream=True))
            with client.chat.completions.stream(**CHAT) as stream:
                final = stream.get_final_completion().choices[0].message.content
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return [whole, streamed, final]

    assert await asyncio.to_thread(texts) == [reply.choices[0].message.content] * 3


async def test_raw_response(client: AsyncOpenAI, reply: Any) -> None:
    headers = {"x-request-id": "mine-1"}
    raw = await client.chat.completions.with_raw_response.create(**CHAT, extra_headers=headers)
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.headers["x-relaygen-mode"] == "relay"
    assert raw.parse().choices[0].message == reply.choices[0].message


async def test_structured_output(client: AsyncOpenAI) -> None:
    class Sum(BaseModel):
        total: int

    parsed = await client.chat.completions.parse(**CHAT, response_format=Sum, max_tokens=300)
    assert isinstance(parsed.choices[0].message.parsed, Sum)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_call_comes_back_parsed(tmp_path: Path, streamed: bool) -> None:
    asked: Any = {"model": "pair", "messages": USER, "tools": [TOOL], "tool_choice": "required"}
    async with scripted(tmp_path, ToolCaller(model="big"), FakeVllm(model="tiny")) as served:
        completions = served.client.chat.completions
        if streamed:
            async with completions.stream(**asked) as stream:
                reply = await stream.get_final_completion()
        else:
            reply = await completions.create(**asked)
    [call] = reply.choices[0].message.tool_calls
    assert call.function.name == NAME
    assert json.loads(call.function.arguments) == ARGUMENTS


# ---- responses ----------------------------------------------------------------------------------


async def test_responses(client: AsyncOpenAI, reply: Any) -> None:
    response = await client.responses.create(model=POLICY, input=QUESTION, temperature=0)
    assert response.status == "completed"
    assert response.output_text == reply.choices[0].message.content
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage
    assert response.usage.output_tokens == reply.usage.completion_tokens


async def test_responses_stream(client: AsyncOpenAI, reply: Any) -> None:
    asked: Any = {"model": POLICY, "input": QUESTION, "temperature": 0}
    async with client.responses.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert sum(kind.endswith(".delta") for kind in kinds) > 10
    assert kinds[-1] == "response.completed"
    assert final.output_text == reply.choices[0].message.content


async def test_responses_are_cut_off_at_their_limit(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model=POLICY, input=QUESTION, max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_a_responses_tool_call_comes_back_parsed(tmp_path: Path) -> None:
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
    async with scripted(tmp_path, ToolCaller(model="big"), FakeVllm(model="tiny")) as served:
        response = await served.client.responses.create(
            model="pair", input="How many?", tools=[tool], tool_choice="required"
        )
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == NAME
    assert json.loads(call.arguments) == ARGUMENTS


# ---- completions, models ------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions(client: AsyncOpenAI, streamed: bool) -> None:
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    asked: Any = {"model": POLICY, "prompt": prompt, "temperature": 0, "max_tokens": 1024}
    if streamed:
        chunks = [c async for c in await client.completions.create(**asked, stream=True)]
        text = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        text = (await client.completions.create(**asked)).choices[0].text
    assert text.startswith("<think>")
    assert text.endswith(f"is {ANSWER}.")


async def test_models(client: AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]
    assert listed == [POLICY, "tiny-large", "tiny-small"]
    assert (await client.models.retrieve(POLICY)).owned_by == "relaygen"


# ---- leaving half-way ---------------------------------------------------------------------------


async def test_closing_a_stream_stops_the_engine(running: Running, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        **CHAT, stream=True, max_tokens=1900, extra_body=ENDLESS
    )
    async for _ in stream:
        break
    assert await busy(running.large)
    await stream.close()
    await idle_soon(running.large)


async def test_closing_a_responses_stream_stops_the_engine(
    running: Running, client: AsyncOpenAI
) -> None:
    asked: Any = {"model": POLICY, "input": QUESTION, "max_output_tokens": 1900}
    stream = await client.responses.create(**asked, stream=True, extra_body=ENDLESS)
    async for event in stream:
        if event.type.endswith(".delta"):
            break
    assert await busy(running.large)
    await stream.close()
    await idle_soon(running.large)


async def test_cancelling_the_task_stops_the_engine(running: Running, client: AsyncOpenAI) -> None:
    asked = client.chat.completions.create(**CHAT, max_tokens=1900, extra_body=ENDLESS)
    task = asyncio.create_task(asked)
    await within(WAIT_S, _is_busy(running.large))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await idle_soon(running.large)


async def test_a_time_limit_of_the_client_stops_the_engine(
    running: Running, client: AsyncOpenAI
) -> None:
    impatient = client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        await impatient.chat.completions.create(**CHAT, max_tokens=1900, extra_body=ENDLESS)
    await idle_soon(running.large)


async def _is_busy(engine: str) -> None:
    while not await busy(engine):
        await asyncio.sleep(0.01)


# ---- errors -------------------------------------------------------------------------------------


async def test_what_the_client_did_wrong(running: Running, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.chat.completions.create(**{**CHAT, "model": "gpt-9"})
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**CHAT, max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="gpt-9", input=QUESTION)


async def test_a_wrong_key_and_too_many_generations(tmp_path: Path) -> None:
    gate = Gate()
    large, small = FakeVllm(writes("<think>", gate), model="big"), FakeVllm(model="tiny")
    limits = {"generations": 1}
    async with scripted(tmp_path, large, small, limits=limits, api_keys=("any",)) as served:
        with pytest.raises(openai.AuthenticationError):
            async with openai_client(served.url, "wrong") as wrong:
                await wrong.models.list()
        first = asyncio.create_task(ask(served))
        await within(WAIT_S, gate.reached.wait())
        with pytest.raises(openai.RateLimitError):
            await ask(served)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first


async def test_engines_that_break_and_that_are_down(tmp_path: Path) -> None:
    words = Tokenizer()
    large = FakeVllm(writes("<think>", "One", Error("it broke")), model="big", tokenizer=words)
    small = FakeVllm(model="tiny", tokenizer=words)
    async with scripted(tmp_path, large, small) as served:
        with pytest.raises(openai.APIError, match="it broke"):
            async with served.client.chat.completions.stream(model="pair", messages=USER) as stream:
                await stream.until_done()
        await large.stop()
        await small.stop()
        with pytest.raises(openai.InternalServerError):
            await ask(served)
