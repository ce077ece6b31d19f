"""Errors that a client sees, in OpenAI's shape, and the one place that maps ours to them.

GatewayError
├── RequestError        the client's request is wrong, or asks for what is not there
└── UpstreamError       an engine refused, broke or can't be reached
    ├── UnreachableError    no connection: another replica may do
    └── BusyError           it has too much to do: another replica may do
"""

from __future__ import annotations

from typing import Any, Literal

from aiohttp import web
from orjson import dumps


class GatewayError(Exception):
    """Has what an OpenAI-shaped error needs. `status` is the HTTP status."""

    status = 500
    type = "server_error"
    inside: str | None = None
    """What the log tells beside the message, and no client."""
    engines = False
    """Whether an engine said so, and not the gateway."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,  # noqa: A002 - OpenAI's word
        param: str | None = None,
        code: str | int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status or self.status
        self.type = type or self.type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def mask(self, secret: str) -> None:
        """Takes a secret out of all that is told."""
        self.message = self.message.replace(secret, "***")
        self.args = (self.message,)
        self.inside = self.inside and self.inside.replace(secret, "***")

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                # Engines put the HTTP status here; OpenAI's is a word or null.
                "code": self.code if isinstance(self.code, str) else None,
            }
        }

    def response(self, body: dict[str, Any]) -> web.Response:
        response = web.Response(
            body=dumps(body),
            status=self.status,
            content_type="application/json",
            headers=self.headers,
        )
        if self.headers.get("Connection") == "close":  # saying so alone closes nothing
            response.force_close()
        return response


class RequestError(GatewayError):
    status = 400
    type = "invalid_request_error"


Cause = Literal["connect", "reset", "truncated", "error", "timeout", "status", "slow"]
"""How an engine failed, for logs and metrics."""


class UpstreamError(GatewayError):
    """`engine` is the base URL that failed, where another replica may do better."""

    status = 502
    type = "upstream_error"
    cause: Cause = "error"
    engine: str | None = None

    def of(self, cause: Cause) -> UpstreamError:
        """This error, with its cause told."""
        self.cause = cause
        return self


class UnreachableError(UpstreamError):
    cause = "connect"


class BusyError(UpstreamError):
    """The engine has too much to do: its status and message are told as they are."""

    type = "rate_limit_error"
    cause = "status"
    retry_after: float = 1.0


def model_not_found(model: str, known: list[str]) -> RequestError:
    served = ", ".join(known) or "none: no engine is up"
    return RequestError(
        f"The model {model!r} does not exist. Served here: {served}",
        status=404,
        param="model",
        code="model_not_found",
    )
