"""The policy that calibration writes: valid, and careful with what people wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.calibrate.policy_file import PolicyWords, policy_text
from gateway.settings import SettingsError
from relaygen.errors import PolicyError
from relaygen.policy import load_policy


def found(*words: str, **more: Any) -> PolicyWords:
    calibration = {"words": list(words), "rule": "success"}
    return PolicyWords("pair", "org/big", "org/tiny", {"temperature": 0.6}, words, calibration)


def written(path: Path, words: Sequence[str]) -> str:
    text = policy_text(path, found(*words))
    path.write_text(text, encoding="utf-8")
    return text


def test_a_new_file_is_a_policy_with_its_provenance(tmp_path: Path) -> None:
    policy = load_policy(written(tmp_path / "p.yaml", ["Now", "No"]), "p.yaml")
    assert policy.cues.words == ("Now", "No")
    assert (policy.name, policy.large.model, policy.small.model) == ("pair", "org/big", "org/tiny")
    assert policy.sampling == {"temperature": 0.6}
    assert policy.calibration["words"] == ["Now", "No"]


def test_a_second_run_keeps_comments_and_what_else_was_edited(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    written(path, ["Now"])
    edited = path.read_text().replace("cues:", "min_large_tokens: 9  # ours\ncues:")
    path.write_text(edited + "# the end\n")
    text = policy_text(path, found("Now", "Thus"))
    assert "min_large_tokens: 9  # ours" in text
    assert "# the end" in text
    assert load_policy(text, "p").cues.words == ("Now", "Thus")


def test_edited_words_are_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    written(path, ["Now", "Thus"])
    path.write_text(path.read_text().replace("Thus", "So", 1))
    with pytest.raises(SettingsError, match=r"\+So, -Thus.*--force"):
        policy_text(path, found("Hence"))
    assert load_policy(policy_text(path, found("Hence"), force=True), "p").cues.words == ("Hence",)


def test_cues_that_somebody_else_wrote_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    sides = "large: {backend: x, model: m}\nsmall: {backend: x, model: m}\n"
    path.write_text(f"version: 1\nname: p\n{sides}cues: {{words: [Now]}}\n")
    with pytest.raises(SettingsError, match="did not write"):
        policy_text(path, found("Hence"))


@pytest.mark.parametrize("content", ["- a list", "a: [", "text"])
def test_what_is_no_policy_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises((SettingsError, PolicyError), match=r"p\.yaml"):
        policy_text(path, found("Hence"))


def test_the_references_words_are_matched_as_it_does(tmp_path: Path) -> None:
    given = PolicyWords("p", "b", "t", {}, ["So "], {}, match="substring")
    policy = load_policy(policy_text(tmp_path / "p.yaml", given), "p")
    assert (policy.cues.match, policy.boundary.match) == ("substring", "substring")
