"""Predictions of docs/memory.md are what the plan predicts now."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_predictions import MACHINES, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_page_has_the_present_predictions(machine: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert machine in " ".join(page.split())
    assert table(MACHINES[machine]) in page
