"""The schemas of the OpenAPI document: requests as the gateway reads them, replies as it writes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gateway.extra import Extra
from gateway.openai_api import MAX_CHOICES, MAX_SEED, MAX_STOPS, MAX_TOKEN_ID, MAX_TOP_LOGPROBS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": ["boolean", "null"]}
_OBJECT: Schema = {"type": ["object", "null"]}
_OBJECTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}}
_ANY: Schema = {}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _integer(least: int | None = None, most: int | None = None) -> Schema:
    bounds = {"minimum": least, "maximum": most}
    given = {key: value for key, value in bounds.items() if value is not None}
    return {"type": ["integer", "null"], **given}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    """Of these fields, and any others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": True,
    }


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


_NAME: Schema = {"type": "string", "minLength": 1, "description": "A policy, or a model."}
_STREAMED: dict[str, Schema] = {
    "stream": _BOOLEAN,
    "relaygen": _nullable(
        {
            "type": "object",
            "properties": {
                "mode": {"enum": ["relay", "large", "small", None, ""]},
                "trace": _BOOLEAN,
                "resume": {
                    **_BOOLEAN,
                    "description": "Whether another engine may go on where one breaks (true).",
                },
            },
            "additionalProperties": False,
        }
    ),
}
_GENERATED: dict[str, Schema] = {
    **_STREAMED,
    "stream_options": _OBJECT,
    "n": _integer(1, MAX_CHOICES),
    "seed": _integer(-MAX_SEED, MAX_SEED),
    "stop": _nullable({"anyOf": [_TEXT, _list(_TEXT, maxItems=MAX_STOPS)]}),
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "include_stop_str_in_output": _BOOLEAN,
    "best_of": _integer(1),
}
_IDS = _list({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, minItems=1)
_PROMPT: Schema = {"anyOf": [_TEXT, _IDS, _list({"anyOf": [_TEXT, _IDS]}, minItems=1)]}
_TURN = _object({"role": _TEXT})
_CONTENT: Schema = {"anyOf": [_TEXT, _list({"type": "object"})]}
_MESSAGE = _object(
    {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
)
_MESSAGES: dict[str, Schema] = {
    "model": _NAME,
    "messages": _list(_MESSAGE, minItems=1),
}
_MESSAGES_MORE: dict[str, Schema] = {
    **_STREAMED,
    "system": _nullable(_CONTENT),
    "stop_sequences": {"type": ["array", "null"], "items": _TEXT},
    "tools": _OBJECTS,
    "tool_choice": _OBJECT,
    "thinking": _OBJECT,
    "metadata": _OBJECT,
    "output_config": _OBJECT,
    "context_management": _OBJECT,
}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    relaygen=_object(
        {
            "policy": _TEXT,
            "large_tokens": _COUNT,
            "small_tokens": _COUNT,
            "discarded_tokens": _COUNT,
            "segments": _COUNT,
            "handoffs": _COUNT,
            "resumes": {**_COUNT, "description": "Breaks of engines that the reply outlived."},
        },
        extra={
            **_object({field.name: _COUNT for field in fields(Extra)}),
            "description": "What engines did ahead: with `overlap` or `warm_every_tokens`.",
        },
    ),
)


def components() -> dict[str, Schema]:
    return {**_requests(), **_replies(), **_errors(), **_states()}


def _requests() -> dict[str, Schema]:
    chat = {"model": _NAME, "messages": _list(_TURN, minItems=1)}
    return {
        "ChatRequest": _object(
            chat,
            **_GENERATED,
            max_completion_tokens=_integer(1),
            logprobs=_BOOLEAN,
            top_logprobs=_integer(0, MAX_TOP_LOGPROBS),
            tools=_OBJECTS,
            tool_choice=_ANY,
            response_format=_OBJECT,
            chat_template_kwargs=_OBJECT,
        ),
        "CompletionRequest": _object(
            {"model": _NAME, "prompt": _PROMPT},
            **_GENERATED,
            logprobs=_integer(0, MAX_TOP_LOGPROBS),
            echo=_BOOLEAN,
        ),
        "MessagesRequest": _object(
            {**_MESSAGES, "max_tokens": {"type": "integer", "minimum": 1}}, **_MESSAGES_MORE
        ),
        "CountRequest": _object(_MESSAGES, **_MESSAGES_MORE),
        "ResponsesRequest": _object(
            {"model": _NAME, "input": {"anyOf": [_TEXT, _list({"type": "object"})]}},
            **_STREAMED,
            instructions={"type": ["string", "null"]},
            max_output_tokens=_integer(1),
            reasoning=_OBJECT,
            text=_OBJECT,
            tools=_OBJECTS,
            tool_choice=_ANY,
            include={"type": ["array", "null"]},
            top_logprobs=_integer(0, MAX_TOP_LOGPROBS),
            metadata={"type": ["object", "null"], "additionalProperties": _TEXT},
            truncation={"enum": ["disabled", None]},
        ),
    }


def _replies() -> dict[str, Schema]:
    choice = _object({"index": _COUNT, "finish_reason": {"type": ["string", "null"]}})
    return {
        "Completion": _object({"id": _TEXT, "choices": _list(choice)}, usage=_nullable(_USAGE)),
        "Message": _object(
            {
                "id": _TEXT,
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "model": _TEXT,
                "content": _list(_object({"type": _TEXT})),
                "stop_reason": {"type": ["string", "null"]},
                "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}),
            }
        ),
        "Response": _object(
            {
                "id": _TEXT,
                "object": {"const": "response"},
                "status": {"enum": ["completed", "incomplete", "failed"]},
                "model": _TEXT,
                "output": _list(_object({"type": _TEXT})),
            },
            usage=_OBJECT,
        ),
        "TokenCount": _object({"input_tokens": _COUNT}),
    }


def _errors() -> dict[str, Schema]:
    told = {"message": {"type": "string", "minLength": 1}, "type": _TEXT}
    word: Schema = {"type": ["string", "null"]}
    return {
        "Error": _object({"error": _object({**told, "param": word, "code": word})}),
        "AnthropicError": _object({"type": {"const": "error"}, "error": _object(told)}),
    }


def _states() -> dict[str, Schema]:
    model = _object(
        {"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT},
        relaygen=_object({"large": _TEXT, "small": _TEXT}),
    )
    policy = _object({"ready": {"type": "boolean"}})
    replica = _object(
        {
            "url": _TEXT,
            "up": {"type": "boolean"},
            "state": {"enum": ["up", "down", "open", "draining"]},
        },
        active=_COUNT,
    )
    return {
        "Model": model,
        "Models": _object({"object": {"const": "list"}, "data": _list(ref("Model"))}),
        "Health": _object({"status": {"const": "alive"}}),
        "Readiness": _object(
            {
                "ready": {"type": "boolean"},
                "policies": {"type": "object", "additionalProperties": policy},
                "refused": {"type": "object", "additionalProperties": _list(_TEXT)},
                "backends": {"type": "object", "additionalProperties": _list(replica)},
            }
        ),
    }
