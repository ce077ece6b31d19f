"""Hypothesis profiles: HYPOTHESIS_PROFILE=thorough looks longer, `ci` is the same on every run."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("dev", deadline=None, max_examples=40)
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
