"""Tests with libraries that others wrote: the whole folder is marked `clients`, and only read where that is asked for.

So a plain run neither needs these libraries nor waits for them to be imported.
"""

from __future__ import annotations

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Pass over the folder unless `-m` asks for its mark."""
    asked: str = config.getoption("markexpr")
    return True if "clients" not in asked or "not clients" in asked else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is in the folder."""
    item.add_marker("clients")
