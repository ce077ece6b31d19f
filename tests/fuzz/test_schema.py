"""Schemathesis on the gateway's own description: what it answers is what it says it does."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.openapi import document
from tests.fuzz.support import SECONDS, WAIT_S, Running, alive, background
from tests.fuzz.test_http import two_pairs

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(10 * SECONDS + 300)]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with background(tmp_path_factory.mktemp("policies"), two_pairs) as running:
        yield running


def test_it_is_as_described(gateway: Running) -> None:
    url = gateway.served.url
    schema: Any = schemathesis.openapi.from_dict(document())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 15
    end = time.monotonic() + SECONDS
    number = random.randrange(2**32)
    while True:
        for operation in operations:
            print(f"\n{operation.label}, seed {number}")
            _try(operation, url, number)
            if time.monotonic() > end:
                return
        number += 1


def _try(operation: Any, url: str, number: int) -> None:
    def check(case: Any) -> None:
        response = case.call(base_url=url, timeout=WAIT_S)
        # An engine's own 5xx passes untouched; and so do its bodies, of any kind.
        ours = response.headers.get("x-relaygen-mode") != ["passthrough"]
        case.validate_response(response, checks=CHECKS if ours else CHECKS[1:2])

    options = settings(
        max_examples=20,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    seed(number)(options(given(operation.as_strategy())(check)))()
    alive(url)
