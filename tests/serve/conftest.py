"""One server for the tests that change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.http_server import Running, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """Serves the stories."""
    with running() as found:
        yield found
