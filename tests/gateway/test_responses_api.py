"""OpenAI's Responses API, the requests: what their bodies become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.responses import to_chat
from gateway.errors import RequestError
from gateway.openai_api import parse_chat
from tests.gateway.chat_chunks import JSON

BODY: dict[str, Any] = {"model": "pair", "input": "How many?"}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}
ADD = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
ADDED = {"type": "function_call_output", "call_id": "c1", "output": "3"}
FIELDS = "input instructions tools tool_choice reasoning text include metadata truncation"


def messages_of(*items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = to_chat({**BODY, "input": list(items), **more})["messages"]
    return messages


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(text: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": parts}


def thinks(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def test_a_plain_request_becomes_a_chat_request() -> None:
    hints = {"store": True, "truncation": "disabled", "metadata": {"a": "b"}, "background": False}
    assert to_chat({**BODY, **hints, "temperature": 0.5, "user": "u1"}) == {
        "model": "pair",
        "messages": [{"role": "user", "content": "How many?"}],
        "stream": False,
        "temperature": 0.5,
        "user": "u1",
    }


def test_options_take_their_names_in_chat_completions() -> None:
    chat = to_chat(
        {
            **BODY,
            "stream": True,
            "stream_options": {"include_obfuscation": False},
            "max_output_tokens": 9,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low", "format": {"type": "json_object"}},
            "relaygen": {"trace": True},
        }
    )
    assert chat["stream_options"] == {"include_usage": True}
    assert (chat["max_completion_tokens"], chat["reasoning_effort"]) == (9, "low")
    assert (chat["verbosity"], chat["response_format"]) == ("low", {"type": "json_object"})
    assert chat["relaygen"] == {"trace": True}


def test_a_json_schema_is_nested() -> None:
    schema = {"name": "sum", "schema": {"type": "object"}, "strict": True}
    chat = to_chat({**BODY, "text": {"format": {"type": "json_schema", **schema}}})
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert "response_format" not in to_chat({**BODY, "text": {"format": {"type": "text"}}})


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, {}),
    ],
)
def test_logprobs(asked: dict[str, Any], given: dict[str, Any]) -> None:
    chat = to_chat({**BODY, **asked})
    assert {k: v for k, v in chat.items() if "logprobs" in k} == given


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        *((word, word) for word in ("auto", "none", "required")),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tools_and_the_choice_among_them(choice: Any, chosen: Any) -> None:
    tool = {**FUNCTION, "description": "Adds", "strict": True}
    chat = to_chat({**BODY, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False})
    function = {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (chosen, False)


def test_instructions_and_leading_developer_messages_are_the_one_system_message() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]}
    found = messages_of(developer, user("?"), developer, instructions="Be brief.")
    assert [m["role"] for m in found] == ["system", "user", "system"]
    assert found[0]["content"] == "Be brief.\n\nBe kind."


def test_parts_of_a_message() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "low"}
    texts = [{"type": "input_text", "text": t} for t in ("What", "is this?")]
    assert messages_of(user(texts)) == [{"role": "user", "content": "What\nis this?"}]
    assert messages_of(user([*texts, image]))[0]["content"] == [
        {"type": "text", "text": "What"},
        {"type": "text", "text": "is this?"},
        {"type": "image_url", "image_url": {"url": image["image_url"], "detail": "low"}},
    ]


def test_thinking_text_and_calls_of_a_turn_are_one_assistant_message() -> None:
    found = messages_of(user("2+3?"), thinks("Add."), says("I add."), ADD, ADDED, says("5"))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Add.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "5"},
    ]


def test_turns_end_where_another_begins() -> None:
    second = {**ADD, "call_id": "c2"}
    found = messages_of(ADD, second, thinks("Hm."), says("A"), says("B"), thinks("C"), user("?"))
    assert [(m["content"], m.get("reasoning_content")) for m in found] == [
        (None, None),
        ("A", "Hm."),
        ("B", None),
        ("", "C"),
        ("?", None),
    ]
    assert len(found[0]["tool_calls"]) == 2


def test_a_reasoning_item_is_read_as_far_as_it_can_be() -> None:
    summary = [{"type": "summary_text", "text": "Short."}]
    told = {"type": "reasoning", "summary": summary, "content": None, "encrypted_content": "x"}
    assert messages_of(told, says("5"))[0]["reasoning_content"] == "Short."
    emptied = {"type": "reasoning", "summary": [], "encrypted_content": None}
    assert messages_of(emptied, says("5")) == [{"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [user([{"type": "input_file"}])]}, "input[0].content[0].type"),
        ({"input": [user([{"type": "input_image", "file_id": "f"}])]},
         "input[0].content[0].image_url"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{**ADD, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]},
         "input[0].encrypted_content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_cant_be_served_is_refused_by_its_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_chat({**BODY, **change})
    assert caught.value.param == field
    assert f"`{field}`" in caught.value.message


@given(st.sampled_from(FIELDS.split()), JSON)
def test_any_value_is_taken_or_refused(field: str, value: Any) -> None:
    try:
        to_chat({**BODY, field: value})
    except RequestError as error:
        assert error.param and f"`{error.param}`" in error.message


def test_what_it_becomes_is_a_request_that_the_chat_endpoint_relays() -> None:
    ask = parse_chat(to_chat({**BODY, "stream": True, "seed": 3}))
    assert (ask.whole, ask.include_usage, ask.limits.seed) == (None, True, 3)
