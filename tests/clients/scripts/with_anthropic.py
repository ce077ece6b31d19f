"""The steps of the anthropic SDK, on /v1/messages."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, AsyncAnthropic
from steps import do, run

_opened: list[Any] = []
_UNKNOWN = ("temperature", "relaygen", "ignore_eos")
"""Fields that the SDK has no argument for."""
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}


def create(url: str, key: str, **request: Any) -> dict[str, Any]:
    return _told(_client(url, key).messages.create(**_given(**request)))


def create_async(url: str, key: str, **request: Any) -> dict[str, Any]:
    return _told(run(_async_client(url, key).messages.create(**_given(**request))))


def stream(url: str, key: str, **request: Any) -> dict[str, Any]:
    """The raw events, joined by hand."""
    return _joined(list(_client(url, key).messages.create(**_given(**request), stream=True)))


def stream_async(url: str, key: str, **request: Any) -> dict[str, Any]:
    async def all_of() -> list[Any]:
        created = _async_client(url, key).messages.create(**_given(**request), stream=True)
        return [event async for event in await created]

    return _joined(run(all_of()))


def helper(url: str, key: str, **request: Any) -> dict[str, Any]:
    with _client(url, key).messages.stream(**_given(**request)) as events:
        heard = "".join(events.text_stream)
        return {**_told(events.get_final_message()), "heard": heard}


def events(url: str, key: str, **request: Any) -> list[str]:
    """The types of a raw stream's events, repetitions left out; of a block with its kind."""
    kinds: list[str] = []
    for event in _client(url, key).messages.create(**_given(**request), stream=True):
        kind = event.type
        if kind == "content_block_start":
            kind += f" {event.content_block.type}"
        if kind == "content_block_delta":
            kind += f" {event.delta.type}"
        if kinds[-1:] != [kind]:
            kinds.append(kind)
    return kinds


def started(url: str, key: str, **request: Any) -> dict[str, Any]:
    """The message of a stream's first event."""
    with _client(url, key).messages.create(**_given(**request), stream=True) as stream:
        message: dict[str, Any] = next(iter(stream)).message.to_dict(mode="json")
    return message


def open(url: str, key: str, chunks: int, **request: Any) -> int:  # noqa: A001, the step's name
    _opened.append(_client(url, key).messages.create(**_given(**request), stream=True))
    events = iter(_opened[-1])
    for _ in range(chunks):
        next(events)
    return chunks


def close() -> str:
    _opened.pop().close()
    return "closed"


def headers(url: str, key: str, **request: Any) -> dict[str, str]:
    raw = _client(url, key).messages.with_raw_response.create(**_given(**request))
    return dict(raw.headers)


def tools(url: str, key: str, **request: Any) -> dict[str, Any]:
    return _called(_client(url, key).messages.create(**_given(**request)))


def streamed_tools(url: str, key: str, **request: Any) -> dict[str, Any]:
    with _client(url, key).messages.stream(**_given(**request)) as events:
        return _called(events.get_final_message())


def bearer(url: str, token: str, **request: Any) -> dict[str, Any]:
    """With the token in `Authorization` instead of `x-api-key`."""
    client = Anthropic(base_url=url, auth_token=token, api_key=None, max_retries=0)
    return _told(client.messages.create(**_given(**request)))


def count(url: str, key: str, **request: Any) -> int:
    given = {name: request[name] for name in ("model", "messages", "system") if name in request}
    return _client(url, key).messages.count_tokens(**given).input_tokens


def blocks(url: str, key: str, **request: Any) -> list[dict[str, Any]]:
    reply = _client(url, key).messages.create(**_given(**request))
    return [block.to_dict(mode="json") for block in reply.content]


def _client(url: str, key: str) -> Anthropic:
    return Anthropic(base_url=url, api_key=key, max_retries=0)


def _async_client(url: str, key: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def _given(**request: Any) -> dict[str, Any]:
    """A request of OpenAI's form in Anthropic's, which demands max_tokens."""
    given = {"max_tokens": 1024, **request}
    given["extra_body"] = {name: given.pop(name) for name in _UNKNOWN if name in given}
    if "tools" in given:
        given["tools"] = [_tool(**tool["function"]) for tool in given["tools"]]
        given["tool_choice"] = {"type": {"required": "any"}[given["tool_choice"]]}
    return given


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": description, "input_schema": parameters}


def _told(reply: Any) -> dict[str, Any]:
    return {
        "text": "".join(block.text for block in reply.content if block.type == "text"),
        "reasoning": "".join(b.thinking for b in reply.content if b.type == "thinking"),
        "finish": _FINISH[reply.stop_reason],
        "stop_reason": reply.stop_reason,
        "stop_sequence": reply.stop_sequence,
        "model": reply.model,
        "prompt_tokens": reply.usage.input_tokens,
        "completion_tokens": reply.usage.output_tokens,
    }


def _joined(events: list[Any]) -> dict[str, Any]:
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    start = next(event.message for event in events if event.type == "message_start")
    end = next(event for event in events if event.type == "message_delta")
    return {
        "text": "".join(delta.text for delta in deltas if delta.type == "text_delta"),
        "reasoning": "".join(d.thinking for d in deltas if d.type == "thinking_delta"),
        "finish": _FINISH[end.delta.stop_reason],
        "model": start.model,
        "prompt_tokens": end.usage.input_tokens or start.usage.input_tokens,
        "completion_tokens": end.usage.output_tokens,
        "chunks": len(deltas),
    }


def _called(reply: Any) -> dict[str, Any]:
    blocks = [block for block in reply.content if block.type == "tool_use"]
    calls = [{"name": block.name, "arguments": block.input} for block in blocks]
    return {"calls": calls, "finish": _FINISH[reply.stop_reason]}


if __name__ == "__main__":
    do(
        create, create_async, stream, stream_async, helper, events, started, open, close, headers,
        tools, streamed_tools, bearer, count, blocks,
    )  # fmt: skip
