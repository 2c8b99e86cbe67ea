"""The device of these tests, which no machine has: see `helpers/accelerator/device.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.accelerator.device import Accelerator, present


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with present() as found:
        yield found
