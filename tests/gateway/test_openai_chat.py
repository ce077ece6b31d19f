"""What an OpenAI client sees of a relayed chat, by every way its SDK has."""

from __future__ import annotations

import pytest

from tests.gateway.fakes import FakeVllm, Tokenizer, story
from tests.gateway.support import ANSWER, POLICY, REASONING, STORY, USER, Served, Stage, ask, stream

USAGE = {"include_usage": True}


def engines() -> tuple[FakeVllm, FakeVllm]:
    vocabulary = Tokenizer()
    return tuple(
        FakeVllm(story(*STORY), model=name, tokenizer=vocabulary) for name in ("big", "tiny")
    )


@pytest.fixture
async def served(stage: Stage) -> Served:
    return await stage.pair(*engines())


async def test_streams_the_reasoning_and_then_the_answer(served: Served) -> None:
    reply = await stream(served)
    assert reply.text("reasoning_content") == REASONING
    assert reply.text("content") == ANSWER
    fields = [key for delta in reply.deltas for key in delta if delta[key] and key != "role"]
    assert fields == sorted(fields, key=["reasoning_content", "content"].index)


async def test_a_stream_has_one_role_and_one_finish_reason(served: Served) -> None:
    reply = await stream(served)
    assert [delta["role"] for delta in reply.deltas if "role" in delta] == ["assistant"]
    assert "role" in reply.deltas[0]
    assert reply.finishes == ["stop"]
    assert {chunk["object"] for chunk in reply.chunks} == {"chat.completion.chunk"}
    assert {chunk["model"] for chunk in reply.chunks} == {POLICY}
    assert len({chunk["id"] for chunk in reply.chunks}) == 1


async def test_a_stream_has_no_usage_unless_asked(served: Served) -> None:
    reply = await stream(served)
    assert reply.usages == []
    assert all(chunk["choices"] for chunk in reply.chunks)


async def test_a_stream_ends_with_one_usage_of_the_whole_when_asked(served: Served) -> None:
    reply = await stream(served, stream_options=USAGE)
    assert len(reply.usages) == 1
    assert reply.chunks[-1]["choices"] == []
    usage = reply.chunks[-1]["usage"]
    ours = usage["relaygen"]
    assert usage["completion_tokens"] == ours["large_tokens"] + ours["small_tokens"]
    assert usage["completion_tokens"] == len(STORY) + 1  # and the end of turn
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_usage_tells_who_wrote_how_much(served: Served) -> None:
    ours = (await ask(served))["usage"]["relaygen"]
    # large: <think> .. Now | small: it is twelve. | large: Thus | small: twelve.
    # | large: </think> | small: the answer
    assert ours == {
        "policy": POLICY,
        "large_tokens": 8,
        "small_tokens": len(STORY) + 1 - 8,
        "discarded_tokens": ours["discarded_tokens"],
        "segments": 6,
        "handoffs": 5,
        "resumes": 0,
        "large_utilization": round(8 / (len(STORY) + 1), 4),
        "handoff_ms_p50": ours["handoff_ms_p50"],
    }
    assert ours["handoff_ms_p50"] > 0


async def test_answers_in_one_piece(served: Served) -> None:
    reply = await ask(served)
    [choice] = reply["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "reasoning_content": REASONING,
    }
    assert choice["finish_reason"] == "stop"
    assert reply["object"] == "chat.completion"
    assert reply["usage"]["completion_tokens"] == len(STORY) + 1


async def test_the_sdks_stream_helper_puts_the_message_together(served: Served) -> None:
    async with served.client.chat.completions.stream(model=POLICY, messages=USER) as events:
        async for _ in events:
            pass
        final = await events.get_final_completion()
    message = final.choices[0].message
    assert message.content == ANSWER
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == REASONING


async def test_responses_name_their_request_and_mode(served: Served) -> None:
    create = served.client.chat.completions.with_raw_response.create
    reply = await create(model=POLICY, messages=USER, extra_headers={"x-request-id": "order-66"})
    assert reply.headers["x-relaygen-mode"] == "relay"
    assert reply.headers["x-request-id"] == "order-66"
    assert reply.parse().choices[0].message.content == ANSWER


async def test_a_stream_is_not_buffered_on_its_way(served: Served) -> None:
    create = served.client.chat.completions.with_raw_response.create
    reply = await create(model=POLICY, messages=USER, stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-relaygen-mode"] == "relay"
    assert reply.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("given", ["", "a" * 129, "tab\tbed"])
async def test_a_request_id_that_could_do_harm_is_replaced(served: Served, given: str) -> None:
    reply = await served.client.models.with_raw_response.list(extra_headers={"x-request-id": given})
    assert reply.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("reasoning", {"reasoning": REASONING, "content": ANSWER}),
        (
            "both",
            {"reasoning": REASONING, "reasoning_content": REASONING, "content": ANSWER},
        ),
        ("inline", {"content": f"<think>{REASONING}</think>{ANSWER}"}),
    ],
)
async def test_the_policy_names_the_field_of_the_reasoning(
    stage: Stage, field: str, message: dict[str, str]
) -> None:
    served = await stage.pair(*engines(), thinking={"field": field})
    reply = await ask(served)
    assert reply["choices"][0]["message"] == {"role": "assistant", **message}
    chunks = await stream(served)
    assert {key: chunks.text(key) for key in message} == message


async def test_a_trace_tells_who_wrote_each_chunk(served: Served) -> None:
    reply = await stream(served, extra_body={"relaygen": {"trace": True}})
    segments: dict[tuple[int, str], str] = {}
    for chunk in reply.chunks:
        delta = chunk["choices"][0]["delta"]
        key = (chunk["relaygen"]["segment"], chunk["relaygen"]["role"])
        text = delta.get("reasoning_content") or delta.get("content") or ""
        segments[key] = segments.get(key, "") + text
    assert segments == {
        (0, "large"): "Six plus six. Now",
        (1, "small"): " it is twelve.",
        (2, "large"): " Thus",
        (3, "small"): " twelve.",
        (5, "small"): ANSWER,
    }


async def test_no_trace_unless_asked(served: Served) -> None:
    assert all("relaygen" not in chunk for chunk in (await stream(served)).chunks)


@pytest.mark.parametrize("mode", ["large", "small"])
async def test_one_model_alone_writes_all_when_the_client_says_so(stage: Stage, mode: str) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    reply = await ask(served, extra_body={"relaygen": {"mode": mode}})
    assert reply["choices"][0]["message"]["content"] == ANSWER
    ours = reply["usage"]["relaygen"]
    assert (ours["handoffs"], ours["discarded_tokens"]) == (0, 0)
    assert ours[f"{mode}_tokens"] == len(STORY) + 1
    assert len(large.decodes) == (mode == "large")
    assert len(small.decodes) == (mode == "small")


async def test_a_model_alone_needs_only_its_own_engine(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await small.stop()
    reply = await ask(served, extra_body={"relaygen": {"mode": "large"}})
    assert reply["choices"][0]["message"]["content"] == ANSWER


async def test_logprobs_come_for_every_kept_token(served: Served) -> None:
    reply = await ask(served, logprobs=True, top_logprobs=2)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == "".join(STORY)
    assert all(e["logprob"] == -0.25 and len(e["top_logprobs"]) == 2 for e in entries)
    assert [e["bytes"] for e in entries] == [list(e["token"].encode()) for e in entries]


async def test_a_raw_prompt_comes_back_as_text(served: Served) -> None:
    prompt = "<|im_start|>assistant\n"
    reply = await served.client.completions.create(model=POLICY, prompt=prompt, max_tokens=100)
    assert reply.choices[0].text == "".join(STORY)
    assert reply.object == "text_completion"


async def test_a_raw_prompt_streams_as_text(served: Served) -> None:
    chunks = await served.client.completions.create(
        model=POLICY,
        prompt="<|im_start|>assistant\n",
        max_tokens=100,
        stream=True,
        stream_options=USAGE,
    )
    got = [chunk async for chunk in chunks]
    assert "".join(c.choices[0].text for c in got if c.choices) == "".join(STORY)
    assert got[-1].usage is not None
    assert got[-1].usage.completion_tokens == len(STORY) + 1
