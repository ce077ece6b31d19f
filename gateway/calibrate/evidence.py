"""From scored traces to what is written: the cues, what they bring, and where they come from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.calibrate.by_reference import found_by_reference
from gateway.calibrate.policy_file import PolicyWords
from gateway.calibrate.selecting import (
    Files,
    Found,
    OnProgress,
    scored_traces,
    select_cues,
)
from relaygen.calibration.projection import Speeds, roles
from relaygen.calibration.selection import Choice
from relaygen.calibration.traces import Scored
from relaygen.policy import Policy

_EXAMPLES = 2


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is to be concluded. `meta` is the work folder's; `by_reference`: with its statistics."""

    name: str
    choice: Choice
    by_reference: bool
    scorer: str
    date: str
    meta: Mapping[str, Any]

    @property
    def large_model(self) -> str:
        return str(self.meta.get("large", {}).get("model", "large"))

    @property
    def small_model(self) -> str:
        return str(self.meta.get("small", {}).get("model", "small"))

    @property
    def sampling(self) -> dict[str, Any]:
        traced = self.meta.get("traces", {})
        return {"temperature": traced.get("temperature", 0.6), **traced.get("sampling", {})}

    @property
    def speeds(self) -> Speeds:
        """NaN where nothing was measured."""
        told = self.meta.get("speeds") or {}
        return Speeds(
            large_ms=told.get("large_ms") or math.nan,
            small_ms=told.get("small_ms") or math.nan,
            handoff_ms=told.get("handoff_ms") or 0.0,
        )

    def policy(self, words: tuple[str, ...] = ()) -> Policy:
        return Policy.model_validate(
            {
                "version": 1,
                "name": self.name,
                "large": {"backend": "large", "model": self.large_model},
                "small": {"backend": "small", "model": self.small_model},
                "sampling": self.sampling,
                "cues": {
                    "match": "substring" if self.by_reference else "word",
                    "words": words,
                },
                "boundary": {"match": "substring" if self.by_reference else "sentence"},
            }
        )


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What came of it."""

    plan: Calibration
    found: Found
    examples: tuple[Scored, ...]

    @property
    def notes(self) -> list[str]:
        notes = [f"{line}; left out" for line in self.found.skipped]
        if not self.plan.meta.get("speeds"):
            notes.append("no speeds were measured: no speed-up can be expected; give --small too")
        return notes

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(cue.cue for cue in self.found.selection.chosen)

    @property
    def words(self) -> PolicyWords:
        plan = self.plan
        return PolicyWords(
            name=plan.name,
            large_model=plan.large_model,
            small_model=plan.small_model,
            sampling=plan.sampling,
            words=self.chosen,
            match="substring" if plan.by_reference else "word",
            calibration=self._record(),
        )

    def _record(self) -> dict[str, Any]:
        """The policy's `calibration`: provenance, and each candidate's numbers."""
        selection, plan = self.found.selection, self.plan
        traced = plan.meta.get("traces", {})
        _, expected = self.found.prefixes[-1]
        return {
            "date": plan.date,
            "large": _engine(plan.meta.get("large", {})),
            "small": _engine(plan.meta.get("small", {})),
            "prompts": {key: traced.get(key) for key in ("prompts", "sha256", "questions")},
            "samples": traced.get("samples"),
            "traces": selection.traces,
            "tokens": selection.tokens,
            "scorer": plan.scorer,
            "rule": self.rule,
            "overall": _round(selection.overall),
            "expected": {
                "small_share": _round(1 - expected.large_share),
                "clean_traces": _round(expected.quality),
                "handoffs": _round(expected.handoffs / max(1, expected.traces)),
                "speed_up": _round(expected.speed_up(plan.speeds)),
                "break_even_ms": _round(expected.break_even_ms(plan.speeds)),
            },
            "words": list(self.chosen),
            "cues": {
                cue.cue: {
                    "chosen": cue.chosen,
                    "count": cue.count,
                    "traces": cue.traces,
                    "mean": _round(cue.compared.mean),
                    "low": _round(cue.compared.low),
                    "high": _round(cue.compared.high),
                    "p": _round(cue.corrected),
                }
                for cue in selection.cues
            },
        }

    @property
    def rule(self) -> str:
        choice = self.plan.choice
        if self.plan.by_reference:
            return "reference: mean margin above the mean of all tokens"
        told = f"{choice.rule}: above the whole, p <= {choice.alpha:g} after Holm"
        if choice.rule == "success":
            told += (
                f", at least {choice.least:g}, where the large model's margin >= {choice.sure:g}"
            )
        return told

    def evidence(self, policy: str) -> Any:
        """What the report shows."""
        from gateway.calibrate.report import Evidence, Example, Prefix

        plan = self.plan
        replayed_by = plan.policy(self.chosen)
        record = self._record()
        provenance = {
            "date": plan.date,
            "large model": _said(record["large"]),
            "small model": _said(record["small"]),
            "prompts": _said(record["prompts"]),
            "samples a prompt": str(record["samples"]),
            "scorer": plan.scorer,
            "rule": self.rule,
        }
        return Evidence(
            selection=self.found.selection,
            prefixes=tuple(Prefix(cues, replayed) for cues, replayed in self.found.prefixes),
            speeds=plan.speeds,
            policy=policy,
            examples=tuple(
                Example(one, tuple(roles(replayed_by, one.trace))) for one in self.examples
            ),
            provenance=provenance,
            title=f"Calibration of {plan.name}",
        )


def calibrated(
    files: Files, plan: Calibration, on_progress: OnProgress | None = None
) -> Calibrated:
    """Reads what the earlier stages left. Raises BadLineError."""
    policy = plan.policy()
    if plan.by_reference:
        found = found_by_reference(files, policy, plan.choice)
    else:
        found = select_cues(files, plan.choice, policy, on_progress)
    with scored_traces(files) as scored:
        examples = tuple(itertools.islice(scored, _EXAMPLES))
    return Calibrated(plan, found, examples)


def _engine(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: told.get(key) for key in ("model", "engine", "version")}


def _said(told: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in told.values() if value is not None)


def _round(value: float | None) -> float | None:
    return None if value is None or value != value else round(value, 4)
