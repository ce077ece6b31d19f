"""The bundled files are found where the package has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.demo import paths
from relaygen.policy import load_policy


@pytest.mark.parametrize("role", ["large", "small"])
def test_both_models_are_bundled(role: paths.PairRole) -> None:
    assert paths.bundled_model(role).read_bytes()[:4] == b"GGUF"


def test_the_pairs_policy_is_valid_and_bears_its_name() -> None:
    file = paths.bundled_policy("tiny-pair")
    policy = load_policy(file.read_text(encoding="utf-8"), str(file))
    assert (policy.name, policy.large.model, policy.small.model) == (
        "tiny-pair", "tiny-large", "tiny-small",
    )  # fmt: skip


def test_a_wheels_policies_lie_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gateway" / "policies").mkdir(parents=True)
    file = tmp_path / "gateway" / "policies" / "x.yaml"
    file.touch()
    monkeypatch.setattr(paths, "_DEMO", tmp_path / "gateway" / "demo")
    assert paths.bundled_policy("x") == file


def test_a_missing_policy_is_named_with_the_places_looked_in() -> None:
    with pytest.raises(FileNotFoundError, match=r"no policy 'nope': looked for .*nope.yaml"):
        paths.bundled_policy("nope")
