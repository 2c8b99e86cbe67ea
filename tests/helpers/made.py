"""Records made by hand, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.decode.output import Stats
from selfspec.measure.spare_cores import SpareCores
from selfspec.tools.lab.arms import ArmKind, ArmSpec, Cell
from selfspec.tools.lab.measured import MeasuredCell
from selfspec.tools.lab.record import Record, Setup

CELL = Cell("code", 0.0, 1, 8, 16)
SETTINGS = Setup("tiny", "0" * 20, "0" * 20, 1000, "float64", "cpu", 1, 2, 2, "abc")
ENVIRONMENT = {
    "selfspec": "0",
    "torch": "0",
    "transformers": "0",
    "python": "0",
    "commit": None,
    "processor": "p",
    "device": "cpu",
}


def cell_of(*arms: Record, cell: Cell = CELL, settings: Setup = SETTINGS, free: float | None = None) -> MeasuredCell:
    """A cell of some arms."""
    return MeasuredCell(cell, settings, arms, ENVIRONMENT, SpareCores(2, free))


def record(kind: ArmKind, seconds: Sequence[Sequence[float]], draft: str | None = None, **fields: Any) -> Record:
    """An arm that made 16 tokens in each call, one of them in the first tenth of a second."""

    def each(value: Any) -> list[list[Any]]:
        return [[value for _ in repeat] for repeat in seconds]

    counts = fields.get("counts")
    given: dict[str, Any] = {
        "first_seconds": each(0.1),
        "tokens": each(16),
        "first_tokens": each(1),
        "passes": each(16),
        "cycle_share": each(0.0),
        "texts": each([[*range(16)]]),
        "judged": each(counts.judged_per_depth if counts else []),
        "accepted": each(counts.accepted_per_depth if counts else []),
    }
    return Record(ArmSpec(kind, draft), seconds=[*map(list, seconds)], **given | fields)


def plain(seconds: Sequence[Sequence[float]]) -> Record:
    """Selfspec's plain decoding, which spent all but a tenth of a second of each call in rounds."""
    calls = sum(map(len, seconds))
    counts = Stats(16 * calls, 16 * calls, 16 * calls, seconds={"prefill": 0.1 * calls, "verify": 1.0})
    return record("plain", seconds, counts=counts)
