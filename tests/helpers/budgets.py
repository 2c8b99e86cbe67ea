"""Budgets that a model of the tests does not fit, though the process of the tests takes more than the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from selfspec.placement.plan import SLOTS, Bandwidth, Memory, Plan, plan_memory


def tight_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every budget be one that all layers but one are streamed within."""

    def tight(
        memory: Memory, budget: int, bandwidth: Bandwidth, formats: Sequence[str], beside: str | None = None
    ) -> Plan:
        rounded = sum(memory.substitutes["int8"][1:])
        enough = memory.least + memory.layers[0] + rounded + SLOTS * memory.largest
        return plan_memory(memory, enough, bandwidth, formats, beside)

    monkeypatch.setattr("selfspec.placement.place.plan_memory", tight)
