"""Records made by hand, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.decode.stats import Stats
from selfspec.tools.bench.arms import ArmKind, ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.record import Record, Setup

CELL = Cell("code", 0.0, 1, 8, 16)
SETTINGS = Setup("tiny", 1000, "float64", "cpu", 1, 2, 2, "abc")
ENVIRONMENT = {
    "selfspec": "0",
    "torch": "0",
    "transformers": "0",
    "python": "0",
    "commit": None,
    "processor": "p",
    "device": "cpu",
}


def record(kind: ArmKind, seconds: Sequence[Sequence[float]], draft: str | None = None, **fields: Any) -> Record:
    """An arm that made 16 tokens in each call, one of them in the first tenth of a second."""
    shape = [[0] * len(repeat) for repeat in seconds]
    given: dict[str, Any] = {
        "first_seconds": [[0.1 for _ in repeat] for repeat in shape],
        "tokens": [[16 for _ in repeat] for repeat in shape],
        "first_tokens": [[1 for _ in repeat] for repeat in shape],
        "passes": [[16 for _ in repeat] for repeat in shape],
        "cycle_share": [[0.0 for _ in repeat] for repeat in shape],
    }
    return Record(
        "run", CELL, SETTINGS, ArmSpec(kind, draft), ENVIRONMENT, seconds=[*map(list, seconds)], **given | fields
    )


def plain(seconds: Sequence[Sequence[float]]) -> Record:
    """Selfspec's plain decoding, which spent all but a tenth of a second of each call in rounds."""
    calls = sum(map(len, seconds))
    counts = Stats(16 * calls, 16 * calls, 16 * calls, seconds={"prefill": 0.1 * calls, "verify": 1.0})
    return record("plain", seconds, counts=counts)
