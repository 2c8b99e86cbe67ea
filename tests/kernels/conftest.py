"""What tests of formats share: every kind of kernels that this processor runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.snapshot import kernels
from selfspec.kernels import native


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.kernels) for each in native.variants()] + [None])
def variant(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Each test runs on every kind of kernels, and without any."""
    if request.param is None:
        yield None
        return
    with kernels(request.param):
        yield request.param
