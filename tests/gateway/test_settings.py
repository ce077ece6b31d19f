"""Settings: flags win, then environment, then file; what is wrong is named, and no secret shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli import main
from gateway.settings import SettingsError, load_settings

URL = "http://127.0.0.1:9/v1"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text("port: 1001\nhost: 127.0.0.9\nlimits: {body_mib: 3}\n", encoding="utf-8")
    return path


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_flags_win_over_environment_over_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings({}, config).port == 1001
    monkeypatch.setenv("RELAYGEN_PORT", "1002")
    assert load_settings({}, config).port == 1002
    assert load_settings({"port": 1003}, config).port == 1003
    assert load_settings({"port": 1003}, config).host == "127.0.0.9"


def test_defaults_need_nothing() -> None:
    settings = load_settings({}, None)
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.backends["large"].urls == ("http://127.0.0.1:8001/v1",)


@pytest.mark.parametrize(
    "value", ['["http://a:1/v1", "http://b:2/v1"]', "http://a:1/v1, http://b:2/v1/"]
)
def test_urls_come_from_the_environment_as_json_or_with_commas(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("RELAYGEN_BACKENDS__LARGE__URLS", value)
    assert load_settings({}, None).backends["large"].urls == ("http://a:1/v1", "http://b:2/v1")


def test_broken_json_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYGEN_BACKENDS__LARGE__URLS", '["http://a:1/v1"')
    with pytest.raises(SettingsError, match=r"settings: backends\.large\.urls: "):
        load_settings({}, None)


@pytest.mark.parametrize("value", ['["one", {"name": "key-2", "key": "two"}]', "one, two"])
def test_keys_come_from_the_environment_as_json_or_with_commas(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("RELAYGEN_API_KEYS", value)
    keys = load_settings({}, None).api_keys
    told = [(key.name, key.key.get_secret_value()) for key in keys if key.key]
    assert told == [("key-1", "one"), ("key-2", "two")]


def test_a_nested_setting_comes_from_the_environment(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYGEN_LIMITS__GENERATIONS", "7")
    limits = load_settings({}, config).limits
    assert (limits.generations, limits.body_mib) == (7, 3)


def test_a_flag_for_one_backend_keeps_the_others_of_the_file(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        "backends: {large: {urls: ['http://a:1/v1'], api_key: k}, small: {urls: ['http://b:1/v1']}}",
    )
    backends = load_settings({"backends": {"large": {"urls": [URL]}}}, config).backends
    assert backends["large"].urls == (URL,)
    assert backends["small"].urls == ("http://b:1/v1",)
    assert backends["large"].api_key is not None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("prot: 1", "prot"),
        ("limits: {body: 1}", "limits.body"),
        ("backends: {large: {url: x}}", "backends.large.url"),
        ("backends: {large: {urls: ['127.0.0.1:8001']}}", "backends.large.urls.0"),
        ("backends: {large: {urls: []}}", "backends.large.urls"),
        ("backends: {large: {engine: vlm, urls: ['http://a/v1']}}", "backends.large.engine"),
        ("backends: {large: {urls: ['http://me:pw@host/v1']}}", "backends.large.urls.0"),
        ("1: one", "1"),
        ("port: seventy", "port"),
        ("port: 70000", "port"),
        ("log: {level: loud}", "log.level"),
        ("timeouts: {idle: 0}", "timeouts.idle"),
        ("backends: [1]", "backends"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, written(tmp_path, text))
    assert f"settings: {field}: " in str(caught.value)


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "just words", "port: [", "a: b: c", b"\xff\xfe", "port: !!python/x 1"]
)
def test_a_file_that_is_no_mapping_is_refused(
    tmp_path: Path, text: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    assert main(["serve", "--config", str(path), "--print-settings"]) == 1
    assert str(path) in capsys.readouterr().err


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_settings({}, written(tmp_path, "")).port == 8080


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "no.yaml"), "--print-settings"]) == 1
    assert "no.yaml is not a file" in capsys.readouterr().err


SECRET = "sk-very-secret"


@pytest.mark.parametrize(
    "text",
    [
        f"api_keys: [{SECRET}, {SECRET}]",
        f"api_keys: ['{SECRET} {SECRET}']",
        f"api_keys: [{{key: {SECRET}, sha256: {'0' * 64}}}]",
        f"api_keys: [{{key: {SECRET}, policy: a}}]",
        f"api_keys: [{{sha256: {SECRET}}}]",
        f"api_keys: [{{key: [{SECRET}]}}]",
        f"api_keys: [[{SECRET}]]",
        f"api_keys: {{a: {SECRET}}}",
        f"backends: {{large: {{api_key: {SECRET}}}}}",
        f"backends: {{large: {{api_key: [{SECRET}], urls: ['{URL}']}}}}",
        f"backends: {{large: {{api_key: {SECRET}, urls: [bad]}}}}",
        f"backends: {{large: [{{api_key: {SECRET}}}]}}",
        f"backends: [{{api_key: {SECRET}}}]",
        f"api_key: {SECRET}",
        f"backends: {{large: {{urls: ['ftp://me:{SECRET}@host/v1']}}}}",
        f"tracing: {{headers: {SECRET}}}",
        f"tracing: {{headers: {{api-key: [{SECRET}]}}}}",
        f"tracing: {{otlp: 'http://me:{SECRET}@host'}}",
    ],
)
def test_errors_show_no_secret(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, written(tmp_path, text))
    assert SECRET not in str(caught.value)
    assert "settings: " in str(caught.value)


@pytest.mark.parametrize(
    "value", [f"{SECRET},{SECRET}", f'["{SECRET}"', f'{{"a": "{SECRET}"}}', f'["{SECRET}", ""]']
)
def test_errors_show_no_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("RELAYGEN_API_KEYS", value)
    with pytest.raises(SettingsError) as caught:
        load_settings({}, None)
    assert SECRET not in str(caught.value)


def test_a_number_for_a_secret_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, written(tmp_path, "tracing: {headers: {api-key: 4711}}"))
    assert "tracing.headers.api-key" in str(caught.value)
    assert "4711" not in str(caught.value)


def test_printed_settings_mask_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(
        tmp_path,
        f"api_keys: [{SECRET}]\n"
        f"backends: {{large: {{urls: ['{URL}'], api_key: {SECRET}}}}}\nport: 1234\n",
    )
    assert main(["serve", "--config", str(config), "--print-settings"]) == 0
    printed = capsys.readouterr().out
    assert SECRET not in printed
    assert "port: 1234" in printed
    assert "**********" in printed


def test_printed_settings_can_be_a_config_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--print-settings", "--large", URL, "--large", "http://b:1/v1"]
    assert main([*arguments, "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    again = load_settings({}, written(tmp_path, printed))
    assert again.port == 1001
    assert again.backends["large"].urls == (URL, "http://b:1/v1")
