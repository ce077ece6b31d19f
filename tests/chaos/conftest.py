"""Fixtures of the chaos tests: the gateway's own stage."""

from tests.gateway.conftest import _no_settings_from_outside, stage

__all__ = ["_no_settings_from_outside", "stage"]
