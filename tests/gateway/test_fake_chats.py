"""The chats of vLLM, llama.cpp and hosted APIs as the fakes reproduce them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.fakes import (
    Error,
    FakeEngine,
    FakeHosted,
    FakeLlamaCpp,
    FakeVllm,
    ToolCall,
    story,
    templates,
    writes,
)
from tests.gateway.fakes.asking import ASK, BEGUN, Asked, after, running
from tests.gateway.fakes.engines import CHAT

STORY = ("<think>", "Six", " plus", " six", ".", "</think>", "It", " is", " 1", "2", ".")
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def chatting(engine: FakeEngine, **changes: Any) -> Any:
    engine.chats = True
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def calls(reply: Asked) -> list[dict[str, Any]]:
    deltas = [choice["delta"] for choice in reply.choices]
    return [call for delta in deltas for call in delta.get("tool_calls") or []]


# ---- vLLM ---------------------------------------------------------------------------------------


async def test_vllm_goes_on_with_a_final_message() -> None:
    engine = chatting(FakeVllm(story(*STORY)))
    fields = {**GOES_ON, "return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    async with running(engine) as ask:
        reply = await ask.stream(CHAT, messages=after("<think>Six"), **fields)
        closed = await ask.stream(CHAT, messages=after("<think>Six"))
    assert engine.prompts() == [
        BEGUN + "<think>Six",
        BEGUN + "<think>Six<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert engine.text_of(reply.chunks[0]["prompt_token_ids"]) == engine.prompts()[0]
    assert reply.text() == " plus six.</think>It is 12."
    ids = [i for choice in reply.choices for i in choice.get("token_ids") or []]
    assert engine.text_of(ids) == reply.text() + "<|im_end|>"
    assert reply.choices[1]["logprobs"]["content"] == [
        {
            "token": " plus",
            "logprob": -0.25,
            "bytes": list(b" plus"),
            "top_logprobs": [
                {"token": " plus", "logprob": -0.25, "bytes": list(b" plus")},
                {"token": "other0", "logprob": -2.0, "bytes": list(b"other0")},
            ],
        }
    ]
    assert closed.text() == "".join(STORY)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_vllms_two_flags_exclude_each_other(path: str) -> None:
    async with running(chatting(FakeVllm())) as ask:
        alone = await ask(path, messages=after("a"), continue_final_message=True)
        both = await ask(
            path, messages=after("a"), continue_final_message=True, add_generation_prompt=True
        )
    assert (alone.status, both.status) == (400, 400)
    assert alone.json["error"]["message"].startswith(
        "continue_final_message and add_generation_prompt are not compatible."
    )
    assert both.json["error"]["message"] == (
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
    )


async def test_vllms_tokenize_renders_with_tools() -> None:
    engine = FakeVllm()
    async with running(engine) as ask:
        tokens = (await ask("/tokenize", messages=after("Six"), tools=TOOLS, **GOES_ON)).json
    text = engine.text_of(tokens["tokens"])
    assert '"name": "add"' in text
    assert text.endswith(BEGUN + "Six")


@pytest.mark.parametrize(
    ("prefix", "streams", "thought", "answer"),
    [
        ("<think>Six", True, " plus six.", "It is 12."),
        ("<think>Six plus six.</think>It", True, "", " is 12."),
        ("<think>Six plus six.</think>It", False, " is 12.", ""),
        ("", True, "Six plus six.", "It is 12."),
    ],
)
async def test_vllms_parser_looks_at_the_prefix_only_when_streaming(
    prefix: str, streams: bool, thought: str, answer: str
) -> None:
    engine = chatting(FakeVllm(story(*STORY)), reasoning_parser=True)
    messages, flags = (after(prefix), GOES_ON) if prefix else (ASK, {})
    async with running(engine) as ask:
        reply = await ask(CHAT, messages=messages, stream=streams, **flags)
    if streams:
        assert (reply.text("reasoning"), reply.text()) == (thought, answer)
    else:
        message = reply.json["choices"][0]["message"]
        assert (message["reasoning"], message["content"] or "") == (thought, answer)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_template_may_put_an_empty_thought_before_an_open_one(path: str) -> None:
    engine = chatting(FakeVllm(), template="qwen3")
    messages = [*after("<think>\nA\n</think>\n\nB"), *after("<think>\nOkay")]
    async with running(engine) as ask:
        reply = await ask(path, messages=messages, return_token_ids=True, **GOES_ON)
    [prompt] = engine.prompts() or [engine.text_of(reply.json["tokens"])]
    assert prompt == BEGUN + "B<|im_end|>\n" + BEGUN + templates.NO_THOUGHT + "<think>\nOkay"


async def test_a_template_may_drop_a_closed_thought() -> None:
    engine = chatting(FakeVllm(), template="r1")
    async with running(engine) as ask:
        closed = await ask(CHAT, messages=after("<think>A</think>B"), **GOES_ON)
        await ask(CHAT, messages=after("<think>A"), **GOES_ON)
    assert closed.status == 400
    assert "final message does not appear in the chat" in closed.json["error"]["message"]
    assert engine.prompts() == [BEGUN + "<think>A"]


@pytest.mark.parametrize(
    ("call", "first", "second"),
    [
        (ToolCall("add"), {"id": "call_1", "index": 0}, {"index": 0}),
        (ToolCall("add", index=None), {"id": "call_1"}, {}),
        (ToolCall("add", index=1), {"id": "call_1", "index": 1}, {"index": 1}),
        (
            ToolCall("add", repeats_id=True),
            {"id": "call_1", "index": 0},
            {"id": "call_1", "index": 0},
        ),
    ],
)
async def test_tool_calls_are_deltas_where_they_are_parsed(
    call: ToolCall, first: dict[str, Any], second: dict[str, Any]
) -> None:
    engine = chatting(FakeVllm(writes("Hm", call)))
    async with running(engine) as ask:
        reply = await ask.stream(CHAT, messages=ASK, tools=TOOLS)
        whole = (await ask(CHAT, messages=ASK, tools=TOOLS)).json["choices"][0]
        plain = await ask.stream(CHAT, messages=ASK)
    function = {"name": "add", "arguments": ""}
    assert calls(reply)[0] == {**first, "type": "function", "function": function}
    assert calls(reply)[1] == {**second, "function": {"arguments": "{"}}
    assert reply.finish == whole["finish_reason"] == "tool_calls"
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert plain.text() == 'Hm<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


# ---- llama.cpp ----------------------------------------------------------------------------------

QWEN = ("<think>\n", "\n</think>\n\n")
PREFILLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"content": "It"}, {}, "<think>\n\n</think>\n\nIt"),
    ({"content": "It"}, GOES_ON, "<think>\n\n</think>\n\nIt"),
    ({"content": "", "reasoning_content": "Six"}, {}, "<think>\nSix"),
    ({"content": "", "reasoning_content": "Six"}, GOES_ON, "<think>\nSix"),
    (
        {"content": "It", "reasoning_content": "Six"},
        GOES_ON,
        "<think>\nSix\n</think>\n\nIt",
    ),
    (
        {"content": "It", "reasoning_content": "Six"},
        {**GOES_ON, "continue_final_message": "reasoning_content"},
        "<think>\nSix",
    ),
    (
        {"content": "", "reasoning_content": "Six"},
        {**GOES_ON, "continue_final_message": "content"},
        "<think>\nSix\n</think>\n\n",
    ),
    ({"content": "<think>\nSix"}, GOES_ON, "<think>\n\n</think>\n\n<think>\nSix"),
]


@pytest.mark.parametrize(("message", "flags", "written"), PREFILLS)
async def test_llamacpp_prefills(
    message: dict[str, Any], flags: dict[str, Any], written: str
) -> None:
    engine = chatting(FakeLlamaCpp(), template="qwen3")
    async with running(engine) as ask:
        shown = (await ask("/apply-template", messages=after(**message), **flags)).json
        await ask(CHAT, messages=after(**message), **flags)
    assert shown == {"prompt": BEGUN + written}
    assert engine.prompts() == [shown["prompt"]]


async def test_llamacpp_drops_thoughts_where_the_template_has_none() -> None:
    async with running(FakeLlamaCpp()) as ask:
        messages = after("It", reasoning_content="Six")
        reply = await ask("/apply-template", messages=messages, **GOES_ON)
    assert reply.json == {"prompt": BEGUN + "It"}


async def test_llamacpps_errors_about_final_messages() -> None:
    engine = FakeLlamaCpp()
    path = "/apply-template"
    async with running(engine) as ask:
        both = await ask(path, messages=after("a"), continue_final_message=True)
        two = await ask(path, messages=[*after("a"), *after("b")[1:]])
        engine.refuses_prefill = True
        thinking = await ask(path, messages=after("a"))
        fine = await ask(path, messages=after("a"), chat_template_kwargs={"enable_thinking": False})
        engine.prefill_assistant = False
        turn = (await ask(path, messages=after("a"))).json["prompt"]
    kind = {"code": 400, "type": "invalid_request_error", "param": None}
    told = [reply.json["error"] for reply in (both, two, thinking)]
    assert told == [
        {"message": m, **kind}
        for m in (
            "Cannot set both add_generation_prompt and continue_final_message to true.",
            "Cannot have 2 or more assistant messages at the end of the list.",
            "Assistant response prefill is incompatible with enable_thinking.",
        )
    ]
    assert fine.status == 200
    assert turn.endswith("a<|im_end|>\n<|im_start|>assistant\n")


async def test_llamacpp_tells_thoughts_apart_if_asked_and_repeats_prefills_when_whole() -> None:
    engine = chatting(FakeLlamaCpp(story(*STORY)), think_tags=("<think>", "</think>"))
    messages = after("", reasoning_content="Six")
    async with running(engine) as ask:
        reply = await ask.stream(CHAT, messages=messages, logprobs=True)
        fresh = await ask.stream(CHAT, messages=ASK, logprobs=True)
        raw = await ask.stream(CHAT, messages=messages, reasoning_format="none")
        whole = await ask(CHAT, messages=after("It", reasoning_content="Six plus six."))
    assert (reply.text("reasoning_content"), reply.text()) == (" plus six.", "It is 12.")
    assert reply.choices[0]["delta"] == {"role": "assistant", "content": None}
    assert reply.choices[1]["logprobs"]["content"][0]["id"] == engine.tokenizer.id_of(" plus")
    assert fresh.choices[0]["logprobs"]["content"][0]["token"] == "<think>"
    assert raw.text() == " plus six.</think>It is 12."
    assert whole.json["choices"][0]["message"]["content"] == "It is 12."
    assert reply.choices[-1]["delta"] == {}
    assert reply.finish == "stop"


# ---- hosted -------------------------------------------------------------------------------------


async def test_deepseek_goes_on_with_a_prefix_below_beta() -> None:
    engine = FakeHosted(story(*STORY), style="deepseek")
    engine.tokens_per_chunk = 2
    messages = after("", reasoning_content="Six", prefix=True)
    async with running(engine) as ask:
        reply = await ask.stream("/beta/chat/completions", messages=messages)
        plain = await ask.stream(CHAT, messages=messages)
        turn = await ask.stream("/beta/chat/completions", messages=after("It"))
        none = await ask("/v1/completions", prompt="x")
    assert engine.prompts() == [BEGUN + "<think>Six"]
    assert (reply.text("reasoning_content"), reply.text()) == (" plus six.", "It is 12.")
    assert reply.chunks[-1]["usage"]["prompt_cache_hit_tokens"] == 0
    assert (plain.status, turn.status, none.status) == (400, 400, 404)


async def test_mistral_wants_the_flag_and_no_logprobs() -> None:
    engine = FakeHosted(story(*STORY), style="mistral")
    async with running(engine) as ask:
        reply = await ask.stream(CHAT, messages=after("<think>Six", prefix=True))
        engine.prefill = "echoes"
        echo = await ask.stream(CHAT, messages=after("<think>Six", prefix=True))
        turn = await ask(CHAT, messages=after("<think>Six"))
        scored = await ask(CHAT, messages=ASK, logprobs=True)
    assert reply.text() == " plus six.</think>It is 12."
    assert echo.text() == "".join(STORY)
    assert reply.chunks[-1]["usage"]["completion_tokens"] == 10
    assert (turn.status, turn.json["type"]) == (400, "invalid_request_message_order")
    assert scored.status == 422


async def test_openrouter_comments_and_fails_in_data_events() -> None:
    engine = FakeHosted(writes("a", Error("Provider disconnected", 502)), style="openrouter")
    async with running(engine) as ask:
        reply = await ask.stream(CHAT, messages=ASK)
    assert reply.content.startswith(b": OPENROUTER PROCESSING\n\ndata: {")
    assert reply.chunks[-1]["error"] == {"code": 502, "message": "Provider disconnected"}
    assert reply.finish == "error"
    assert "[DONE]" not in reply.data


@pytest.mark.parametrize(
    ("prefill", "answer"),
    [("continues", "ce is"), ("echoes", "The capital of France is"), ("new_turn", "One, two")],
)
async def test_a_hosted_api_can_be_probed(prefill: Any, answer: str) -> None:
    engine = FakeHosted(story(*STORY))
    engine.prefill = prefill
    async with running(engine) as ask:
        reply = (await ask(CHAT, messages=after("The capital of Fran"))).json
    assert reply["choices"][0]["message"]["content"].startswith(answer)
    assert engine.decodes == []


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "both", "inline"])
async def test_hosted_thoughts_have_a_field_of_any_name(field: Any) -> None:
    engine = FakeHosted(story(*STORY))
    engine.reasoning = field
    usage = {"include_usage": True}
    async with running(engine) as ask:
        reply = await ask.stream(CHAT, messages=after("<think>Six"), stream_options=usage)
        engine.reports_usage = False
        silent = await ask.stream(CHAT, messages=ASK, stream_options=usage)
        text = await ask.stream("/v1/completions", prompt=BEGUN)
    names = {"both": {"reasoning", "reasoning_content"}, "inline": set()}.get(field, {field})
    for name in ("reasoning", "reasoning_content"):
        assert reply.text(name) == (" plus six." if name in names else "")
    assert reply.text() == ("It is 12." if names else " plus six.</think>It is 12.")
    assert reply.chunks[-1]["usage"]["completion_tokens"] == 10
    assert silent.chunks[-1]["choices"]
    assert "".join(choice["text"] for choice in text.choices) == "".join(STORY)
