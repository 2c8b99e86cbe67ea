"""Servers for the tests that change nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.http_server import Running, running
from helpers.tokenizers import BARE


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="session")
def bare() -> Iterator[Running]:
    with running(template=BARE) as found:
        yield found
