"""The state of one generation, which every step of the loop reads and the commit moves on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.cache import SharedCache
from selfspec.passes import Passes
from selfspec.sampling import Sampling


@dataclass
class State:
    """One generation under way.

    Attributes:
        passes: runs the model over the cache.
        cache: keys and values of all committed tokens but each row's last, which no pass has read yet.
        sampling: logits to probabilities, the same for p and q.
        generator: the one source of randomness.
        last: the last committed token of each row, `[batch, 1]`.
        committed: the new tokens of each row, final.
        live: whether each row goes on.
        doubted: rows whose logits were not finite in the last round, behind a draft. A draft token's keys and values
            may have done that, so they get a round without a draft before they are given up.
        failed: rows that ended because the target's logits were not finite.
    """

    passes: Passes
    cache: SharedCache
    sampling: Sampling
    generator: torch.Generator
    last: Tensor
    committed: list[list[int]]
    live: list[bool]
    doubted: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """The largest committed length of any row, prompt included."""
        return max(self.cache.lengths) + 1
