"""The one KV cache that draft and verification share: preallocated, a cursor per row; rolling back moves the cursor.

Every row is stored without padding: slot i holds position i. So a row's cursor alone says where its next tokens are
written, which positions they have, and what they may attend to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

_SMALLEST_ROOM = 64


class Cursors:
    """Where each row stands, and so which slots a pass writes and looks at.

    Attributes:
        lengths: cursor of each row, in slots.
        limit: the most tokens a row may come to hold, prompt included.
        capacity: slots a row has, or will have with the next pass.
        device: where slot numbers are made.
    """

    def __init__(self, batch: int, limit: int, slack: int, device: torch.device) -> None:
        self.lengths = [0] * batch
        self.limit = limit
        self.device = device
        self._slack = slack
        self._room = min(_SMALLEST_ROOM, limit)

    @property
    def capacity(self) -> int:
        """Slots a row has, or will have with the next pass."""
        return self._room + self._slack

    @property
    def uniform(self) -> bool:
        """Whether all cursors are equal."""
        return all(length == self.lengths[0] for length in self.lengths)

    def make_room(self, committed: int) -> None:
        """Double the room until it holds `committed` tokens, but never beyond the limit."""
        while self._room < min(committed, self.limit):
            self._room = min(2 * self._room, self.limit)

    def visible(self, width: int) -> int:
        """Number of slots, from the first, that a pass over `width` tokens looks at."""
        return max(self.lengths) + width

    def slots(self, width: int) -> Tensor:
        """Slots that a pass over `width` tokens writes: `[1, width]` for equal cursors, else `[batch, width]`."""
        if self.uniform:
            return torch.arange(self.lengths[0], self.lengths[0] + width, device=self.device)[None]
        # Pinned and not waited for: the upload must not cost the round a synchronisation.
        cursor = torch.tensor(self.lengths, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        return cursor[:, None] + torch.arange(width, device=self.device)


class SharedCache(Cache):
    """Keys and values of every layer in preallocated slots, with one cursor per row.

    A pass over m tokens writes slots `[cursor, cursor + m)` of each row and leaves the cursor where it is: `advance`,
    `rollback` and `commit` move it. Slots past a row's cursor are scrap.

    Args:
        depth: number of layers.
        batch: number of rows.
        limit: the most tokens a row may come to hold, prompt included.
        slack: the longest draft; slots for it are kept past the committed tokens.
        device: where positions are made.
    """

    def __init__(self, depth: int, batch: int, limit: int, slack: int, device: torch.device) -> None:
        # The layers refer to the cursors and not to the cache: without a reference cycle, a finished generation's
        # memory is free at once rather than when the garbage collector comes round.
        self._cursors = Cursors(batch, limit, slack, device)
        self._most_bytes = 0
        super().__init__(layers=[_SharedLayer(self._cursors) for _ in range(depth)])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cursor of each row: how many of its tokens have their keys and values here."""
        return tuple(self._cursors.lengths)

    @property
    def capacity(self) -> int:
        """Slots allocated for each row."""
        return self._cursors.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def most_bytes(self) -> int:
        """The most bytes that were allocated for keys and values at any time."""
        return max(self._most_bytes, self.nbytes)

    def reserve(self, committed: int) -> None:
        """Make room for `committed` tokens a row and a draft behind them. Room grows by doubling, up to `limit`."""
        self._cursors.make_room(committed)

    def advance(self, tokens: int) -> None:
        """Move every cursor forward over `tokens` tokens that a pass has written."""
        self.commit([tokens] * len(self.lengths))

    def rollback(self, tokens: int) -> None:
        """Move every cursor back over `tokens` tokens. Copies nothing, whatever the length."""
        self.commit([-tokens] * len(self.lengths))

    def commit(self, tokens: Sequence[int]) -> None:
        """Move each row's cursor over its own number of tokens."""
        self._cursors.lengths = [length + count for length, count in zip(self.lengths, tokens, strict=True)]

    def narrow(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given. What the others hold is freed."""
        self._most_bytes = self.most_bytes
        self._cursors.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.narrow(rows)

    def scrub(self, rows: Sequence[int]) -> None:
        """Zero the scrap of some rows. Masked or not, NaN among it would spoil every attention that looks there."""
        for layer in self.layers:
            for row in rows:
                layer.scrub(row)

    def positions(self, width: int) -> Tensor:
        """Position ids of a pass over `width` tokens, `[batch or 1, width]`.

        Tokens past the limit are scrap of rows near their end; they are given the last position, since a table of
        learned positions has no more.
        """
        return self._cursors.slots(width).clamp(max=self._cursors.limit - 1)

    def attention_mask(self, config: PreTrainedConfig, width: int, dtype: torch.dtype) -> Any:
        """What a stock model takes as `attention_mask` for a pass over `width` tokens.

        None where all cursors are equal: the stock model then derives the mask from the cursor by itself, through
        `get_query_offset` and `get_mask_sizes`. Otherwise a 4-D mask `[batch, 1, width, slots]` in the form of the
        model's attention kernel, or a dict of one per layer type where the config has layer types.
        """
        if self._cursors.uniform:
            return None
        slots = self._cursors.slots(width)

        def mask(pattern: Callable[..., Tensor]) -> Tensor:
            made: Tensor = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
                batch_size=len(self.lengths),
                q_length=width,
                kv_length=self._cursors.visible(width),
                mask_function=lambda row, head, query, key: pattern(row, head, slots[row, query], key),
                allow_is_causal_skip=False,
                dtype=dtype,
                device=self._cursors.device,
            )
            return made

        window = getattr(config, "sliding_window", None)
        patterns = {"full_attention": causal_mask_function}
        if window is not None:
            patterns["sliding_attention"] = sliding_window_causal_mask_function(window)
        layer_types = getattr(config, "layer_types", None)
        if layer_types is None:
            return mask(patterns.get("sliding_attention", causal_mask_function))
        return {layer_type: mask(patterns[layer_type]) for layer_type in dict.fromkeys(layer_types)}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The furthest cursor, in slots (`transformers` asks for it as the length of the past)."""
        return max(self.lengths)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Slot of a pass's first token, where all cursors are equal."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of slots a pass over `query_length` tokens looks at, and the first of them."""
        return self._cursors.visible(query_length), 0


class _SharedLayer(CacheLayerMixin):
    """One layer's slots, `[batch, heads, capacity, head_dim]`, allocated when its first tokens come."""

    is_sliding = False

    def __init__(self, cursors: Cursors) -> None:
        super().__init__()
        self._cursors = cursors

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._slots_like(key_states)
        self.values = self._slots_like(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values, `[batch, heads, tokens, head_dim]`; return all the pass may look at."""
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self._cursors.capacity:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def narrow(self, rows: Sequence[int]) -> None:
        if self.keys is not None:
            index = torch.tensor(rows, device=self.keys.device)
            self.keys, self.values = self.keys[index], self.values[index]

    def scrub(self, row: int) -> None:
        if self.keys is not None:
            self.keys[row, :, self._cursors.lengths[row] :] = 0
            self.values[row, :, self._cursors.lengths[row] :] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cursors.visible(query_length), 0

    def get_seq_length(self) -> int:
        return max(self._cursors.lengths)

    def get_max_length(self) -> int:
        return -1

    def _slots_like(self, states: Tensor) -> Tensor:
        # Zeros, because a masked slot still meets the attention's weighted sum, where 0 * NaN would be NaN.
        batch, heads, _, head_dim = states.shape
        return states.new_zeros(batch, heads, self._cursors.capacity, head_dim)

    def _grown(self, old: Tensor) -> Tensor:
        new = self._slots_like(old)
        new[:, :, : old.shape[2]] = old
        return new

    def _written(self, slots: Tensor, states: Tensor) -> Tensor:
        width = states.shape[2]
        if self._cursors.uniform:
            start = self._cursors.lengths[0]
            slots[:, :, start : start + width] = states
        else:
            rows = torch.arange(states.shape[0], device=states.device)[:, None]
            slots[rows, :, self._cursors.slots(width).to(states.device)] = states.transpose(1, 2)
        return slots[:, :, : self._cursors.visible(width)]
