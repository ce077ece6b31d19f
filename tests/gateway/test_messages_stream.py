"""Anthropic's Messages API, the replies: the events and messages that chat completions become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.messages import MessagesStream, error_body, whole
from gateway.errors import GatewayError, UpstreamError
from tests.gateway.chat_chunks import call, delta, events_of, usage


def streamed(*chunks: dict[str, Any]) -> list[dict[str, Any]]:
    stream = MessagesStream("pair")
    return events_of(b"".join(map(stream.chunk, chunks)) + stream.end())


def blocks_of(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Type and joined text of each block; the order of the events is checked on the way."""
    assert events[0]["type"] == "message_start"
    blocks: list[tuple[str, str]] = []
    open_at: int | None = None
    for event in (e for e in events if e["type"].startswith("content_block")):
        if event["type"] == "content_block_start":
            assert open_at is None and event["index"] == len(blocks)
            open_at = event["index"]
            blocks.append((event["content_block"]["type"], ""))
            continue
        assert event["index"] == open_at
        if event["type"] == "content_block_stop":
            open_at = None
        else:
            kind, so_far = blocks[-1]
            found = (event["delta"].get(k, "") for k in ("thinking", "text", "partial_json"))
            blocks[-1] = (kind, so_far + "".join(found))
    assert open_at is None
    return blocks


def test_the_events_of_thinking_text_and_a_call() -> None:
    told = streamed(
        delta(role="assistant", content=""),
        delta(reasoning_content="Add.", reasoning="Add."),
        delta(content="I add."),
        delta(tool_calls=[call("", "add", index=0, id="t1")]),
        delta(tool_calls=[call('{"a":1}', index=0)]),
        delta("tool_calls"),
        usage(relaygen={"policy": "pair"}, prompt_tokens_details={"cached_tokens": 4}),
    )
    tool = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
    args = {"type": "input_json_delta", "partial_json": '{"a":1}'}
    assert told == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_abc",
                "type": "message",
                "role": "assistant",
                "model": "pair",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 0, "output_tokens": 0},
            },
        },
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        added(0, {"type": "thinking_delta", "thinking": "Add."}),
        added(0, {"type": "signature_delta", "signature": ""}),
        {"type": "content_block_stop", "index": 0},
        start(1, {"type": "text", "text": ""}),
        added(1, {"type": "text_delta", "text": "I add."}),
        {"type": "content_block_stop", "index": 1},
        start(2, tool),
        added(2, args),
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {
                "input_tokens": 6,
                "output_tokens": 7,
                "cache_read_input_tokens": 4,
                "relaygen": {"policy": "pair"},
            },
        },
        {"type": "message_stop"},
    ]


def start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def added(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


@pytest.mark.parametrize(
    ("finish", "more", "reason", "sequence"),
    [
        ("stop", {}, "end_turn", None),
        ("stop", {"stop_reason": 151645}, "end_turn", None),
        ("stop", {"stop_reason": "###"}, "stop_sequence", "###"),
        ("stop", {"matched_stop": "###"}, "stop_sequence", "###"),
        ("length", {}, "max_tokens", None),
        ("content_filter", {}, "refusal", None),
    ],
)
def test_stop_reasons(finish: str, more: dict[str, Any], reason: str, sequence: Any) -> None:
    last = delta(finish, content="x")
    last["choices"][0] |= more
    ending = {"stop_reason": reason, "stop_sequence": sequence}
    assert streamed(last, usage())[-2]["delta"] == ending
    assert whole(last, "pair").items() >= ending.items()


def test_a_forced_call_that_an_engine_ends_with_stop_is_still_a_tool_use() -> None:
    told = streamed(delta("stop", tool_calls=[call("{}", "add", index=0, id="t1")]))
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("finish", [None, "abort"])
def test_an_ending_is_never_made_up(finish: str | None) -> None:
    told = streamed(delta(finish, content="It is"))
    assert told[-1]["type"] == "error"
    assert not {e["type"] for e in told} & {"message_delta", "message_stop"}
    with pytest.raises(UpstreamError):
        whole(delta(finish, content="It is"), "pair")


def test_nothing_follows_an_error() -> None:
    stream = MessagesStream("pair")
    stream.chunk(delta(content="It is"))
    error = UpstreamError("The engine broke")
    assert events_of(stream.error(error)) == [error_body(error)]
    assert stream.end() == b""
    assert events_of(stream.ping()) == [{"type": "ping"}]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error")),
        *((404, "not_found_error"), (413, "request_too_large"), (429, "rate_limit_error")),
        *((503, "overloaded_error"), (529, "overloaded_error"), (502, "api_error")),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    told = error_body(GatewayError("why", status=status))
    assert told == {"type": "error", "error": {"type": kind, "message": "why"}}


@pytest.mark.parametrize(
    "calls",
    [
        # By index from 1, mixed; by id without an index; ids at one index; each whole, no ids.
        [call('{"a"', "f", index=1, id="x"), call('{"b"', "g", index=2, id="y"),
         call(":1}", index=1), call(":2}", index=2)],
        [call('{"a"', "f", id="x"), call(":1}"), call('{"b"', "g", id="y"), call(":2}")],
        [call('{"a":1}', "f", index=0, id="x"), call('{"b":2}', "g", index=0, id="y")],
        [call('{"a":1}', "f"), call('{"b":2}', "g")],
        # Another id with each delta; a name that comes late.
        [call('{"a"', "f", index=0, id="x"), call(":1}", index=0, id="z"),
         call('{"b":', index=1, id="y"), call("2}", "g", index=1)],
    ],
)  # fmt: skip
def test_parallel_calls_are_kept_apart(calls: list[dict[str, Any]]) -> None:
    told = streamed(*(delta(tool_calls=[c]) for c in calls), delta("tool_calls"))
    assert blocks_of(told) == [("tool_use", '{"a":1}'), ("tool_use", '{"b":2}')]
    shells = [e["content_block"] for e in told if e["type"] == "content_block_start"]
    assert [shell["name"] for shell in shells] == ["f", "g"]
    assert len({shell["id"] for shell in shells} - {""}) == 2


def test_a_call_that_goes_on_after_its_end_is_an_error() -> None:
    stream = MessagesStream("pair")
    first, second = call("{}", "f", index=0, id="x"), call("{}", "g", index=1, id="y")
    stream.chunk(delta(tool_calls=[first, second]))
    with pytest.raises(UpstreamError, match="'f'"):
        stream.chunk(delta(tool_calls=[call("{}", index=0)]))


def test_a_whole_message_says_what_the_stream_says() -> None:
    calls = [call('{"a":1}', "add", id="t1")]
    message = {"content": "I add.", "reasoning_content": "Add.", "tool_calls": calls}
    completion = {**usage(), "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    assert whole(completion, "pair") == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "pair",
        "content": [
            {"type": "thinking", "thinking": "Add.", "signature": ""},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 7},
    }


def test_arguments_that_the_limit_cut_come_as_far_as_they_go() -> None:
    half = delta("length", tool_calls=[call('{"a": 1, "b": [2', "add", id="t1")])
    assert whole(half, "pair")["content"][0]["input"] == {"a": 1, "b": [2]}
    with pytest.raises(UpstreamError, match="no JSON object"):
        whole(delta("tool_calls", tool_calls=[call("[1]", "add", id="t1")]), "pair")


INTEGERS = st.integers(-(2**63), 2**63)
KINDS = {"reasoning_content": "thinking", "reasoning": "thinking", "content": "text"}


@given(st.lists(st.tuples(st.sampled_from(list(KINDS)), st.text(max_size=5)), max_size=20))
def test_any_split_of_the_text_gives_the_same_text(pieces: list[tuple[str, str]]) -> None:
    told = blocks_of(streamed(*(delta(**{k: t}) for k, t in pieces), delta("stop")))
    joined: list[tuple[str, str]] = []
    for key, piece in ((KINDS[k], t) for k, t in pieces if t):
        if joined and joined[-1][0] == key:
            joined[-1] = (key, joined[-1][1] + piece)
        else:
            joined.append((key, piece))
    assert told == joined


@given(
    st.lists(st.dictionaries(st.text(max_size=3), INTEGERS, min_size=1), max_size=4),
    st.lists(st.integers(1, 9), min_size=1),
    st.randoms(use_true_random=False),
)
def test_mixed_calls_keep_their_arguments(inputs: list[Any], sizes: list[int], order: Any) -> None:
    wanted = [orjson.dumps(value).decode() for value in inputs]
    rest = {i: [a[at : at + sizes[0]] for at in range(0, len(a), sizes[0])]
            for i, a in enumerate(wanted)}  # fmt: skip
    chunks = [delta(tool_calls=[call("", f"f{i}", index=i, id=f"t{i}")]) for i in rest]
    while any(rest.values()):
        i = order.choice([i for i, pieces in rest.items() if pieces])
        chunks.append(delta(tool_calls=[call(rest[i].pop(0), index=i)]))
    told = blocks_of(streamed(*chunks, delta("tool_calls")))
    assert told == [("tool_use", arguments) for arguments in wanted]
