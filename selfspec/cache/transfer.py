"""What a caller hands in and gets back: caches of `transformers`, for the next turn of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from selfspec.cache.recurrent import RecurrentLayer, Snapshot
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.shared_layer import SharedLayer
from selfspec.errors import UnsupportedOptionError

# Their exact classes: windows, quantised and static layers hold something else.
_KINDS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def past_of(inputs: Mapping[str, Any]) -> Cache | None:
    """The cache among inputs of a model that counts: the caller's own, or one that holds something."""
    caches = [value for value in inputs.values() if isinstance(value, Cache)]
    # transformers puts in an empty one where the caller gives none.
    return next((cache for cache in caches if is_callers(cache) or holds_anything(cache)), None)


def is_callers(past: Cache) -> bool:
    """Whether `generate` was given this cache, as `transformers` notes it down."""
    return bool(getattr(past, "_is_user_defined", False))


def holds_anything(past: Cache) -> bool:
    """Whether a cache has keys and values, or states, of any token."""
    return past_length(past) > 0 or any(any(_has_states(layer)) for layer in past.layers)


def past_length(past: Cache) -> int:
    """Columns of keys and values; 0 where a cache holds states alone, which do not tell how many they have read."""
    counts = any(isinstance(layer, CacheLayerMixin) for layer in past.layers)
    return int(past.get_seq_length()) if counts else 0


def check_past(past: Cache) -> None:
    """Refuse a cache whose contents cannot be taken over.

    Raises:
        UnsupportedOptionError: it is no dynamic cache of whole keys and values and of states.
    """
    if type(past) is not DynamicCache or any(type(layer) not in _KINDS for layer in past.layers):
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in getattr(past, "layers", ())))
        raise UnsupportedOptionError(
            f"a cache of type {type(past).__name__} ({kinds}) is not supported; pass a DynamicCache() made "
            "without a config, or out.cache of an earlier generation"
        )


def check_rows(past: Cache, rows: int) -> None:
    """Refuse a cache of a batch with another number of rows."""
    held = next((tensor.shape[0] for layer in past.layers for tensor in _tensors(layer)), rows)
    if held != rows:
        raise UnsupportedOptionError(
            f"the cache holds {held} rows, the batch has {rows}; they must agree, num_return_sequences included"
        )


def check_kinds(past: Cache, cache: SharedCache) -> None:
    """Refuse a cache that was filled by a model of other layers."""
    wanted, found = [_stock_kind(layer) for layer in cache.layers], [type(layer) for layer in past.layers]
    if holds_anything(past) and found != wanted:
        raise UnsupportedOptionError(
            f"the cache holds {len(found)} layers of {_names(found)}, and the model has {len(wanted)} of "
            f"{_names(wanted)}; pass a cache that this model has filled"
        )


def load_past(past: Cache, cache: SharedCache, mask: Tensor) -> None:
    """Copy keys, values and states into an empty shared cache, and move its cursors behind them.

    Args:
        past: checked; its slot i belongs to column i of the mask. It is left as it is.
        cache: of the same model.
        mask: which columns hold tokens, `[rows, columns]`; the first ones are those of the past.
    """
    slots = [row.nonzero().flatten() for row in mask[:, : past_length(past)]]
    known = [len(row) for row in slots]
    if max(known):
        cache.reserve(max(known) + 1)
        for index, layer in enumerate(past.layers):
            if isinstance(layer, CacheLayerMixin) and layer.keys is not None:
                cache.update(_picked(layer.keys, slots), _picked(layer.values, slots), index)
        cache.commit(known)
    for own, layer in zip(cache.layers, past.layers, strict=False):
        if isinstance(own, RecurrentLayer) and any(_has_states(layer)):
            own.begin_with(Snapshot.of(layer).mapped(torch.clone))


def store_past(cache: SharedCache, past: Cache, mask: Tensor) -> None:
    """Copy what a shared cache holds behind its cursors into a dynamic cache, in place of what that held.

    Columns are those of `transformers`. There are no more of them than every row has filled, so that none holds
    anything but what a pass computed.

    Args:
        cache: of a generation that has ended.
        past: a dynamic cache.
        mask: which columns of the prompts hold tokens, `[rows, columns]`.
    """
    after = torch.arange(max(cache.seq_lens), device=mask.device) + mask.shape[1]
    places = [
        torch.cat([row.nonzero().flatten(), after])[:known] for row, known in zip(mask, cache.seq_lens, strict=True)
    ]
    length = min(int(row[-1]) + 1 if len(row) else 0 for row in places)
    places = [row[row < length] for row in places]
    layers = []
    for layer in cache.layers:
        kind = _stock_kind(layer)
        copy = kind() if kind is DynamicLayer else kind(layer.number_of_states)
        if isinstance(layer, SharedLayer) and layer.keys is not None:
            copy.update(*(_placed(states, places, length) for states in layer.held()))
        if isinstance(layer, RecurrentLayer):
            for index, state in layer.settled.conv.items():
                copy.update_conv_state(state, index)
            for index, state in layer.settled.recurrent.items():
                copy.update_recurrent_state(state, index)
        layers.append(copy)
    past.layers[:] = layers


def can_store(cache: SharedCache) -> bool:
    """Whether one cache can hold all rows: states have no columns, so they must be those of equally many tokens."""
    return cache.rolls_back_by_cursor or cache.uniform


def _stock_kind(layer: object) -> type[Any]:
    """What `transformers` keeps a layer of a shared cache in."""
    with_states = LinearAttentionAndFullAttentionLayer if isinstance(layer, CacheLayerMixin) else LinearAttentionLayer
    kind: type[Any] = with_states if isinstance(layer, RecurrentLayer) else DynamicLayer
    return kind


def _has_states(layer: object) -> list[bool]:
    return list(getattr(layer, "has_previous_state", {}).values())


def _tensors(layer: Any) -> list[Tensor]:
    """Those of a layer that hold a token."""
    states = list(layer.conv_states.values()) if any(_has_states(layer)) else []
    keys = [layer.keys] if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() else []
    return [tensor for tensor in [*keys, *states] if tensor is not None]


def _names(kinds: Sequence[type[Any]]) -> str:
    return ", ".join(dict.fromkeys(kind.__name__ for kind in kinds))


def _picked(states: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Each row's own slots, side by side from the first on."""
    picked = states.new_zeros(*states.shape[:2], max(map(len, slots)), states.shape[3])
    for row, chosen in enumerate(slots):
        picked[row, :, : len(chosen)] = states[row][:, chosen.to(states.device)]
    return picked


def _placed(states: Tensor, places: Sequence[Tensor], length: int) -> Tensor:
    """Each row's first slots, each at its own place among `length`."""
    placed = states.new_zeros(*states.shape[:2], length, states.shape[3])
    for row, chosen in enumerate(places):
        placed[row][:, chosen.to(states.device)] = states[row, :, : len(chosen)]
    return placed
