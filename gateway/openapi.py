"""What the gateway serves, as an OpenAPI 3.1 document (GET /openapi.json). Pure.

Requests have the fields that the gateway itself reads; all others travel on to the engines. A route
of the application that is not described here, or the other way round, fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from gateway import openapi_schemas as schemas
from gateway.openapi_schemas import Schema, ref

EVENTS = "text/event-stream"
JSON = "application/json"
ANY = "*/*"
_ENGINE = {502: "An engine broke or refused.", 503: "No engine is up, or shutting down.",
           504: "An engine did not answer in time."}  # fmt: skip
_REASONS = {
    400: "The request is wrong: the error names the field.",
    401: "The API key is missing or wrong.",
    404: "No such model, or no such path.",
    405: "Not with this method.",
    408: "The body did not come in time.",
    413: "The body is larger than `limits.body_mib`.",
    429: "Too many generations are running (`Retry-After` says when to try again).",
    500: "A fault of the gateway's own.",
    **_ENGINE,
}
_ALWAYS = (401, 405, 500)
_POSTED = (400, 404, 408, 413)
_GENERATES = (*_POSTED, 429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `answers`: schemas of the good replies by media type, `errors`: the
    statuses of the others. `passes`: an engine may answer instead, with what it likes."""

    method: str
    path: str
    summary: str
    answers: Mapping[str, Schema]
    request: Schema | None = None
    errors: tuple[int, ...] = ()
    status: int = 200
    open: bool = False
    mode: bool = False
    passes: bool = False
    anthropic: bool = False
    parameters: tuple[Schema, ...] = ()


def _generates(path: str, summary: str, request: str, answer: str, **more: Any) -> Operation:
    answers = {JSON: ref(answer), EVENTS: {"type": "string"}}
    return Operation(
        "post", path, summary, answers, ref(request), _GENERATES, mode=True, passes=True, **more
    )


def _passed(method: str, path: str, *parameters: Schema) -> Operation:
    return Operation(
        method,
        path,
        "Passed through to an engine that serves the `model` of the body or the query, and its "
        "answer back, untouched.",
        {ANY: {}},
        {} if method not in ("get", "head") else None,
        _GENERATES,
        mode=True,
        passes=True,
        parameters=parameters,
    )


def _parameter(name: str, what: str, where: str = "path") -> Schema:
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "description": what,
        "schema": {"type": "string"},
    }


PASSED_METHODS = ("get", "post", "put", "patch", "delete", "options", "head", "trace")
_REST = _parameter("path", "Any path that engines know; it may have slashes.")
_MODEL = _parameter("model", "The model, where no body names it.", "query")

OPERATIONS: tuple[Operation, ...] = (
    _generates("/v1/chat/completions", "OpenAI's Chat Completions.", "ChatRequest", "Completion"),
    _generates("/v1/completions", "OpenAI's Completions.", "CompletionRequest", "Completion"),
    _generates(
        "/v1/messages", "Anthropic's Messages.", "MessagesRequest", "Message", anthropic=True
    ),
    _generates("/v1/responses", "OpenAI's Responses, stateless.", "ResponsesRequest", "Response"),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "How many tokens the prompt of such a message has.",
        {JSON: ref("TokenCount")},
        ref("CountRequest"),
        _GENERATES,
        passes=True,
        anthropic=True,
    ),
    Operation("get", "/v1/models", "Policies and the models that are up.", {JSON: ref("Models")}),
    Operation(
        "get",
        "/v1/models/{model}",
        "One of them.",
        {JSON: ref("Model")},
        errors=(404,),
        parameters=(_parameter("model", "A name; it may have slashes."),),
    ),
    _passed("post", "/tokenize"),
    _passed("post", "/detokenize"),
    *(_passed(method, "/v1/{path}", _REST, _MODEL) for method in PASSED_METHODS),
    Operation("get", "/healthz", "Alive.", {JSON: ref("Health")}, open=True),
    Operation(
        "get",
        "/readyz",
        "Whether all policies can be served, by which engines and how; 503 if not.",
        {JSON: ref("Readiness")},
        open=True,
    ),
    Operation(
        "get",
        "/metrics",
        "What is counted, for Prometheus (OpenMetrics if asked for).",
        {"text/plain": {"type": "string"}, "application/openmetrics-text": {"type": "string"}},
        open=True,
    ),
    Operation("get", "/openapi.json", "This document.", {JSON: {"type": "object"}}),
)


@cache
def document() -> Schema:
    paths: dict[str, dict[str, Schema]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "RelayGen",
            "version": version("relaygen"),
            "description": "A gateway that lets a large and a small model write one generation.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas.components(),
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation) -> Schema:
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}",
        "responses": _responses(operation),
    }
    if operation.open:
        described["security"] = []
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.request is not None:
        media = JSON if operation.request else ANY
        content = {media: {"schema": operation.request}}
        described["requestBody"] = {"required": bool(operation.request), "content": content}
    return described


def _responses(operation: Operation) -> Schema:
    content = {media: {"schema": schema} for media, schema in operation.answers.items()}
    good = {"description": "Served.", "headers": _headers(operation), "content": content}
    responses: Schema = {str(operation.status): good}
    if operation.path == "/readyz":
        responses["503"] = {**good, "description": "Not ready."}
    always = () if operation.open else _ALWAYS
    for status in sorted({*operation.errors, *always}):
        responses[str(status)] = _error(operation, status)
    if operation.passes:
        engines = {**good, "description": "What an engine answered.", "content": {ANY: {}}}
        responses["default"] = engines
    return responses


def _error(operation: Operation, status: int) -> Schema:
    own = ref("AnthropicError" if operation.anthropic else "Error")
    # One that serves the model by itself may answer with an error of its own making.
    schema = {"anyOf": [own, {"type": "object"}]} if operation.passes and status != 401 else own
    headers = _headers(operation)
    if status in (429, 503):
        headers["Retry-After"] = _header("Retry-After")
    return {
        "description": _REASONS[status],
        "headers": headers,
        "content": {JSON: {"schema": schema}},
    }


_HEADERS: Schema = {
    "x-request-id": {
        "description": "The client's own, or one made up; the log has it too.",
        "schema": {"type": "string"},
    },
    "x-relaygen-mode": {
        "description": "Whether both models could write the reply, or one engine served it whole.",
        "schema": {"enum": ["relay", "passthrough"]},
    },
    "Retry-After": {"description": "Seconds.", "schema": {"type": "string"}},
}


def _header(name: str) -> Schema:
    return {"$ref": f"#/components/headers/{name}"}


def _headers(operation: Operation) -> Schema:
    names = ["x-request-id", *(["x-relaygen-mode"] if operation.mode else [])]
    return {name: _header(name) for name in names}
