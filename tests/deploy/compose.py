"""docker-compose.yml as Compose reads it: anchors merged, variables put in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
ENV = ROOT / ".env"
ENGINES = ("vllm", "eagle3", "sglang", "tgi", "cpu")
PROFILES = (*ENGINES, "monitoring")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def environment() -> dict[str, str]:
    """What .env sets."""
    lines = ENV.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)  # type: ignore[arg-type]


def variables() -> dict[str, set[str]]:
    """The variables that the file reads, and the defaults that it has for each."""
    found: dict[str, set[str]] = {}
    for name, default in _VARIABLE.findall(_text()):
        found.setdefault(name, set()).add(default)
    return found


def _text() -> str:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def services(given: dict[str, str] | None = None) -> dict[str, Any]:
    values = environment() if given is None else given
    text = _VARIABLE.sub(lambda m: values.get(m[1]) or m[2], FILE.read_text(encoding="utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


@dataclass(frozen=True)
class Profile:
    """The services that a profile starts."""

    services: dict[str, Any]

    @property
    def gateway(self) -> dict[str, Any]:
        [found] = [s for name, s in self.services.items() if name.startswith("gateway")]
        return dict(found)

    def engine(self, role: str) -> dict[str, Any]:
        """The service that the gateway knows by the role's name."""
        [found] = [s for s in self.services.values() if role in _aliases(s)]
        return dict(found)


def profile(name: str) -> Profile:
    return Profile({n: s for n, s in services().items() if name in s["profiles"]})


def _aliases(service: dict[str, Any]) -> list[str]:
    found: list[str] = service.get("networks", {}).get("default", {}).get("aliases", [])
    return found
