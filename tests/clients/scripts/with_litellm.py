"""The steps of the litellm SDK, against an OpenAI-compatible server."""

from __future__ import annotations

import json
from typing import Any

import litellm
from steps import do, run

_opened: list[Any] = []


def create(**request: Any) -> dict[str, Any]:
    return _told(litellm.completion(**_given(**request)))


def create_async(**request: Any) -> dict[str, Any]:
    return _told(run(litellm.acompletion(**_given(**request))))


def stream(**request: Any) -> dict[str, Any]:
    return _joined(list(litellm.completion(**_streamed(**request))))


def stream_async(**request: Any) -> dict[str, Any]:
    async def all_of() -> list[Any]:
        return [chunk async for chunk in await litellm.acompletion(**_streamed(**request))]

    return _joined(run(all_of()))


def helper(**request: Any) -> dict[str, Any]:
    chunks = list(litellm.completion(**_streamed(**request)))
    return _told(litellm.stream_chunk_builder(chunks))


def open(chunks: int, **request: Any) -> int:  # noqa: A001, the step's name
    _opened.append(litellm.completion(**_given(**request), stream=True))
    for _ in range(chunks):
        next(_opened[-1])
    return chunks


def close() -> str:
    _opened.pop().completion_stream.close()
    return "closed"


def headers(**request: Any) -> dict[str, str]:
    reply = litellm.completion(**_given(**request))
    found = reply._hidden_params["additional_headers"]
    return {name.removeprefix("llm_provider-"): value for name, value in found.items()}


def tools(**request: Any) -> dict[str, Any]:
    return _called(litellm.completion(**_given(**request)))


def streamed_tools(**request: Any) -> dict[str, Any]:
    chunks = list(litellm.completion(**_streamed(**request)))
    return _called(litellm.stream_chunk_builder(chunks))


def _given(url: str, key: str, model: str, **request: Any) -> dict[str, Any]:
    ours = {name: request.pop(name) for name in ("relaygen", "ignore_eos") if name in request}
    where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key}
    return {**where, **request, "extra_body": ours, "max_retries": 0}


def _streamed(**request: Any) -> dict[str, Any]:
    return {**_given(**request), "stream": True, "stream_options": {"include_usage": True}}


def _told(reply: Any) -> dict[str, Any]:
    choice = reply.choices[0]
    return {
        "text": choice.message.content,
        "reasoning": choice.message.reasoning_content,
        "finish": choice.finish_reason,
        "model": reply.model,
        **_counted(reply),
    }


def _joined(chunks: list[Any]) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "reasoning": "".join(
            getattr(choice.delta, "reasoning_content", None) or "" for choice in choices
        ),
        "finish": choices[-1].finish_reason,
        "chunks": len(chunks),
        **next(_counted(chunk) for chunk in chunks if getattr(chunk, "usage", None)),
    }


def _counted(reply: Any) -> dict[str, int]:
    usage = reply.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _called(reply: Any) -> dict[str, Any]:
    choice = reply.choices[0]
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in choice.message.tool_calls or ()
    ]
    return {"calls": calls, "finish": choice.finish_reason}


if __name__ == "__main__":
    do(
        create, create_async, stream, stream_async, helper, open, close, headers, tools,
        streamed_tools,
    )  # fmt: skip
