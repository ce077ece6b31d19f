"""The gateway's settings: flags win, then environment (RELAYGEN_*), then gateway.yaml."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
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
    if value.lstrip().startswith(("[", "{")):
        return json.loads(value)
    return [text.strip() for text in value.split(",")]


EngineUrl = Annotated[str, AfterValidator(_base_url)]
EngineUrls = Annotated[
    tuple[EngineUrl, ...], NoDecode, BeforeValidator(_listed), Field(min_length=1)
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


KeyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]


class ApiKey(_Section):
    """What one client shows, and what it may do."""

    name: KeyName | None = Field(
        default=None,
        description="What logs and metrics call it: letters, digits, `.`, `_`, `@`, `-`; unless "
        "given: `key-1`, `key-2`, ... by its place in the list.",
    )
    key: SecretStr | None = Field(default=None, description="The key itself. Or:")
    sha256: Sha256 | None = Field(
        default=None,
        description="SHA-256 of the key, 64 hex digits: then this file holds no key. `relaygen "
        "key` makes one.",
    )
    policies: tuple[str, ...] | None = Field(
        default=None,
        description="The only policies (and engines' models) that it may use and see; unless "
        "given: all.",
    )
    generations: int | None = Field(
        default=None,
        ge=1,
        description="Its own limit of generations that run or wait; unless given: none but "
        "`limits.generations`.",
    )

    @field_validator("key")
    @classmethod
    def _sendable(cls, key: SecretStr | None) -> SecretStr | None:
        text = "x" if key is None else key.get_secret_value()
        if not text or not text.isprintable() or " " in text:
            raise ValueError("a key must not be empty, nor have blanks or control characters")
        return key

    @model_validator(mode="after")
    def _one_of_two(self) -> ApiKey:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either `key` or `sha256`")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key is None:
            return bytes.fromhex(self.sha256 or "")
        return hashlib.sha256(self.key.get_secret_value().encode()).digest()


def _with_key(value: object) -> object:
    """An entry that is a plain text is the key itself."""
    return {"key": value} if isinstance(value, str) else value


def _told_apart(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    """Every key with a name. ValueError for two of one name, or one key twice."""
    named = [
        entry if entry.name else entry.model_copy(update={"name": f"key-{number}"})
        for number, entry in enumerate(keys, 1)
    ]
    seen: dict[object, str | None] = {}
    for entry in named:
        if entry.name in seen:
            raise ValueError(f"two keys have the name {entry.name!r}; give each its own")
        if entry.digest in seen:
            raise ValueError(f"{entry.name!r} is the same key as {seen[entry.digest]!r}")
        seen[entry.name] = seen[entry.digest] = entry.name
    return tuple(named)


ApiKeys = Annotated[
    tuple[Annotated[ApiKey, BeforeValidator(_with_key)], ...],
    NoDecode,
    BeforeValidator(_listed),
    AfterValidator(_told_apart),
]


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
    draining: Annotated[tuple[EngineUrl, ...], NoDecode, BeforeValidator(_listed)] = Field(
        default=(),
        description="Those of `urls` that finish what runs on them and are given nothing new.",
    )

    @model_validator(mode="after")
    def _draining_are_known(self) -> Self:
        if unknown := set(self.draining) - set(self.urls):
            named = ", ".join(sorted(unknown))
            raise ValueError(f"draining: {named} is none of `urls`; add it there")
        return self

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
    first_token: float = Field(
        default=300.0, gt=0, description="For the first token of a decode, prefill included."
    )
    idle: float = Field(default=300.0, gt=0, description="Without a byte from an engine.")
    total: float = Field(
        default=3600.0, gt=0, description="For a whole reply, from request to last byte."
    )
    keep_alive: float = Field(
        default=15.0, gt=0, description="Of silence in a stream, until a comment is sent."
    )
    drain: float = Field(
        default=30.0, ge=0, description="For running generations to end after SIGTERM."
    )
    client: float = Field(
        default=60.0,
        gt=0,
        description="For a client to send a request's head, and for each 16 KiB at least of what "
        "it sends as a body or takes of an answer that waits for it.",
    )


class Limits(_Section):
    body_mib: float = Field(default=32.0, gt=0, description="Largest request body, MiB.")
    header_kib: int = Field(
        default=16, ge=1, le=1024, description="Longest URL and longest header of a request, KiB."
    )
    generations: int = Field(
        default=4096,
        ge=1,
        description="Concurrent generations; beyond it requests wait, or the answer is 429.",
    )
    queue: int = Field(
        default=0,
        ge=0,
        description="Requests that may wait for room; beyond it the answer is 429.",
    )
    queue_seconds: float = Field(
        default=10.0, gt=0, description="How long one may wait, until its answer is 429."
    )


class ResumeSettings(_Section):
    """How a generation outlives an engine that breaks in the middle of it."""

    attempts: int = Field(
        default=10, ge=0, description="Most decodes of one generation that are gone on from."
    )
    seconds: float = Field(
        default=30.0,
        ge=0,
        description="Without a new token, after which a generation is given up.",
    )


class HealthSettings(_Section):
    """When a replica that fails is passed over for others."""

    failures: int = Field(
        default=3, ge=1, description="In a row, after which it is passed over (the breaker opens)."
    )
    cooldown: float = Field(
        default=5.0,
        gt=0,
        description="Seconds until one request tries it again; doubled each time that fails, up "
        "to 60.",
    )
    slow_start: float = Field(
        default=10.0, ge=0, description="Seconds in which one that is back gets its full load."
    )


class Log(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = Field(
        default="auto", description="`auto`: console on a terminal, else JSON lines."
    )
    sample: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the requests whose generations get a line; those that failed or were "
        "cancelled always do.",
    )
    texts: bool = Field(
        default=False,
        description="Log what clients ask and models write, each in a line of its own that is "
        "marked `private: true`.",
    )


class TracingSettings(_Section):
    """OpenTelemetry: needs `pip install 'relaygen[otel]'`."""

    otlp: EngineUrl | None = Field(
        default=None,
        description="Base URL of a collector that takes OTLP over HTTP, like "
        "http://otel-collector:4318; spans go to its /v1/traces. None: no spans.",
    )
    headers: dict[str, SecretStr] = Field(
        default_factory=dict, description="Sent to the collector with them, its key for one."
    )
    sample: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the traces that begin here; where a client's request has a "
        "`traceparent`, that one decides.",
    )
    service: str = Field(default="relaygen", min_length=1, description="`service.name` of spans.")


class PublicModel(_Section):
    """A model name of the gateway's own that stands for policies, to try a new one on a share."""

    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        min_length=1,
        description="Policies, and how many of its requests each gets, against one another. One "
        "that is not loaded gets none.",
    )


class ShadowSettings(_Section):
    """Relayed requests that the large model answers alone as well, unseen, to compare the two."""

    share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the relayed requests; their cost doubles."
    )
    concurrent: int = Field(
        default=2, ge=1, description="That run at once, in a process; what is beyond is left out."
    )
    seconds: float = Field(default=600.0, gt=0, description="For one, before it is given up.")


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
    api_keys: ApiKeys = Field(
        default=(),
        description="Keys of the clients, each a text (the key) or a mapping; empty: no "
        "authentication.",
    )
    backends: dict[str, Backend] = Field(
        default_factory=lambda: {
            "large": Backend(urls=("http://127.0.0.1:8001/v1",)),
            "small": Backend(urls=("http://127.0.0.1:8002/v1",)),
        },
        description="Engines by the name that policies use.",
    )
    models: dict[str, PublicModel] = Field(
        default_factory=dict,
        description="Model names that stand for policies. One that is a policy's own name goes "
        "before that.",
    )
    shadow: ShadowSettings = ShadowSettings()
    tls: Tls = Tls()
    admin: Admin = Admin()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    resume: ResumeSettings = ResumeSettings()
    health: HealthSettings = HealthSettings()
    log: Log = Log()
    tracing: TracingSettings = TracingSettings()
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
    secret = "api_key" in field or field.startswith("tracing.headers")
    harmless = not secret or field.endswith((".generations", ".name"))
    got = f", got {error['input']!r}" if shown and harmless else ""
    return f"settings: {field}: {error['msg']}{got}"
