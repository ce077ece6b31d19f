"""API keys: who may call, what each key may use and see, and how one is made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yaml
from structlog.testing import capture_logs

from gateway.cli import main
from gateway.context import GATEWAY
from gateway.errors import RequestError
from gateway.keys import ANYBODY, KeyStore
from gateway.settings import SettingsError, load_settings
from tests.gateway.fakes import FakeVllm
from tests.gateway.support import POLICY, USER, Served, Stage, policy_of, until_ready
from tests.gateway.test_passthrough import Echo, form

ALICE, BOB = "alices-key", "bobs-key"


def store(*entries: Any) -> KeyStore:
    return KeyStore(load_settings({"api_keys": list(entries)}, None).api_keys)


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


# ---- who it is ----------------------------------------------------------------------------------


def test_a_key_is_found_by_itself_or_by_its_digest() -> None:
    keys = store("plain", {"name": "hashed", "sha256": sha256("other").upper()}, {"key": "third"})
    assert keys.find("Bearer plain").name == "key-1"
    assert keys.find("Bearer other").name == "hashed"
    assert keys.find("bearer third").name == "key-3"


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer plain2", "Basic plain", "Bearer  plain", "plain"]
)
def test_any_other_is_a_401(given: str) -> None:
    with pytest.raises(RequestError) as caught:
        store("plain").find(given)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_digest_is_no_key() -> None:
    with pytest.raises(RequestError):
        store({"sha256": sha256("plain")}).find(f"Bearer {sha256('plain')}")


def test_all_keys_are_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    keys = store("one", "two", "three")
    monkeypatch.setattr("gateway.keys.hmac.compare_digest", compare)
    keys.find("Bearer one")
    assert len(compared) == 3


def test_keys_can_be_replaced_while_running() -> None:
    keys = store("old")
    keys.replace(load_settings({"api_keys": ["new"]}, None).api_keys)
    assert keys.find("Bearer new").name == "key-1"
    with pytest.raises(RequestError):
        keys.find("Bearer old")


def test_taking_all_keys_away_is_told() -> None:
    keys = store("old")
    with capture_logs() as logs:
        keys.replace(())
    assert keys.find("") is ANYBODY
    assert [line["log_level"] for line in logs] == ["warning"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "a"}, "either `key` or `sha256`"),
        ({"key": "a", "sha256": "0" * 64}, "either `key` or `sha256`"),
        ({"sha256": "0" * 63}, "api_keys.0.sha256"),
        ({"sha256": "g" * 64}, "api_keys.0.sha256"),
        ({"name": "a\nb", "key": "k"}, "api_keys.0.name"),
        ({"name": "", "key": "k"}, "api_keys.0.name"),
        ({"key": ""}, "must not be empty"),
        ({"key": "a b"}, "must not be empty, nor have blanks"),
        ("", "must not be empty"),
        ({"key": "k", "generations": 0}, "api_keys.0.generations"),
        ({"key": "k", "policy": "p"}, "api_keys.0.policy"),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"api_keys": [entry]}, None)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"name": "a", "key": "1"}, {"name": "a", "key": "2"}], "the name 'a'"),
        ([{"name": "key-2", "key": "1"}, "2"], "the name 'key-2'"),
        (["1", {"name": "b", "sha256": sha256("1")}], "'b' is the same key as 'key-1'"),
    ],
)
def test_keys_must_be_told_apart(entries: list[Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"api_keys": entries}, None)
    assert said in str(caught.value)


# ---- relaygen key -------------------------------------------------------------------------------


def test_a_fresh_key_opens_by_the_entry_printed_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = set()
    for _ in range(2):
        assert main(["key", "alice"]) == 0
        printed = capsys.readouterr().out
        [key] = [line for line in printed.splitlines() if line.startswith("rg-")]
        config = tmp_path / "gateway.yaml"
        config.write_text(printed.replace(key, ""), encoding="utf-8")
        assert key not in yaml.safe_dump(yaml.safe_load(config.read_text(encoding="utf-8")))
        found = KeyStore(load_settings({}, config).api_keys).find(f"Bearer {key}")
        assert found.name == "alice"
        keys.add(key)
    assert len(keys) == 2
    assert all(len(key) >= 43 for key in keys)


def test_a_fresh_key_needs_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    assert "name:" not in capsys.readouterr().out


def test_a_name_that_can_be_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "a b"]) == 1
    captured = capsys.readouterr()
    assert "'a b'" in captured.err
    assert "rg-" not in captured.out


def test_printed_settings_show_no_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(f"api_keys: [{ALICE}, {{name: bob, key: {BOB}}}]", encoding="utf-8")
    assert main(["serve", "--config", str(config), "--print-settings"]) == 0
    printed = capsys.readouterr().out
    assert ALICE not in printed
    assert BOB not in printed
    assert "name: bob" in printed


# ---- what a key may use -------------------------------------------------------------------------


@pytest.fixture
async def served(stage: Stage) -> Served:
    """Alice may use the policy `pair`, Bob may use all."""
    large, small = Echo(model="big"), FakeVllm(model="tiny")
    await stage.engine(large)
    await stage.engine(small)
    backends = {"large": {"urls": [large.url]}, "small": {"urls": [small.url]}}
    keys = [{"name": "alice", "key": ALICE, "policies": [POLICY]}, {"name": "bob", "key": BOB}]
    pair, other = policy_of(large, small), policy_of(large, small, name="other")
    served = await stage.gateway({"backends": backends, "api_keys": keys}, pair, other)
    await until_ready(served, 200)
    return served


async def call(
    served: Served, key: str, method: str, path: str, data: bytes = b"", kind: str | None = None
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}", **({"Content-Type": kind} if kind else {})}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, served.url + path, data=data, headers=headers) as response,
    ):
        content = await response.read()
        return response.status, json.loads(content) if content.startswith(b"{") else {}


async def test_a_key_sees_only_what_it_may_use(served: Served) -> None:
    _, listed = await call(served, ALICE, "GET", "/v1/models")
    assert [model["id"] for model in listed["data"]] == [POLICY]
    _, listed = await call(served, BOB, "GET", "/v1/models")
    assert [model["id"] for model in listed["data"]] == [POLICY, "other", "big", "tiny"]
    assert (await call(served, ALICE, "GET", f"/v1/models/{POLICY}"))[0] == 200
    assert (await call(served, BOB, "GET", "/v1/models/big"))[0] == 200


def chat(model: str) -> bytes:
    return json.dumps({"model": model, "messages": USER, "max_tokens": 9}).encode()


def plain(model: str, field: str = "input") -> bytes:
    return json.dumps({"model": model, field: "x"}).encode()


WAYS = {
    "look": lambda name: ("GET", f"/v1/models/{name}"),
    "chat": lambda name: ("POST", "/v1/chat/completions", chat(name)),
    "completions": lambda name: ("POST", "/v1/completions", plain(name, "prompt")),
    "messages": lambda name: ("POST", "/v1/messages", chat(name)),
    "count_tokens": lambda name: ("POST", "/v1/messages/count_tokens", chat(name)),
    "responses": lambda name: ("POST", "/v1/responses", plain(name)),
    "anything": lambda name: ("POST", "/v1/embeddings", plain(name)),
    "tokenize": lambda name: ("POST", "/tokenize", plain(name)),
    "form": lambda name: ("POST", "/v1/audio/transcriptions", *form(name)),
    "query": lambda name: ("GET", f"/v1/files?model={name}"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["big", "other"])
async def test_another_model_is_not_there_for_it(served: Served, way: Any, name: str) -> None:
    told = await call(served, ALICE, *way(name))
    unknown = await call(served, ALICE, *way("nobody"))
    assert told[0] == 404
    code = told[1]["error"].get("code")
    assert code == "model_not_found" or "messages" in way("x")[1]  # Anthropic's have none
    assert json.dumps(told).replace(f"'{name}'", "'nobody'") == json.dumps(unknown)
    assert f"Served here: {POLICY}" in told[1]["error"]["message"]
    assert "tiny" not in told[1]["error"]["message"]
    assert "does not exist" not in json.dumps(await call(served, BOB, *way(name)))


@pytest.mark.parametrize("way", [way for key, way in WAYS.items() if key != "query"])
async def test_what_it_may_use_it_can(served: Served, way: Any) -> None:
    assert (await call(served, ALICE, *way(POLICY)))[0] not in (400, 401, 404)


TWO = b"--xyz\r\nContent-Disposition: form-data; %s\r\n\r\nbig\r\n"
ALLOWED = TWO.replace(b"big", POLICY.encode()) % b'name="model"'
END = b"--xyz--\r\n"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (ALLOWED + TWO % b'name="model"' + END, "multipart/form-data; boundary=xyz"),
        (ALLOWED + TWO % b"name=model" + END, "multipart/form-data; boundary=xyz"),
        (ALLOWED + TWO % b'name="mo\\del"' + END, "multipart/form-data; boundary=xyz"),
        (ALLOWED + TWO % b"name*=utf-8''model" + END, "multipart/form-data; boundary=xyz"),
        (ALLOWED + TWO % b'filename="x";name="model"' + END, "multipart/form-data; boundary=xyz"),
        (ALLOWED + TWO % b'x="\r\n y"; name="model"' + END, "multipart/form-data; boundary=xyz"),
        (ALLOWED + TWO % b'name="MODEL"' + END, "multipart/form-data; boundary=xyz"),
        (ALLOWED + END, "multipart/form-data; boundary=xyz; boundary=abc"),
        (b"x" + ALLOWED + END, "multipart/form-data; boundary=xyz"),
        (b'{"a": "&model=big&", "model": "pair"}', "application/x-www-form-urlencoded"),
        (b'{"model": "pair"', "application/json"),
        (b"model=big", "text/plain"),
    ],
)
async def test_what_could_name_another_model_to_an_engine_is_refused(
    served: Served, body: bytes, kind: str
) -> None:
    path = f"/v1/audio/transcriptions?model={POLICY}"
    status, told = await call(served, ALICE, "POST", path, body, kind)
    assert (status, told["error"]["param"]) == (400, "model")


async def test_forms_as_clients_make_them_are_understood(served: Served) -> None:
    data = aiohttp.FormData()
    data.add_field("file", b"\x00--xyz\r\n", filename="a b.wav", content_type="audio/wav")
    data.add_field("model", POLICY)
    headers = {"Authorization": f"Bearer {ALICE}"}
    async with (
        aiohttp.ClientSession(served.url, headers=headers) as session,
        session.post("/v1/audio/transcriptions", data=data) as response,
    ):
        assert response.status == 207
    alice = served.client.with_options(api_key=ALICE)
    with pytest.raises(openai.APIError):  # the answer is no JSON
        await alice.audio.transcriptions.create(model="big", file=("a.wav", b"x"))


async def test_the_keys_name_is_on_every_line_of_its_requests(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    import structlog

    bound: list[dict[str, Any]] = []

    def note(logger: object, method: str, event: Any) -> Any:
        bound.append({**structlog.contextvars.get_contextvars(), **event})
        return event

    with capture_logs(processors=[note]):
        await call(served, ALICE, "POST", "/v1/chat/completions", chat(POLICY))
    assert {line.get("key") for line in bound if "request_id" in line} == {"alice"}
    assert ALICE not in json.dumps(bound, default=str)


async def test_keys_replaced_hold_from_the_next_request_on(served: Served) -> None:
    settings = load_settings({"api_keys": [{"name": "carol", "key": "carols"}]}, None)
    served.app[GATEWAY].keys.replace(settings.api_keys)
    assert (await call(served, ALICE, "GET", "/v1/models"))[0] == 401
    assert (await call(served, "carols", "GET", "/v1/models"))[0] == 200
