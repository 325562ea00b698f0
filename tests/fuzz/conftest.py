"""Live servers, as the tests of the server have them."""

from tests.server.conftest import start_server

__all__ = ["start_server"]
