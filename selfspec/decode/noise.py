"""Counter-based noise: each random number is a hash of its use, independent of earlier draws.

A row's numbers depend on seed, row, its round, purpose and place in the round: other rows do not change them, and
rounds never share them. Noise of coupled drafts depends on seed, row, position and token: draft and target share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfspec.device import to_device

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number: the increment of splitmix64
# A counter holds, from the lowest bits up, the place, the purpose and the round.
_PLACE_BITS, _PURPOSE_BITS = 24, 3
# Places and rounds that are hashed at once, with a limit on the numbers of all rounds: hashing a few numbers takes as
# long as hashing one.
_PLACES_AT_ONCE, _ROUNDS_AT_ONCE, _NUMBERS_AT_ONCE = 8, 8, 2048
# From this vocabulary on, a block of tokens is drawn first and then a token of the block.
_LARGE, _BLOCK = 8192, 256
_Bits = TypeVar("_Bits", Tensor, NDArray[np.int64])


class Purpose(IntEnum):
    """The purpose of a random number."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2


class Noise:
    """The noise of the rows that passes run, by a `seed` of 64 bits, signed, and the number of each row."""

    # Of this round, `[purposes, rows, places]`: what was hashed, and the same as numbers; and both of the next rounds.
    _bits: NDArray[np.int64]
    _numbers: Sequence[Tensor]
    _ahead: list[tuple[NDArray[np.int64], Tensor]]

    def __init__(self, seed: int, rows: Sequence[int], device: torch.device) -> None:
        key = _mixed(np.array([seed]))
        self._keys: NDArray[np.int64] = _mixed(key + _GOLDEN * (np.array(rows, dtype=np.int64) + 1))
        self._rounds: NDArray[np.int64] = np.zeros(len(rows), dtype=np.int64)
        self._device = device
        self._on_host = device.type == "cpu"
        self._generator = torch.Generator(device)  # on a GPU it hashes seed and counter
        self._forget()

    def begin_round(self) -> None:
        """Advance each row to its next round, even if the last round committed nothing."""
        # A new array: parts of this noise share the old one.
        self._rounds = self._rounds + 1
        if self._ahead:
            self._bits, numbers = self._ahead.pop()
            self._numbers = numbers.unbind()
        else:
            self._forget()

    def narrowed(self, kept: Sequence[int]) -> Noise:
        """Return the noise of the rows at these indices, each with its own key."""
        return self._of_rows(self._keys[list(kept)], self._rounds[list(kept)])

    def joined(self, other: Noise) -> Noise:
        """Return the noise of these rows followed by another's, each with its own key and round."""
        keys, rounds = (self._keys, other._keys), (self._rounds, other._rounds)
        return self._of_rows(np.concatenate(keys), np.concatenate(rounds))

    def _of_rows(self, keys: NDArray[np.int64], rounds: NDArray[np.int64]) -> Noise:
        noise = copy(self)
        noise._keys, noise._rounds = keys, rounds
        noise._forget()
        return noise

    def _forget(self) -> None:
        """Hash anew what the round asks for."""
        self._bits = np.empty((0, 0, 0), dtype=np.int64)
        self._numbers, self._ahead = (), []

    def _hash(self, places: int) -> None:
        """Hash at least as many places of the round, for every purpose and at once with the next rounds."""
        if self._bits.shape[-1] >= places:
            return
        places, purposes = max(_PLACES_AT_ONCE, places), 2 * len(Purpose)
        count = max(1, min(_ROUNDS_AT_ONCE, _NUMBERS_AT_ONCE // (len(self._keys) * places * purposes)))
        rounds = np.arange(count)[:, None, None, None] + self._rounds[:, None]
        counters = (((rounds << _PURPOSE_BITS) + np.arange(purposes)[:, None, None]) << _PLACE_BITS) + np.arange(places)
        bits = _mixed(self._keys[:, None] + _GOLDEN * (counters + 1))
        numbers = to_device(torch.from_numpy(_shifted(bits, 12) * 2.0**-52), self._device)
        self._ahead = [*zip(bits, numbers, strict=True)][::-1]
        self._bits, now = self._ahead.pop()
        self._numbers = now.unbind()

    def uniform(self, purpose: int, first: int, count: int) -> Tensor:
        """Return uniform numbers in [0, 1), multiples of 2^-52, `[rows, count]`, float64: float32 would round up to 1.

        `purpose` is a `Purpose`, plus `len(Purpose)` for a place's second number; `first` is the round's first place.
        """
        self._hash(first + count)
        return self._numbers[purpose].narrow(1, first, count)

    def lots(self, purpose: Purpose, first: int, count: int, vocabulary: int) -> tuple[Tensor, ...]:
        """Return the numbers by which `drawn` draws the tokens of some places, without waiting for the device.

        They are uniform, `[rows, count]`, on a CPU, two per token if the vocabulary is large, and exponential, `[rows,
        count, vocab]`, on a device.
        """
        # On a CPU a logarithm of each entry takes longer than all passes over a small model's head; on a GPU cumulative
        # sums would be the slow part, and not reproducible.
        if not self._on_host:
            return (self.race(purpose, first, torch.empty(len(self._keys), count, vocabulary, device=self._device)),)
        each = (purpose,) if vocabulary <= _LARGE else (purpose, purpose + len(Purpose))
        return tuple(self.uniform(number, first, count) for number in each)

    def race(self, purpose: Purpose, first: int, lots: Tensor) -> Tensor:
        """Fill a tensor of a device with the lots of some places, `[rows, places, vocab]`, and return it."""
        last = first + lots.shape[1]
        self._hash(last)
        return race_noise(lots, self._bits[purpose, :, first:last], self._generator)

    def choose(self, weights: Tensor, positions: Tensor) -> Tensor:
        """Choose the token of each place of the text, `[rows, places]`, by noise that every round shares.

        A choice from p is distributed as p; choices from p and q agree nearly as often as their overlap allows, by an
        exponential race (Gumbel-max): drafter-invariant speculation, Daliri et al. (2024, arXiv 2408.07978).
        `positions` are those of the tokens, `[rows or 1, places]`.
        """
        return (weights.double() / self.exponentials(positions, weights.shape[-1])).argmax(-1)

    def exponentials(self, positions: Tensor, vocabulary: int) -> Tensor:
        """Return the noise of `choose`: independent unit exponentials, `[rows, places, vocab]`, float64."""
        keys = to_device(torch.from_numpy(self._keys), self._device)
        key = _mixed(keys[:, None] + _GOLDEN * (positions + 1))
        tokens = torch.arange(1, vocabulary + 1, device=self._device)
        bits = _mixed(key[..., None] + _GOLDEN * tokens)
        # The upper 53 bits make a double in (0, 1).
        uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
        return -uniform.log()


def drawn(weights: Tensor, lots: Sequence[Tensor]) -> Tensor:
    """Draw a token from each distribution, `[rows, places]`, by what `Noise.lots` returns.

    `weights`, `[rows, places, vocab]`, need not sum to 1; a token is arbitrary if all are 0 or one is not finite.
    """
    if lots[0].dim() == weights.dim():
        return drawn_by_race(weights, *lots)
    return drawn_by_inversion(weights, *lots) if len(lots) == 1 else drawn_by_blocks(weights, *lots)


def drawn_by_inversion(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens, `[rows, places]`, by looking uniform float64 numbers up in cumulative sums of weights."""
    # As doubles, sums round a probability by less than the 2^-24 of a float32 p.
    sums = weights.cumsum(-1, dtype=torch.float64)
    # No number is above 1 - 2^-52, so its share of the total stays below the total after rounding, and only tokens that
    # add to the sum are found.
    found = torch.searchsorted(sums, uniform[..., None] * sums[..., -1:], right=True)[..., 0]
    return found.clamp_(max=weights.shape[-1] - 1)


def drawn_by_blocks(weights: Tensor, uniform: Tensor, second: Tensor) -> Tensor:
    """Draw a block by the first numbers and a token of it by the second: cheaper for a large vocabulary."""
    vocab = weights.shape[-1]
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    block = drawn_by_inversion(blocks.sum(-1), uniform)
    chosen = torch.take_along_dim(blocks, block[..., None, None], -2)[..., 0, :]
    token = drawn_by_inversion(chosen, second)
    return torch.add(token, block, alpha=_BLOCK).clamp_(max=vocab - 1)


def race_noise(noise: Tensor, seeds: NDArray[np.int64], generator: torch.Generator) -> Tensor:
    """Fill a tensor, `[rows, places, vocab]`, with unit exponentials by seeds, `[rows, places]`, and return it."""
    for place, seed in zip(noise.flatten(0, 1), seeds.flatten().tolist(), strict=True):
        place.exponential_(generator=generator.manual_seed(seed))
    return noise


def drawn_by_race(weights: Tensor, noise: Tensor) -> Tensor:
    """Draw tokens, `[rows, places]`: w_i / e_i, e_i unit exponentials, is largest at i in proportion to w_i."""
    # exponential_ may return 0, and 0 / 0 would win the race as NaN.
    return (weights / noise.clamp_min(torch.finfo(noise.dtype).tiny)).argmax(-1)


def _mixed(bits: _Bits) -> _Bits:
    """Apply the output function of splitmix64 (Steele, Lea and Flood, 2014) to 64-bit numbers; int64 products wrap."""
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: _Bits, count: int) -> _Bits:
    # >> repeats the sign bit; a shift of unsigned numbers brings zeros.
    return (bits >> count) & ((1 << (64 - count)) - 1)
