"""What is different in two policies, key by key, cue by cue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relaygen.policy import Policy

_STATISTICS = ("count", "mean", "low")


@dataclass(frozen=True, slots=True)
class Difference:
    """`old` or `new` is None where the key has no value there."""

    field: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class CueDifference:
    """A cue that only one of the two has, with what that one's calibration found of it."""

    word: str
    added: bool
    found: dict[str, float]


def differences(old: Policy, new: Policy) -> list[Difference]:
    """All but the cues, in the schema's order; of calibration, what is expected."""
    before, after = _flat(old), _flat(new)
    fields = dict.fromkeys([*before, *after])
    return [
        Difference(field, before.get(field), after.get(field))
        for field in fields
        if before.get(field) != after.get(field)
    ]


def cue_differences(old: Policy, new: Policy) -> list[CueDifference]:
    """Those gone first, each in its policy's order."""
    gone = [word for word in old.cues.words if word not in new.cues.words]
    added = [word for word in new.cues.words if word not in old.cues.words]
    return [
        *(CueDifference(word, False, _found(old, word)) for word in gone),
        *(CueDifference(word, True, _found(new, word)) for word in added),
    ]


def _found(policy: Policy, word: str) -> dict[str, float]:
    cues = policy.calibration.get("cues")
    known = cues.get(word) if isinstance(cues, dict) else None
    if not isinstance(known, dict):
        return {}
    return {key: known[key] for key in _STATISTICS if isinstance(known.get(key), int | float)}


def _flat(policy: Policy) -> dict[str, Any]:
    told = policy.model_dump(mode="json", exclude={"calibration": True, "cues": {"words"}})
    expected = policy.calibration.get("expected")
    if isinstance(expected, dict):
        told["calibration"] = {"expected": expected}
    return dict(_leaves(told, ""))


def _leaves(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner
