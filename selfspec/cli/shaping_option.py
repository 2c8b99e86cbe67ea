"""What the text may say and where it ends, as the command line says it: penalties, repetitions, stop strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.errors import UnsupportedOptionError


@dataclass(frozen=True)
class ShapingChoice:
    """Penalties and stop strings.

    Attributes:
        repetition_penalty: above 1 makes tokens that stand in the text less likely; 1: none.
        no_repeat_ngram_size: runs of so many tokens come once only; 0: any number of times.
        stop: the text ends after any of these.
    """

    repetition_penalty: float
    no_repeat_ngram_size: int
    stop: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {**asdict(self), "stop": list(self.stop)}

    def generation_options(self) -> dict[str, Any]:
        """Keywords of `generate`."""
        return {
            "repetition_penalty": self.repetition_penalty,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "stop_strings": list(self.stop) or None,
        }


def read_shaping(repetition_penalty: float, no_repeat_ngram_size: int, stop: Sequence[str] | None) -> ShapingChoice:
    """Check what was asked for.

    Raises:
        UnsupportedOptionError: a value out of range, or an empty stop string.
    """
    if not (math.isfinite(repetition_penalty) and repetition_penalty > 0):
        raise UnsupportedOptionError(f"--repetition-penalty must be above 0 (1: none), got {repetition_penalty}")
    if no_repeat_ngram_size < 0:
        raise UnsupportedOptionError(f"--no-repeat-ngram-size must be 0 (none) or more, got {no_repeat_ngram_size}")
    if "" in (stop or ()):
        raise UnsupportedOptionError("--stop must not be empty")
    return ShapingChoice(repetition_penalty, no_repeat_ngram_size, tuple(stop or ()))
