"""Real engines for the tests: started on free loopback ports, ended surely."""

from __future__ import annotations

from pathlib import Path

import pytest

_SEAM_POLICY = """\
version: 1
name: seam
large: {backend: large, model: tiny-large}
small: {backend: small, model: tiny-large}
sampling: {temperature: 0}
cues: {words: [Now, So, Thus, Hence, Therefore]}
slow: {hold: false}
"""


@pytest.fixture
def seam_policy(tmp_path: Path) -> Path:
    """One model in both roles, with cues that the tiny model says in every reply."""
    path = tmp_path / "seam.yaml"
    path.write_text(_SEAM_POLICY)
    return path
