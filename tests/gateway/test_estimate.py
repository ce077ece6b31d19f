"""Estimates of token counts: whatever becomes of the encoding, nothing fails and nothing waits."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import tiktoken.load

from gateway import estimate
from gateway.estimate import Estimator

TEXT = "How many primes are there below 100?"
BY_CHARACTERS = -(-len(TEXT) // 4)
SAYS_SO = "4 characters a token"


def loaded(encoder: Callable[[], Callable[[str], int]]) -> Estimator:
    estimator = Estimator(encoder)
    estimator.load().join(5)
    return estimator


def falls_back(estimator: Estimator) -> bool:
    return estimator.method == SAYS_SO and estimator.count(TEXT) == BY_CHARACTERS


def words() -> Callable[[str], int]:
    return lambda text: len(text.split())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """tiktoken with an empty cache and nothing to fetch from; returns the cache's folder."""

    def get(*args: Any, **options: Any) -> Any:
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    return tmp_path


def test_a_loaded_encoding_counts() -> None:
    estimator = loaded(words)
    assert estimator.count(TEXT) == 7
    assert estimator.method == "o200k_base"


def test_before_it_is_loaded_characters_count() -> None:
    assert falls_back(Estimator(words))


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("tiktoken"),
        requests.ConnectionError("no network"),
        requests.HTTPError("503"),
        PermissionError("cache"),
        ValueError("Hash mismatch"),
    ],
)
def test_what_keeps_the_encoding_from_loading_is_survived(error: Exception) -> None:
    def fails() -> Callable[[str], int]:
        raise error

    assert falls_back(loaded(fails))


def test_without_tiktoken_characters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert falls_back(loaded(estimate._tiktoken))


def test_without_a_network_characters_count(no_network: Path) -> None:
    assert falls_back(loaded(estimate._tiktoken))


def test_a_corrupt_cache_is_not_believed(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    cached = tiktoken.load.read_file_cached

    def corrupted(path: str, expected: str | None = None) -> bytes:
        key = hashlib.sha1(path.encode()).hexdigest()
        (no_network / key).write_bytes(b"!!! not base64 at all")
        read.append(key)
        return cached(path, expected)

    monkeypatch.setattr(tiktoken.load, "read_file_cached", corrupted)
    assert falls_back(loaded(estimate._tiktoken))
    assert read


def test_nothing_waits_for_a_slow_network() -> None:
    arrived = threading.Event()

    def slow() -> Callable[[str], int]:
        assert arrived.wait(5)
        return lambda text: 1

    estimator = Estimator(slow)
    began = time.monotonic()
    thread = estimator.load()
    assert falls_back(estimator)
    assert estimator.load() is thread  # and it is fetched once
    assert time.monotonic() - began < 1
    assert thread.daemon
    arrived.set()
    thread.join(5)
    assert estimator.count(TEXT) == 1


def test_the_shared_one_counts_nothing_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = loaded(words)
    monkeypatch.setattr(estimate, "_estimator", lambda: estimator)
    assert estimate.estimate_tokens("") == 0
    assert estimate.estimate_tokens(TEXT) == 7
    assert estimate.estimate_method() == "o200k_base"
    estimate.load_encoding()


def test_a_text_of_any_length_has_a_token() -> None:
    assert [Estimator(words).count("x" * length) for length in (1, 4, 5, 8)] == [1, 1, 2, 2]
