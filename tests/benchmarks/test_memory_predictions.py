"""Predictions of docs/memory.md are what the plan predicts now."""

from __future__ import annotations

from pathlib import Path

from memory_predictions import table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def test_the_page_has_the_present_predictions() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
