"""How much a calibration measures."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.errors import DraftConfigError


@dataclass(frozen=True)
class Settings:
    """How much is measured, and at which temperature.

    Attributes:
        max_new_tokens: tokens of each text.
        temperature: of sampling, above 0.
        repeats: times that each arm goes through the prompts, timed, at most; slow ones drop out before.
        batch: rows that are generated at once.
        longest_draft: the most tokens of a draft.
        seed: of what is sampled.
    """

    max_new_tokens: int = 48
    temperature: float = 0.8
    repeats: int = 3
    batch: int = 1
    longest_draft: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "batch", "longest_draft"):
            if getattr(self, name) < 1:
                raise DraftConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.temperature < math.inf:
            raise DraftConfigError(f"a temperature to sample at is above 0, got {self.temperature}")

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
