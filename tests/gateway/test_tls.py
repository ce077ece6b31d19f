"""TLS on both sides: towards clients, and towards engines whose authority is our own."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from gateway.cli import main
from gateway.settings import SettingsError, Tls, load_settings
from gateway.tls import client_context, server_context
from tests.gateway.fakes import FakeVllm
from tests.gateway.processes import relaygen, serve
from tests.gateway.support import POLICY, USER, Served, Stage, ask, backends_of, policy_of


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


class Files:
    """A certificate for 127.0.0.1, its key and its authority, as files."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        leaf = authority.issue_cert("127.0.0.1")
        self.cert, self.key, self.ca = (folder / f"{n}.pem" for n in ("cert", "key", "ca"))
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        self.key.write_bytes(leaf.private_key_pem.bytes())
        self.ca.write_bytes(authority.cert_pem.bytes())

    @property
    def server(self) -> ssl.SSLContext:
        context = server_context(Tls(cert=self.cert, key=self.key))
        assert context
        return context


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Files:
    return Files(tmp_path, authority)


# ---- towards clients ----------------------------------------------------------------------------


async def test_clients_are_served_over_tls(stage: Stage, files: Files) -> None:
    arguments = await serve(stage, FakeVllm(model="big"))
    tls = {"RELAYGEN_TLS__CERT": str(files.cert), "RELAYGEN_TLS__KEY": str(files.key)}
    async with relaygen(*arguments, env=tls) as running:
        url = await running.url()
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=files.ca)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="any",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=trusting),
        ) as client:
            reply = await client.chat.completions.create(model=POLICY, messages=USER)
            assert reply.choices[0].message.content == "ok"
        await _refuses_old_tls(url, files)


async def _refuses_old_tls(url: str, files: Files) -> None:
    old = ssl.create_default_context(cafile=files.ca)
    with pytest.warns(DeprecationWarning):
        old.minimum_version = ssl.TLSVersion.TLSv1_1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/healthz", ssl=old)


def test_tls_older_than_1_2_is_off(files: Files) -> None:
    assert files.server.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(("given", "missing"), [("cert", "key"), ("key", "cert")])
def test_one_file_without_the_other_is_refused(files: Files, given: str, missing: str) -> None:
    with pytest.raises(SettingsError, match=rf"settings: tls: .*without tls\.{missing}; give both"):
        load_settings({"tls": {given: str(files.cert)}}, None)


def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garbled(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[:60] + "####" + text[80:])


BAD = [_missing, _empty, _garbled]


@pytest.mark.parametrize("spoil", BAD)
@pytest.mark.parametrize("which", ["cert", "key"])
def test_a_bad_file_is_named_before_anything_starts(
    files: Files,
    tmp_path: Path,
    which: str,
    spoil: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(getattr(files, which))
    monkeypatch.setenv("RELAYGEN_TLS__CERT", str(files.cert))
    monkeypatch.setenv("RELAYGEN_TLS__KEY", str(files.key))
    assert main(["serve", "--policies", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "settings: tls." in said
    assert str(getattr(files, which)) in said
    assert "; give " in said


def test_a_key_of_another_certificate_is_refused(
    files: Files, tmp_path: Path, authority: trustme.CA
) -> None:
    (tmp_path / "other").mkdir()
    other = Files(tmp_path / "other", authority)
    with pytest.raises(SettingsError, match=r"tls\.key: .* does not fit the certificate"):
        server_context(Tls(cert=files.cert, key=other.key))


def test_an_encrypted_key_is_refused_without_asking(files: Files) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(SettingsError, match=r"tls\.key: .* or is encrypted .*not encrypted"):
        server_context(Tls(cert=files.cert, key=files.key))


# ---- towards engines ----------------------------------------------------------------------------


async def over_tls(stage: Stage, files: Files, ca: Path | None) -> Served:
    """A pair whose large engine speaks https; the small one does not."""
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    large.tls = files.server
    await stage.engine(large)
    await stage.engine(small)
    backends = backends_of(large, small)
    backends["large"]["ca"] = ca
    return await stage.gateway({"backends": backends}, policy_of(large, small))


async def test_an_engine_is_reached_through_its_own_authority(stage: Stage, files: Files) -> None:
    served = await over_tls(stage, files, files.ca)
    assert (await ask(served))["choices"][0]["message"]["content"] == "ok"
    reply = await ask(served, model="big", stop=["x"])  # passed through
    assert reply == {"id": "whole", "choices": []}


async def test_an_engine_whose_authority_is_unknown_is_not_used(stage: Stage, files: Files) -> None:
    served = await over_tls(stage, files, None)
    with pytest.raises(openai.InternalServerError, match=r"not trusted .*backend's `ca`") as caught:
        await ask(served)
    assert caught.value.status_code == 502


async def test_only_the_authority_that_is_given_counts(stage: Stage, files: Files) -> None:
    files.ca.write_bytes(trustme.CA().cert_pem.bytes())
    served = await over_tls(stage, files, files.ca)
    with pytest.raises(openai.InternalServerError, match="not trusted"):
        await ask(served)


@pytest.mark.parametrize("spoil", BAD)
def test_a_bad_ca_is_named(files: Files, spoil: Any) -> None:
    spoil(files.ca)
    with pytest.raises(SettingsError) as caught:
        client_context("large", files.ca)
    assert str(caught.value).startswith(f"settings: backends.large.ca: {files.ca} ")
    assert "; give a PEM file with certificates of authorities" in str(caught.value)


def test_a_bad_ca_ends_the_start(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.ca.unlink()
    config = tmp_path / "gateway.yaml"
    config.write_text(f"backends: {{large: {{urls: ['https://a/v1'], ca: {files.ca}}}}}")
    assert main(["serve", "--config", str(config), "--policies", str(tmp_path)]) == 1
    assert f"backends.large.ca: {files.ca} can't be read" in capsys.readouterr().err
