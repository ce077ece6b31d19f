"""Which model a request of any kind names; for keys that may not use all, beyond doubt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from aiohttp import web

from gateway.errors import RequestError
from gateway.passthrough import model_in

_PARAMETER = rb'; (?:filename\*?=(?:"[^"\\\r\n]*"|[^\s";]+)|name="([^"\\%\r\n]*)")'
_DISPOSITION = re.compile(rb"content-disposition: form-data((?:%s)+)" % _PARAMETER, re.IGNORECASE)
_NAME = re.compile(rb'; name="([^"]*)"', re.IGNORECASE)
_BOUNDARY = re.compile(r'multipart/form-data; *boundary=(?:"([^"]+)"|([^\s";,]+))')


def model_named(request: web.Request, content: bytes, *, strict: bool) -> str | None:
    """The model in the body, else in the query; None: nowhere.

    An engine may serve several models, and may read a body differently than we do. `strict`
    refuses (RequestError) what two readers could understand differently.
    """
    if strict and content:
        return _only_model(request, content)
    return model_in(content, request.content_type) or request.query.get("model")


def _only_model(request: web.Request, content: bytes) -> str:
    if request.content_type.startswith("multipart/"):
        names = list(_form_models(request.headers["Content-Type"], content))
    elif request.content_type == "application/x-www-form-urlencoded":
        names = []
    else:
        names = [model_in(content, "application/json")]
    if len(names) != 1 or names[0] is None:
        raise RequestError(
            "An API key that may use some models only must name one in the body, in plain JSON or "
            'in one part `name="model"` of a multipart form',
            param="model",
        )
    return names[0]


def _form_models(content_type: str, content: bytes) -> Iterator[str | None]:
    """The value of each part called `model`; None for what is no plain part."""
    boundary = _BOUNDARY.fullmatch(content_type)
    if boundary is None:
        yield None
        return
    before, *parts, after = content.split(f"--{boundary[1] or boundary[2]}".encode())
    if before or not after.startswith(b"--"):
        yield None
    for part in parts:
        head, found, value = part.partition(b"\r\n\r\n")
        name = _part_name(head) if found and value.endswith(b"\r\n") else None
        if name is None:
            yield None
        elif name.strip().lower() == b"model":
            yield value[:-2].decode(errors="replace")


def _part_name(head: bytes) -> bytes | None:
    """From the headers of a part: one plain disposition, other lines as they like."""
    first, *lines = head.split(b"\r\n")
    told = [line for line in lines if b"disposition" in line.lower()]
    folded = any(line[:1] in (b" ", b"\t", b"") or b"\n" in line for line in lines)
    if first or folded or len(told) != 1:
        return None
    disposition = _DISPOSITION.fullmatch(told[0])
    names = _NAME.findall(disposition[1]) if disposition else []
    return names[0] if len(names) == 1 else None
