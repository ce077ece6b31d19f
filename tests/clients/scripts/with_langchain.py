"""The steps of LangChain's ChatOpenAI."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from langchain_openai import ChatOpenAI
from steps import do, run

_opened: list[Any] = []


def create(**request: Any) -> dict[str, Any]:
    model, messages = _model(**request)
    return _told(model.invoke(messages))


def create_async(**request: Any) -> dict[str, Any]:
    model, messages = _model(**request)
    return _told(run(model.ainvoke(messages)))


def stream(**request: Any) -> dict[str, Any]:
    model, messages = _model(**request)
    return _joined(list(model.stream(messages)))


def stream_async(**request: Any) -> dict[str, Any]:
    model, messages = _model(**request)

    async def all_of() -> list[Any]:
        return [chunk async for chunk in model.astream(messages)]

    return _joined(run(all_of()))


def helper(**request: Any) -> dict[str, Any]:
    model, messages = _model(**request)
    return _told(reduce(add, model.stream(messages)))


def open(chunks: int, **request: Any) -> int:  # noqa: A001, the step's name
    model, messages = _model(**request)
    _opened.append(model.stream(messages))
    for _ in range(chunks):
        next(_opened[-1])
    return chunks


def close() -> str:
    _opened.pop().close()
    return "closed"


def headers(**request: Any) -> dict[str, str]:
    model, messages = _model(include_response_headers=True, **request)
    found: dict[str, str] = model.invoke(messages).response_metadata["headers"]
    return found


def tools(tools: list[Any], tool_choice: str, **request: Any) -> dict[str, Any]:
    model, messages = _model(**request)
    return _called(model.bind_tools(tools, tool_choice=tool_choice).invoke(messages))


def streamed_tools(tools: list[Any], tool_choice: str, **request: Any) -> dict[str, Any]:
    model, messages = _model(**request)
    bound = model.bind_tools(tools, tool_choice=tool_choice)
    return _called(reduce(add, bound.stream(messages)))


def structured(schema: dict[str, Any], **request: Any) -> Any:
    model, messages = _model(**request)
    return model.with_structured_output(schema, method="json_schema").invoke(messages)


def response(**request: Any) -> dict[str, Any]:
    """Through the Responses API."""
    model, messages = _model(use_responses_api=True, output_version="responses/v1", **request)
    message = reduce(add, model.stream(messages))
    kinds = [block["type"] for block in message.content]
    return {"text": message.text, "kinds": kinds, "status": message.response_metadata["status"]}


def _model(
    url: str, key: str, model: str, messages: list[Any], **options: Any
) -> tuple[ChatOpenAI, list[Any]]:
    ours = {name: options.pop(name) for name in ("relaygen", "ignore_eos") if name in options}
    found = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        model=model,
        extra_body=ours,
        max_retries=0,
        stream_usage=True,
        **options,
    )
    return found, messages


def _told(message: Any) -> dict[str, Any]:
    usage = message.usage_metadata
    return {
        "text": message.content,
        "reasoning": message.additional_kwargs.get("reasoning_content"),
        "finish": message.response_metadata["finish_reason"],
        "model": message.response_metadata["model_name"],
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
    }


def _joined(chunks: list[Any]) -> dict[str, Any]:
    return {**_told(reduce(add, chunks)), "chunks": len(chunks)}


def _called(message: Any) -> dict[str, Any]:
    calls = [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls]
    return {"calls": calls, "finish": message.response_metadata["finish_reason"]}


if __name__ == "__main__":
    do(
        create, create_async, stream, stream_async, helper, open, close, headers, tools,
        streamed_tools, structured, response,
    )  # fmt: skip
