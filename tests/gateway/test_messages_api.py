"""Anthropic's Messages API, the requests: what their bodies become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.messages import count_tokens_to_chat, to_chat
from gateway.errors import RequestError
from gateway.openai_api import parse_chat
from tests.gateway.chat_chunks import JSON

BODY: dict[str, Any] = {
    "model": "pair",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "How many?"}],
}
CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
FIELDS = (
    "messages system tools tool_choice thinking output_config output_format "
    "context_management metadata stop_sequences"
)


def chat_of(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return to_chat({**BODY, "messages": list(messages) or BODY["messages"], **more})


def messages_of(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    messages_: list[dict[str, Any]] = chat_of(*messages, **more)["messages"]
    return messages_


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": blocks[0] if isinstance(blocks[0], str) else list(blocks)}


def says(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {**user(*blocks), "role": "assistant"}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_plain_request_becomes_a_chat_request() -> None:
    assert to_chat({**BODY, "cache_control": {"type": "ephemeral"}, "top_k": 5}) == {
        "model": "pair",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "How many?"}],
        "stream": False,
        "top_k": 5,
    }


def test_options_take_their_names_in_chat_completions() -> None:
    chat = chat_of(
        stream=True,
        stop_sequences=["###"],
        metadata={"user_id": "u1"},
        relaygen={"trace": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    )
    assert chat["stream_options"] == {"include_usage": True}
    assert (chat["stop"], chat["user"], chat["reasoning_effort"]) == (["###"], "u1", "low")
    assert chat["relaygen"] == {"trace": True}
    schema = {"name": "output", "schema": {}, "strict": True}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert not chat.keys() & {"stop_sequences", "metadata", "output_config"}


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_switched_in_the_template(thinking: Any, kwargs: Any) -> None:
    assert chat_of(thinking=thinking)["chat_template_kwargs"] == kwargs
    assert "chat_template_kwargs" not in chat_of()
    both = chat_of(thinking=thinking, chat_template_kwargs={"enable_thinking": 1, "x": 2})
    assert both["chat_template_kwargs"] == {"enable_thinking": 1, "x": 2}


def test_the_system_prompt_comes_first_without_the_line_for_anthropics_accounts() -> None:
    blocks = [text("x-anthropic-billing-header: cch=1;"), text("Be brief."), text("Be kind.")]
    first = messages_of(system=blocks)[0]
    assert first == {"role": "system", "content": "Be brief.\nBe kind."}
    assert messages_of(system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert messages_of(system="")[0]["role"] == "user"


def test_images_become_image_urls_and_texts_stay_beside_them() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    linked = {"type": "url", "url": "https://a.example/b.png"}
    images = [{"type": "image", "source": s} for s in (source, linked)]
    (message,) = messages_of(user(text("What is this?"), *images))
    assert message["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
    ]


def test_thinking_text_and_calls_of_a_turn_are_one_assistant_message() -> None:
    thinking = {"type": "thinking", "thinking": "Add.", "signature": ""}
    assert messages_of(user("2+3?"), says(thinking, text("I add."), CALL), user("Go on"))[1] == {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "Add.",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        ],
    }


def test_tool_results_become_tool_messages_in_their_order() -> None:
    first = {"type": "tool_result", "tool_use_id": "t1", "content": [text("3"), text("4")]}
    second = {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True}
    third = {"type": "tool_result", "tool_use_id": "t3"}
    found = messages_of(says(CALL), user(first, second, third, text("And?")))
    assert found[0]["content"] is None
    assert found[1:] == [
        {"role": "tool", "tool_call_id": "t1", "content": "3\n4"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And?"},
    ]


def test_successive_messages_of_one_role_are_one_turn() -> None:
    found = messages_of(user("One"), user("two"), says("A"), says("B"), user("?"))
    assert [m["content"] for m in found] == ["One\ntwo", "AB", "?"]


def test_a_last_assistant_message_is_continued() -> None:
    chat = chat_of(user("2+3?"), says("It is "))
    assert chat["messages"][-1] == {"role": "assistant", "content": "It is "}
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)
    assert "continue_final_message" not in chat_of()


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tools_and_the_choice_among_them(choice: dict[str, Any], chosen: Any) -> None:
    tool = {**TOOL, "description": "Adds", "type": "custom", "cache_control": {}}
    chat = chat_of(tools=[tool], tool_choice={**choice, "disable_parallel_tool_use": True})
    function = {"name": "add", "description": "Adds", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (chosen, False)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [says({"type": "redacted_thinking"})]}, "messages[0].content[0].type"),
        ({"messages": [says(CALL)]}, "messages"),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]},
         "messages[0].content[0].source.type"),
        ({"system": 3}, "system"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management.edits"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_cant_be_served_is_refused_by_its_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_chat({**BODY, **change})
    assert caught.value.param == field
    assert f"`{field}`" in caught.value.message


def test_counting_tokens_needs_no_limit() -> None:
    body = {k: v for k, v in BODY.items() if k != "max_tokens"}
    assert count_tokens_to_chat(body)["messages"] == BODY["messages"]
    assert (
        count_tokens_to_chat({**BODY, "tools": [TOOL]})["tools"] == chat_of(tools=[TOOL])["tools"]
    )


@given(st.sampled_from(FIELDS.split()), JSON)
def test_any_value_is_taken_or_refused(field: str, value: Any) -> None:
    try:
        to_chat({**BODY, field: value})
    except RequestError as error:
        assert error.param and f"`{error.param}`" in error.message


def test_what_it_becomes_is_a_request_that_the_chat_endpoint_relays() -> None:
    ask = parse_chat(to_chat({**BODY, "stream": True, "seed": 3}))
    assert (ask.whole, ask.include_usage, ask.limits.seed) == (None, True, 3)
