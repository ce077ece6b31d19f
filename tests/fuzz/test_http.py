"""Whatever clients send: an answer soon, an error in its API's shape, nothing of our insides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from tests.fuzz.bodies import JUNK, requests, written
from tests.fuzz.sturdy import SturdyLlamaCpp, SturdyVllm, any_prompt
from tests.fuzz.support import (
    LEAKS,
    SECONDS,
    Running,
    alive,
    ask,
    background,
    exchange,
    fuzz,
    proper,
)
from tests.gateway.fakes import FakeEngine, Tokenizer
from tests.gateway.support import Served, Stage, policy_of

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(10 * SECONDS + 300)]


async def two_pairs(stage: Stage) -> Served:
    tokens = Tokenizer()
    engines: dict[str, FakeEngine] = {
        "large": SturdyVllm(any_prompt(), model="big", tokenizer=tokens),
        "small": SturdyVllm(any_prompt(), model="tiny", tokenizer=tokens),
        "llarge": SturdyLlamaCpp(any_prompt(), model="lbig"),
        "lsmall": SturdyLlamaCpp(any_prompt(), model="ltiny"),
    }
    for engine in engines.values():
        engine.chats = True
        await stage.engine(engine)
    pair = policy_of(engines["large"], engines["small"])
    other = policy_of(engines["llarge"], engines["lsmall"], name="lpair")
    other["large"]["backend"], other["small"]["backend"] = "llarge", "lsmall"
    backends = {name: {"urls": [engine.url]} for name, engine in engines.items()}
    return await stage.gateway(
        {"backends": backends, "limits": {"body_mib": 1}, "timeouts": {"idle": 5}}, pair, other
    )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with background(tmp_path_factory.mktemp("policies"), two_pairs) as running:
        yield running


def test_any_body(gateway: Running) -> None:
    url = gateway.served.url

    def check(request: tuple[str, bytes]) -> None:
        path, body = request
        proper(ask(url, "POST", path, body), path)
        alive(url)

    fuzz(check, requests(), share=0.5)


PATHS = st.sampled_from(
    [
        "/v1/models",
        "/v1/models/pair",
        "/v1/models/a/b",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/messages/count_tokens",
        "/v1/audio/transcriptions",
        "/tokenize",
        "/openapi.json",
        "/healthz",
        "/readyz",
    ]
) | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20).map(
    "/v1/{}".format
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Authorization",
            "x-api-key",
            "x-request-id",
            "Content-Type",
            "Accept",
            "Content-Encoding",
            "Expect",
            "anthropic-version",
            "Range",
            "Origin",
            "Cookie",
            "X-Forwarded-For",
        ]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"))
    | st.sampled_from(
        [
            "multipart/form-data; boundary=x",
            "application/json; charset=utf-16",
            "gzip",
            "br",
            "zstd",
            "100-continue",
            "text/plain; charset=nothing",
            "a/b/c;;;=",
            "x" * 5000,
        ]
    ),
    max_size=4,
)
FORM = st.lists(
    st.sampled_from(
        [
            b"--x\r\n",
            b'Content-Disposition: form-data; name="model"\r\n',
            b"\r\n",
            b"pair\r\n",
            b'name="model"\r\n\r\nbig\r\n',
            b"--x--\r\n",
            b"\xff\x00",
            b"Content-Type: a/b\r\n",
        ]
    )
).map(b"".join)
BODIES = st.one_of(st.binary(), FORM, JUNK.map(written), requests().map(lambda r: r[1]))


def test_any_request(gateway: Running) -> None:
    url = gateway.served.url
    methods = st.sampled_from(
        ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"]
    )

    def check(method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        if not headers.get("Expect", "").isascii():
            del headers["Expect"]  # where there is no route, aiohttp breaks on it by itself
        answer = ask(url, method, path, body, headers)
        # aiohttp's own word on a request that it can't read
        if answer.status not in (400, 417) or "x-request-id" in answer.headers:
            proper(answer, path, method)
        alive(url)

    fuzz(check, methods, PATHS, HEADERS, BODIES, share=0.25)


LINES = st.sampled_from(
    [
        b"GET /v1/models HTTP/1.1\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n",
        b"Host: x\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 10\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Encoding: gzip\r\n",
        b"\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"zz\r\n",
        b"\n",
        b"POST /v1/%ff\xff\xfe HTTP/1.1\r\n",
        b"Connection: close\r\n",
        b"Connection: upgrade\r\n",
        b"Upgrade: websocket\r\n",
        b'{"model": "pair"}',
        b"FFFFFFFFFFFFFFFF\r\n",
        b"a" * 9000,
        b"GET /v1/\xff?model=\xff HTTP/1.1\r\n",
        b"GET http://x/v1/models HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n",
        b"GET //x/v1 HTTP/1.0\r\n",
    ]
)


def test_any_bytes(gateway: Running) -> None:
    url = gateway.served.url

    def check(writes: list[bytes]) -> None:
        back = exchange(url, *writes)
        assert b" 500 " not in back.split(b"\r\n", 1)[0], back
        assert not [leak for leak in LEAKS if leak in back]
        alive(url)

    fuzz(check, st.lists(LINES | st.binary(max_size=20), max_size=12), share=0.25)
