"""How tests run a command and what they see of it; budgets of memory as they write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from selfspec.placement.plan import SLOTS, Bandwidth, Memory, Plan, plan_memory


@dataclass(frozen=True)
class Ending:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


class Invoke(Protocol):
    """Runs `selfspec WORDS` with `stdin` piped in."""

    def __call__(self, *words: str, stdin: bytes = b"") -> Ending: ...


class Said(Protocol):
    """Runs a command that succeeds, and returns what it says as JSON."""

    def __call__(self, *words: str, stdin: bytes = b"") -> dict[str, Any]: ...


def tight_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every budget be one that all layers but one are streamed within."""

    def tight(
        memory: Memory, budget: int, bandwidth: Bandwidth, formats: Sequence[str], beside: str | None = None
    ) -> Plan:
        rounded = sum(memory.substitutes["int8"][1:])
        enough = memory.least + memory.layers[0] + rounded + SLOTS * memory.largest
        return plan_memory(memory, enough, bandwidth, formats, beside)

    monkeypatch.setattr("selfspec.placement.place.plan_memory", tight)
