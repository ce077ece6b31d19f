"""The OpenAPI document: valid, whole, and true of the routes and their answers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from openapi_spec_validator.validation.exceptions import OpenAPIValidationError

from gateway.app import build_app
from gateway.openapi import PASSED_METHODS, document
from tests.gateway.fakes import FakeVllm
from tests.gateway.support import Stage, get, settings_of


def routed() -> set[tuple[str, str]]:
    """What the application serves: HEAD comes with each GET, and a star stands for all methods."""
    found = set()
    for route in build_app(settings_of()).router.routes():
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical)  # type: ignore[union-attr]
        method = route.method.lower()
        methods = PASSED_METHODS if method == "*" else (method,)
        found |= {(m, path) for m in methods}
    gets = {path for method, path in found if method == "get"}
    starred = {path for method, path in found if method == "trace"}
    return {(m, p) for m, p in found if m != "head" or p not in gets - starred}


def described() -> dict[tuple[str, str], Any]:
    return {
        (method, path): operation
        for path, item in document()["paths"].items()
        for method, operation in item.items()
    }


def test_it_is_valid() -> None:
    assert list(OpenAPIV31SpecValidator(document()).iter_errors()) == []


def test_a_wrong_one_would_be_found() -> None:
    wrong = {**document(), "paths": {"/x": {"get": {"responses": {"200": {}}}}}}
    with pytest.raises(OpenAPIValidationError):
        OpenAPIV31SpecValidator(wrong).validate()


def test_it_has_every_route_and_no_other() -> None:
    assert described().keys() == routed()


def test_every_reference_leads_somewhere() -> None:
    components = document()["components"]
    names = re.findall(r"'\$ref': '#/components/(\w+)/([\w-]+)'", str(document()))
    assert names
    for kind, name in names:
        assert name in components[kind]
    assert {name for kind, name in names if kind == "schemas"} == components["schemas"].keys()


def test_requests_may_have_any_other_field() -> None:
    for name, schema in document()["components"]["schemas"].items():
        if name.endswith("Request"):
            assert schema["additionalProperties"] is True


async def test_it_is_served_to_who_has_a_key(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(), FakeVllm())
    assert await get(served, "/openapi.json") == (200, document())
    locked = await stage.gateway({"api_keys": ["secret"]})
    assert (await get(locked, "/openapi.json"))[0] == 401
