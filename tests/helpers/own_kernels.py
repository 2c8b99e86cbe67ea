"""The CPU kernels in tests: none but where a test asks for them, so that tests give the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from selfspec.kernels import native


@contextmanager
def kernels(variant: str | None) -> Iterator[None]:
    """Run the kernels of a variant, or none; None: the best that run here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.CHOICE, variant or "")
        native.library.cache_clear()
        yield
    native.library.cache_clear()
