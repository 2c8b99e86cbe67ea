"""Keys and values of committed tokens in fewer bits, beside the exact ones: what drafts read in place of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from selfspec.cache.shared_layer import SharedLayer
from selfspec.device import to_device

CacheBits = Literal[8, 4]

GROUP_SIZE = 64
"""Numbers of a key or a value that share a scale, where its size is a multiple of it; else all of them do."""

_SMALLEST = torch.finfo(torch.float32).tiny
_DTYPES = (torch.float32, torch.bfloat16)


class RoundedCopy:
    """A copy of a cache's keys and values in 8 or 4 bits, as QuantSpec (Tiwari et al., 2025, arXiv 2502.10424) drafts.

    Each group of a key or value has levels, a scale and the number that level 0 is. The copy holds the committed tokens
    of each row; those of the open block are read exactly. Nothing of it ever goes to the target.

    Args:
        layers: of the cache, as many as have slots.
        bits: of a level.
    """

    def __init__(self, layers: Sequence[SharedLayer], bits: CacheBits) -> None:
        self._all_layers = layers
        self._layers: list[SharedLayer] = []
        self._bits = bits
        self._parts: list[Tensor] = []
        self._lengths: list[int] = []
        self._capacity = 0
        self._held = torch.tensor(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.nbytes for part in self._parts)

    def forget(self) -> None:
        """Hold nothing any more: rows have changed their places, or their texts."""
        self._lengths = []

    def follow(self, seq_lens: Sequence[int], capacity: int) -> None:
        """Copy what rows have committed since the last call, and make room as the cache has.

        Args:
            seq_lens: where rows end.
            capacity: slots of each row.
        """
        if self._lengths == list(seq_lens) and self._capacity == capacity:
            return
        self._capacity = capacity
        # Layers that read the keys of others have none.
        self._layers = [layer for layer in self._all_layers if layer.parts]
        exact = list(chain.from_iterable(layer.grown() for layer in self._layers))
        if [part.shape for part in self._parts[::2]] != [_shape_of(slots, self._bits) for slots in exact]:
            # The old one goes before the new one comes.
            self._lengths, self._parts = [], []
            self._parts = [part for slots in exact for part in _empty_like(slots, self._bits)]
        begins, ends = self._lengths or [0] * len(seq_lens), list(seq_lens)
        if self._lengths != ends and exact:
            if begins != ends:
                _round_slots(exact, self._parts, begins, ends, self._bits)
            self._lengths, self._held = ends, to_device(ends, exact[0].device)

    @property
    def tensors(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """How many of each row's first tokens it holds, and of each layer levels and factors of keys and of values."""
        return self._held, tuple(self._parts)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let passes within this context see the copy."""
        for number, layer in enumerate(self._layers):
            parts = self._parts[4 * number : 4 * number + 4]
            layer.seen_through = partial(seen_by_copies, parts=parts, lengths=self._held, bits=self._bits)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.seen_through = None


def seen_by_copies(
    keys: Tensor, values: Tensor, parts: Sequence[Tensor], lengths: Tensor, bits: CacheBits
) -> tuple[Tensor, Tensor]:
    """What a pass sees of a layer; `parts` are levels and factors of its keys and of its values."""
    of_keys, of_values = parts[:2], parts[2:]
    return through_copy(keys, *of_keys, lengths, bits), through_copy(values, *of_values, lengths, bits)


@torch.library.custom_op("selfspec::through_copy", mutates_args=())
def through_copy(exact: Tensor, levels: Tensor, factors: Tensor, lengths: Tensor, bits: int) -> Tensor:
    """Return slots as a draft sees them: the first `lengths` of each row by their copy, the others as they are.

    Args:
        exact: keys or values, `[rows, heads, visible, size]`.
        levels: of the copy, `[rows, heads, slots, bytes]`.
        factors: of the copy, `[rows, heads, 2 * groups, slots]`: of each group its scale, and what level 0 is.
        lengths: `[rows]`.
        bits: of a level.
    """
    visible = exact.shape[2]
    read = _unrounded(levels[:, :, :visible], factors[..., :visible], bits)
    copied = torch.arange(visible, device=exact.device) < lengths[:, None]
    return torch.where(copied[:, None, :, None], read.to(exact.dtype), exact)


@through_copy.register_fake
def _(exact: Tensor, *_: object) -> Tensor:
    return torch.empty_like(exact)


def copied_bytes(numbers: int, size: int, bits: int) -> int:
    """How many bytes a copy takes of so many numbers of keys and values, of `size` numbers each."""
    return numbers * bits // 8 + 2 * torch.float32.itemsize * numbers // group_size(size)


def group_size(size: int) -> int:
    """How many numbers of a key or value of so many share a scale."""
    return GROUP_SIZE if size % GROUP_SIZE == 0 else size


def rounded(exact: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round `[..., slots, size]` to levels, `[..., slots, bytes]`, and factors, `[..., 2 * groups, slots]`.

    In 4 bits a byte holds a number of the first half of a group, and in its upper bits the one of the second half.
    """
    groups = exact.float().unflatten(-1, (-1, group_size(exact.shape[-1])))
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales = ((highest - lowest) / (2**bits - 1)).clamp(min=_SMALLEST)
    levels = ((groups - lowest) / scales).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        first, second = levels.chunk(2, -1)
        levels = first | second << 4
    factors = torch.stack([scales, lowest], -2).flatten(-3)
    return levels.flatten(-2), factors.transpose(-1, -2)


def _unrounded(levels: Tensor, factors: Tensor, bits: int) -> Tensor:
    groups = levels.unflatten(-1, (factors.shape[-2] // 2, -1))
    if bits == 4:
        groups = torch.cat([groups & 15, groups >> 4], -1)
    scales, lowest = factors.transpose(-1, -2).unflatten(-1, (-1, 2)).unsqueeze(-1).unbind(-2)
    numbers: Tensor = groups * scales + lowest
    return numbers.flatten(-2)


def _shape_of(slots: Tensor, bits: int) -> torch.Size:
    return torch.Size([*slots.shape[:3], slots.shape[3] * bits // 8])


def _empty_like(slots: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    rows, heads, capacity, size = slots.shape
    groups = 2 * size // group_size(size)
    levels = torch.zeros(_shape_of(slots, bits), dtype=torch.uint8, device=slots.device)
    return levels, torch.zeros(rows, heads, groups, capacity, device=slots.device)


def _round_slots(
    exact: Sequence[Tensor], parts: Sequence[Tensor], begins: Sequence[int], ends: Sequence[int], bits: int
) -> None:
    """Round the slots of each row from `begins` on and before `ends`."""
    if exact[0].device.type == "cpu" and exact[0].dtype in _DTYPES and hasattr(torch.ops.selfspec, "round_slots"):
        torch.ops.selfspec.round_slots(list(exact), list(parts), list(begins), list(ends), bits)
        return
    alike = len(set(begins)) == len(set(ends)) == 1
    spans = (
        [(slice(None), begins[0], ends[0])]
        if alike
        else [(row, *span) for row, span in enumerate(zip(begins, ends, strict=True))]
    )
    for slots, levels, factors in zip(exact, parts[::2], parts[1::2], strict=True):
        for rows, begin, end in spans:
            levels[rows, :, begin:end], factors[rows, :, :, begin:end] = rounded(slots[rows, :, begin:end], bits)
