from tests.gateway.conftest import stage

__all__ = ["stage"]
