"""Views of the cache: a pass attends to all of it, to a part, or to copies in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from selfspec.cache.shared_layer import SharedLayer
from selfspec.device import to_device
from selfspec.kernels import native


@dataclass(frozen=True)
class Window:
    """Limits attention to the latest positions of a text, the token's own included, and the first ones, the sinks.

    Without the first few a model fails (StreamingLLM; Xiao et al., 2024, arXiv 2309.17453).
    """

    recent: int
    sinks: int


@dataclass(frozen=True)
class CacheView:
    """Says what the tokens of a pass attend to: all, a window, or the `top_keys` that the target attended to most.

    Committed tokens may be read from copies in `bits`. The target always attends to all of the exact cache.
    """

    window: Window | None = None
    top_keys: int | None = None
    bits: CacheBits | None = None


WHOLE = CacheView()
"""All of the exact cache."""


@dataclass(frozen=True)
class Seen:
    """Holds a view, and the tensors that say what the tokens of one pass attend to through it."""

    view: CacheView = WHOLE
    top: Tensor | None = None  # slots that rows see, as from `TopSlots.seen`; None: all
    copied: Tensor | None = None  # how many first slots of each row are read from copies, `[batch]`; None: none
    copies: tuple[Tensor, ...] = ()  # levels and factors of each layer's keys and values, see `through_copy`

    @property
    def places(self) -> tuple[Tensor, ...]:
        """The tensors that change with every pass."""
        return tuple(each for each in (self.copied, self.top) if each is not None)

    def keys_and_values(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as the pass reads them."""
        if self.view.bits is None or self.copied is None:
            return keys, values
        read = [(keys, *self.copies[4 * layer : 4 * layer + 2]), (values, *self.copies[4 * layer + 2 : 4 * layer + 4])]
        of_keys, of_values = (through_copy(*each, self.copied, self.view.bits) for each in read)
        return of_keys, of_values


EVERYTHING = Seen()


CHUNK = 32
"""Number of neighbouring slots that are chosen together: they are one passage of the text."""

EVERY = 64
"""Tokens that a row may grow by before its slots are chosen anew."""


class TopSlots:
    """Chooses the chunks of each row's slots that got most of the target's attention; its latest slots are always seen.

    A row sees all of its slots until it has more than `keys`, at least `4 * CHUNK`. Then a quarter of `keys` are its
    latest slots, the rest whole chunks; it also sees tokens added later. Rows do not depend on each other.
    """

    def __init__(self, rows: int, keys: int, device: torch.device) -> None:
        self.keys = keys
        self._latest = keys // 4
        self._chunks = (keys - self._latest) // CHUNK
        # Number of tokens of each row when it last chose.
        self._chosen_at: list[int | None] = [None] * rows
        self._seen = torch.zeros(rows, 2, dtype=torch.long, device=device)

    def due(self, seq_lens: Sequence[int]) -> list[int]:
        """Return the rows that must choose, given the number of tokens of each row."""
        return [
            row
            for row, (length, before) in enumerate(zip(seq_lens, self._chosen_at, strict=True))
            if length > self.keys and (before is None or length >= before + EVERY)
        ]

    def choose(self, shares: Tensor, seq_lens: Sequence[int], rows: Sequence[int]) -> None:
        """Choose the slots of rows that have more than `keys` tokens, by the target's attention, `[rows, slots]`."""
        since = [(seq_lens[row] - self._latest) // CHUNK * CHUNK for row in rows]
        device, chosen = self._seen.device, to_device(list(rows), self._seen.device)
        ends = to_device(since, device)
        width = max(since)
        slots = torch.arange(width, device=device)
        before = torch.where(slots < ends[:, None], shares[chosen, :width].float(), -1.0)
        weights = before.unflatten(1, (-1, CHUNK)).sum(-1)
        top = weights.topk(self._chunks, dim=1).indices.sort(dim=1).values
        ranks = torch.full_like(weights, -1, dtype=torch.long)
        ranks.scatter_(1, top, torch.arange(self._chunks, device=device).expand_as(top))
        counts = torch.full_like(ends, self._chunks)
        self._widen(weights.shape[1])
        self._seen[chosen, 2:] = -1
        self._seen[chosen, : 2 + weights.shape[1]] = torch.cat([torch.stack([ends, counts], 1), ranks], 1)
        for row in rows:
            self._chosen_at[row] = seq_lens[row]

    def narrow(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given."""
        self._chosen_at = [self._chosen_at[row] for row in rows]
        self._seen = self._seen[to_device(list(rows), self._seen.device)]

    def join(self, rows: int) -> None:
        """Append rows that have chosen nothing yet."""
        self._chosen_at += [None] * rows
        self._seen = torch.cat([self._seen, self._seen.new_zeros(rows, self._seen.shape[1])])

    def seen(self, capacity: int) -> Tensor:
        """Return the slots that rows with `capacity` slots see, `[rows, 2 + chunks]`, int64.

        Columns: first slot from which on all is seen; number of chunks seen before it; rank of each chunk, or -1 if
        unseen.
        """
        self._widen(-(-capacity // CHUNK))
        return self._seen

    def _widen(self, chunks: int) -> None:
        rows, width = self._seen.shape
        if width < 2 + chunks:
            self._seen = torch.cat([self._seen, self._seen.new_full((rows, 2 + chunks - width), -1)], 1)


def sees(seen: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Return whether rows see slots, given `TopSlots.seen`; numbers of rows and slots broadcast."""
    chunk = key.div(CHUNK, rounding_mode="floor")
    return (key >= seen[row, 0]) | (seen[row, 2 + chunk] >= 0)


CacheBits = Literal[8, 4]

GROUP_SIZE = 64
"""Numbers of a key or a value that share a scale; all of them do if its size is no multiple of this."""

_SMALLEST = torch.finfo(torch.float32).tiny


class RoundedCopy:
    """Keeps a copy of a cache's keys and values in 8 or 4 bits (QuantSpec; Tiwari et al., 2025, arXiv 2502.10424).

    Each group of a key or value has levels, a scale and the value of level 0. The copy holds the committed tokens;
    tokens of the open block are read exactly. The target never reads the copy.
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
        """Drop the contents: rows have changed their places or their texts."""
        self._lengths = []

    def follow(self, seq_lens: Sequence[int], capacity: int) -> None:
        """Copy tokens committed since the last call, and allocate as many slots as the cache has."""
        if self._lengths == list(seq_lens) and self._capacity == capacity:
            return
        self._capacity = capacity
        # Layers that read the keys of other layers have no slots.
        self._layers = [layer for layer in self._all_layers if layer.parts]
        exact = list(chain.from_iterable(layer.grown() for layer in self._layers))
        if [part.shape for part in self._parts[::2]] != [_shape_of(slots, self._bits) for slots in exact]:
            # Free the old copy before the new one is made.
            self._lengths, self._parts = [], []
            self._parts = [part for slots in exact for part in _empty_like(slots, self._bits)]
        begins, ends = self._lengths or [0] * len(seq_lens), list(seq_lens)
        if self._lengths != ends and exact:
            if begins != ends:
                _round_slots(exact, self._parts, begins, ends, self._bits)
            self._lengths, self._held = ends, to_device(ends, exact[0].device)

    @property
    def tensors(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Number of first tokens held for each row, and levels and factors of each layer's keys and values."""
        return self._held, tuple(self._parts)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let passes within this context see the copy."""
        seen = Seen(CacheView(bits=self._bits), None, *self.tensors)
        for number, layer in enumerate(self._layers):
            layer.seen_through = partial(seen.keys_and_values, number)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.seen_through = None


@torch.library.custom_op("selfspec::through_copy", mutates_args=())
def through_copy(exact: Tensor, levels: Tensor, factors: Tensor, lengths: Tensor, bits: int) -> Tensor:
    """Return slots as a draft sees them: the first `lengths` of each row from the copy, all later ones exact.

    Shapes: `exact`, keys or values, `[rows, heads, visible, size]`; `levels` `[rows, heads, slots, bytes]`; `factors`,
    each group's scale and value of level 0, `[rows, heads, 2 * groups, slots]`; `lengths` `[rows]`.
    """
    visible = exact.shape[2]
    groups = levels[:, :, :visible].unflatten(-1, (factors.shape[-2] // 2, -1))
    if bits == 4:
        groups = torch.cat([groups & 15, groups >> 4], -1)
    scales, lowest = factors[..., :visible].transpose(-1, -2).unflatten(-1, (-1, 2)).unsqueeze(-1).unbind(-2)
    read = (groups * scales + lowest).flatten(-2)
    copied = torch.arange(visible, device=exact.device) < lengths[:, None]
    return torch.where(copied[:, None, :, None], read.to(exact.dtype), exact)


@through_copy.register_fake
def _(exact: Tensor, *_: object) -> Tensor:
    return torch.empty_like(exact)


def copied_bytes(numbers: int, size: int, bits: int) -> int:
    """Return the bytes of a copy of `numbers` numbers in all, in keys and values of `size` numbers each."""
    return numbers * bits // 8 + 2 * torch.float32.itemsize * numbers // group_size(size)


def group_size(size: int) -> int:
    """Return how many numbers share a scale in a key or value of `size` numbers."""
    return GROUP_SIZE if size % GROUP_SIZE == 0 else size


def rounded(exact: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round `[..., slots, size]` to levels, `[..., slots, bytes]`, and factors, `[..., 2 * groups, slots]`.

    In 4 bits, the lower half of a byte holds a number of a group's first half, the upper half one of its second.
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
    """Round each row's slots from `begins` up to, but not including, `ends`."""
    if exact[0].device.type == "cpu" and exact[0].dtype in native.IN_FLOAT32 and native.available():
        some = torch.tensor(begins), torch.tensor(ends)
        for slots, levels, factors in zip(exact, parts[::2], parts[1::2], strict=True):
            native.round_slots(slots, levels, factors, *some)
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
