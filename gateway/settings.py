"""The gateway's settings: flags win, then environment (RELAYGEN_*), then gateway.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as EnvironmentSettingsError


class SettingsError(Exception):
    """Settings that can't be used; the message names each field, its value and the remedy."""


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if "@" in parts.netloc:  # it would show in logs and errors
        raise ValueError("a URL must not carry a user or password; give the key as `api_key`")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http(s) URL; write it like http://127.0.0.1:8001/v1")
    return url.rstrip("/")


def _listed(value: object) -> object:
    """A list in the environment: JSON, or texts with commas between."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [url.strip() for url in value.split(",")]


EngineUrl = Annotated[str, AfterValidator(_base_url)]
EngineUrls = Annotated[
    tuple[EngineUrl, ...], NoDecode, BeforeValidator(_listed), Field(min_length=1)
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Backend(_Section):
    """The servers of one model. All URLs serve the same model: they are its replicas."""

    urls: EngineUrls = Field(description="Base URLs, ending in /v1.")
    engine: Literal["auto", "vllm", "sglang", "tgi", "llamacpp", "openai"] = Field(
        default="auto",
        description="Dialect; `auto` asks the server. `openai`: any other OpenAI-style API.",
    )
    continuation: Literal["auto", "completions", "chat"] = Field(
        default="auto",
        description="How a generation is gone on with: from a raw prompt, or from an unfinished "
        "assistant message; `auto`: `completions` where the server can.",
    )
    prefill: Literal["auto", "trailing", "prefix", "prefix_reasoning", "continue"] = Field(
        default="auto",
        description="How a chat API is told that the assistant message is unfinished: a last "
        "message is gone on with; `prefix: true` (Mistral); the same with the thinking in "
        "`reasoning_content` (DeepSeek); `continue_final_message` (vLLM). `auto`: as the engine "
        "is known to want it.",
    )
    api_key: SecretStr | None = Field(default=None, description="Bearer token for the engine.")
    ca: Path | None = Field(
        default=None,
        description="PEM file of the authorities that may have signed the certificates of its "
        "https URLs; without it, those that the system trusts.",
    )


class Timeouts(_Section):
    """Seconds."""

    connect: float = Field(default=5.0, gt=0, description="Until an engine accepts a connection.")
    probe: float = Field(
        default=5.0, gt=0, description="For an engine to tell what it is and serves."
    )
    idle: float = Field(
        default=300.0, gt=0, description="Without a byte from an engine, prefill included."
    )
    keep_alive: float = Field(
        default=15.0, gt=0, description="Of silence in a stream, until a comment is sent."
    )
    drain: float = Field(
        default=30.0, ge=0, description="For running generations to end after SIGTERM."
    )


class Limits(_Section):
    body_mib: float = Field(default=32.0, gt=0, description="Largest request body, MiB.")
    generations: int = Field(
        default=4096, ge=1, description="Concurrent generations; beyond it the answer is 429."
    )


class Log(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = Field(
        default="auto", description="`auto`: console on a terminal, else JSON lines."
    )


class Tls(_Section):
    """The gateway's own certificate: both files or neither."""

    cert: Path | None = Field(
        default=None,
        description="PEM file with the certificate and what leads up to its authority; the "
        "gateway then speaks https, TLS 1.2 at least.",
    )
    key: Path | None = Field(
        default=None, description="PEM file with the certificate's private key, not encrypted."
    )

    @model_validator(mode="after")
    def _both(self) -> Tls:
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise ValueError(f"tls.{given} is given without tls.{missing}; give both, or neither")
        return self


class Admin(_Section):
    """A second port for those who run the gateway."""

    host: str = Field(default="127.0.0.1", description="Address of the second port.")
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="A second port, without TLS, for `/metrics`, `/readyz` and `/healthz`; the "
        "first two are then not on the main one. None: all are there.",
    )


class Settings(BaseSettings):
    """Built once, passed down; nothing reads the environment later."""

    model_config = SettingsConfigDict(
        env_prefix="RELAYGEN_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port; 0 takes a free one.")
    policies: Path = Field(default=Path("policies/"), description="Folder of policy files.")
    policy_files: tuple[Path, ...] = Field(
        default=(), description="Single policy files; if given, the folder is not read."
    )
    api_keys: tuple[SecretStr, ...] = Field(
        default=(), description="Bearer tokens that clients may use; empty: no authentication."
    )
    backends: dict[str, Backend] = Field(
        default_factory=lambda: {
            "large": Backend(urls=("http://127.0.0.1:8001/v1",)),
            "small": Backend(urls=("http://127.0.0.1:8002/v1",)),
        },
        description="Engines by the name that policies use.",
    )
    tls: Tls = Tls()
    admin: Admin = Admin()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    log: Log = Log()
    workers: int = Field(default=1, ge=1, description="Processes that share the port.")


def load_settings(flags: dict[str, Any], config: Path | None) -> Settings:
    """Settings from the three sources. SettingsError names what is wrong and where."""
    in_file = {} if config is None else _read(config)

    class _FromFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, in_file)

    try:
        return _FromFile(**flags)
    except ValidationError as error:
        raise SettingsError("\n".join(_said(e) for e in error.errors())) from None
    except EnvironmentSettingsError as error:
        raise SettingsError(f"settings: {error}; write it as JSON") from None


def _read(config: Path) -> dict[str, Any]:
    if not config.is_file():
        raise SettingsError(f"--config: {config} is not a file; give the path of a gateway.yaml")
    try:
        data = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"settings: {config} can't be read: {error}") from None
    if data is not None and not isinstance(data, dict):
        raise SettingsError(f"settings: {config} must be a mapping; write `key: value` lines")
    return {str(key): value for key, value in (data or {}).items()}


def _said(error: ErrorDetails) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"settings: {field}: unknown key; see docs/settings.md"
    # A section would show the keys inside it; our own messages tell what they can.
    shown = isinstance(error["input"], str | int | float) and error["type"] != "value_error"
    got = f", got {error['input']!r}" if shown and "api_key" not in field else ""
    return f"settings: {field}: {error['msg']}{got}"
