"""The gateway's stage, for the cases that need sockets."""

from tests.gateway.conftest import _no_settings_from_outside, stage

__all__ = ["_no_settings_from_outside", "stage"]
