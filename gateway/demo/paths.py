"""Where the bundled models and policies lie, in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PairRole = Literal["large", "small"]

_DEMO = Path(__file__).resolve().parent
PAIR = _DEMO / "pair"


def bundled_model(role: PairRole) -> Path:
    """The GGUF file of the tiny pair's large or small model."""
    return PAIR / f"{role}.gguf"


def bundled_policy(name: str) -> Path:
    """The policy file `name`.yaml: in gateway/policies of a wheel, else at a checkout's root.

    Raises FileNotFoundError, naming both places, where neither has it.
    """
    package = _DEMO.parent
    places = [folder / "policies" / f"{name}.yaml" for folder in (package, package.parent)]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"no policy {name!r}: looked for {places[0]} and {places[1]}")
