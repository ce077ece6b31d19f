"""Who may call: the clients' keys, compared by their SHA-256, and what each of them may use."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from aiohttp import web
from pydantic import ValidationError

from gateway.errors import RequestError
from gateway.settings import ApiKey, SettingsError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Key:
    """A client's key as it was when its request came. `policies` None: it may use all."""

    name: str
    policies: frozenset[str] | None = None
    generations: int | None = None

    def may_use(self, model: str) -> bool:
        return self.policies is None or model in self.policies

    def seen(self, models: Iterable[str]) -> list[str]:
        """Those of the names that it may use, in their order."""
        return [model for model in models if self.may_use(model)]


ANYBODY = Key("")
"""Whoever calls a gateway that has no keys."""
KEY = web.RequestKey("key", Key)


class KeyStore:
    """The keys in force. None at all means that everybody may call."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys: list[tuple[bytes, Key]] = []
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Other keys from now on; what runs goes on."""
        found = [(entry.digest, _key(entry)) for entry in keys]
        if self._keys and not found:
            log.warning("no API keys any more: everybody may call")
        self._keys = found

    def find(self, authorization: str) -> Key:
        """The key of an Authorization header. RequestError (401) for one that is none of ours.

        Takes the same time whichever key fits, or none.
        """
        if not self._keys:
            return ANYBODY
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        fitting = [key for known, key in self._keys if hmac.compare_digest(digest, known)]
        if not fitting or scheme.lower() != "bearer":
            raise RequestError(
                "Missing or wrong API key; send `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )
        return fitting[0]


def _key(entry: ApiKey) -> Key:
    policies = None if entry.policies is None else frozenset(entry.policies)
    return Key(entry.name or "", policies, entry.generations)


def fresh_entry(name: str | None) -> tuple[str, dict[str, str]]:
    """A key that nobody can guess, of 256 random bits, and the entry of `api_keys` for it.

    Raises SettingsError for a name that can't be one.
    """
    key = f"rg-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = {"sha256": digest} if name is None else {"name": name, "sha256": digest}
    try:
        ApiKey.model_validate(entry)
    except ValidationError as error:
        raise SettingsError(f"key: NAME: {error.errors()[0]['msg']}, got {name!r}") from None
    return key, entry
