"""What attacks on regions share with other tests of them."""

from tests.server.conftest import world

__all__ = ["world"]
