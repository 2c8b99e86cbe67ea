"""Noise that belongs to a place and not to a draw: the same for draft and target, and for plain decoding too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number: the increment of splitmix64


class Coupling:
    """Chooses the token of a place (row, position) from any distribution with the noise of that place.

    The noise is counter-based: a hash of seed, row, position and token, so it does not depend on what was drawn
    before. From p at a place the choice is distributed as p; from p and q at the same place it is the same token as
    often as the noise of the exponential race (Gumbel-max) allows, which is close to how alike they are. Daliri et al.
    (2024, arXiv 2408.07978) call this drafter-invariant speculation.

    Args:
        seed: of the generation.
        rows: numbers of the rows that are chosen for; None: 0, 1, 2 and so on.
    """

    def __init__(self, seed: int, rows: Sequence[int] | None = None) -> None:
        self._seed = seed
        self._rows = rows

    def narrowed(self, rows: Sequence[int]) -> Coupling:
        """The same noise for the rows of these numbers."""
        return Coupling(self._seed, rows)

    def choose(self, weights: Tensor, positions: Tensor) -> Tensor:
        """The token of each place.

        Args:
            weights: `[batch, tokens, vocab]`, non-negative; they need not be normalised.
            positions: of the tokens to choose, `[batch or 1, tokens]`.

        Returns:
            `[batch, tokens]`.
        """
        batch, _, vocab = weights.shape
        key = _mixed(torch.full((batch, 1), self._seed, device=weights.device))
        rows = torch.tensor(range(batch) if self._rows is None else self._rows, device=weights.device)
        key = _mixed(key + _GOLDEN * (rows + 1)[:, None])
        key = _mixed(key + _GOLDEN * (positions + 1))
        bits = _mixed(key[..., None] + _GOLDEN * torch.arange(1, vocab + 1, device=weights.device))
        # The upper 53 bits make a double in (0, 1).
        uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
        return (weights.double() / -uniform.log()).argmax(-1)


def _mixed(bits: Tensor) -> Tensor:
    """The output function of splitmix64 (Steele, Lea and Flood, 2014) on 64-bit numbers; int64 products wrap."""
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    # >> repeats the sign bit; a shift of unsigned numbers brings zeros.
    return (bits >> count) & ((1 << (64 - count)) - 1)
