"""How to sample, as the command line says it, checked and handed to `generate` with nothing left to defaults."""

from __future__ import annotations

import math
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.errors import UnsupportedOptionError


@dataclass(frozen=True)
class SamplingChoice:
    """Temperature and filters.

    Attributes:
        temperature: 0 decodes greedily.
        top_k: sample from the k likeliest tokens; None: from all.
        top_p: sample from the likeliest tokens that make up this probability; None: from all.
        min_p: sample from tokens at least this likely in relation to the likeliest; None: from all.
        seed: of the draws; None where decoding is greedy.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return asdict(self)

    def generation_options(self) -> dict[str, Any]:
        """Keywords of `generate`. Every filter is named, because `transformers` has a top-k of 50 by default."""
        if self.greedy:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "min_p": self.min_p,
        }


def read_sampling(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, seed: int | None
) -> SamplingChoice:
    """Check what was asked for. Sampling without a seed is given a fresh one, so that it can be repeated.

    Raises:
        UnsupportedOptionError: a value out of range, or a filter where nothing is sampled.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UnsupportedOptionError(f"--temperature must be 0 (greedy) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UnsupportedOptionError(f"--top-k must be at least 1, got {top_k}; drop it to sample from all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise UnsupportedOptionError(f"--top-p must be above 0 and at most 1, got {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise UnsupportedOptionError(f"--min-p must be from 0 to 1, got {min_p}")
    if seed is not None and not 0 <= seed < 2**63:
        raise UnsupportedOptionError(f"--seed must be from 0 to 2**63 - 1, got {seed}")
    filters = [
        name for name, value in (("--top-k", top_k), ("--top-p", top_p), ("--min-p", min_p)) if value is not None
    ]
    if temperature == 0 and filters:
        raise UnsupportedOptionError(
            f"{filters[0]} has no effect on greedy decoding; add --temperature 1 to sample, or drop it"
        )
    if temperature == 0:
        return SamplingChoice(0.0, None, None, None, None)
    return SamplingChoice(temperature, top_k, top_p, min_p, secrets.randbits(63) if seed is None else seed)
