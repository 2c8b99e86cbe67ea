"""Transfer to and from caches of `transformers`, which callers pass in and get back for the next turn of a chat."""

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

from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.shared_layer import RecurrentLayer, SharedLayer, mapped, snapshot_of
from selfspec.errors import UnsupportedOptionError

# Exact classes only: sliding-window, quantised and static layers hold something else.
_KINDS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def past_of(inputs: Mapping[str, Any]) -> Cache | None:
    """Return the cache among a model's inputs that is the caller's own or holds something; None: there is none."""
    caches = [value for value in inputs.values() if isinstance(value, Cache)]
    # transformers adds an empty cache if the caller gives none.
    return next((cache for cache in caches if is_callers(cache) or holds_anything(cache)), None)


def is_callers(past: Cache) -> bool:
    """Return whether `transformers` has marked this cache as given to `generate` by the caller."""
    return bool(getattr(past, "_is_user_defined", False))


def holds_anything(past: Cache) -> bool:
    """Return whether a cache has keys and values, or states, of any token."""
    return past_length(past) > 0 or any(any(_has_states(layer)) for layer in past.layers)


def past_length(past: Cache) -> int:
    """Return the number of columns of keys and values; 0 if there are only states, which do not say their length."""
    counts = any(isinstance(layer, CacheLayerMixin) for layer in past.layers)
    return int(past.get_seq_length()) if counts else 0


def check_past(past: Cache) -> None:
    """Raise UnsupportedOptionError unless a cache is a dynamic one of full keys and values, or of states."""
    if type(past) is not DynamicCache or any(type(layer) not in _KINDS for layer in past.layers):
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in getattr(past, "layers", ())))
        raise UnsupportedOptionError(
            f"a cache of type {type(past).__name__} ({kinds}) is not supported; pass a DynamicCache() made "
            "without a config, or out.cache of an earlier generation"
        )


def check_rows(past: Cache, rows: int) -> None:
    """Refuse a cache with another number of rows than the batch."""
    held = next((tensor.shape[0] for layer in past.layers for tensor in _tensors(layer)), rows)
    if held != rows:
        raise UnsupportedOptionError(
            f"the cache holds {held} rows, the batch has {rows}; they must agree, num_return_sequences included"
        )


def check_kinds(past: Cache, cache: SharedCache) -> None:
    """Refuse a cache that a model with other kinds of layers has filled."""
    wanted, found = [_stock_kind(layer) for layer in cache.layers], [type(layer) for layer in past.layers]
    if holds_anything(past) and found != wanted:
        raise UnsupportedOptionError(
            f"the cache holds {len(found)} layers of {_names(found)}, and the model has {len(wanted)} of "
            f"{_names(wanted)}; pass a cache that this model has filled"
        )


def load_past(past: Cache, cache: SharedCache, mask: Tensor) -> None:
    """Copy a checked cache into an empty shared cache of the same model, and advance its cursors.

    Slot i of `past` belongs to column i of `mask`, `[rows, columns]`, which marks columns that hold tokens.
    """
    slots = [row.nonzero().flatten() for row in mask[:, : past_length(past)]]
    known = [len(row) for row in slots]
    if max(known):
        cache.cursors.reserve(max(known) + 1)
        for index, layer in enumerate(past.layers):
            if isinstance(layer, CacheLayerMixin) and layer.keys is not None:
                cache.update(_picked(layer.keys, slots), _picked(layer.values, slots), index)
        cache.commit(known)
    for own, layer in zip(cache.layers, past.layers, strict=False):
        if isinstance(own, RecurrentLayer) and any(_has_states(layer)):
            own.settled = mapped(snapshot_of(layer), torch.clone)


def store_past(cache: SharedCache, past: Cache, mask: Tensor) -> None:
    """Replace the contents of a dynamic cache by the committed tokens of a shared cache whose generation has ended.

    `mask`, `[rows, columns]`, marks columns of the prompts that hold tokens. Columns are those of `transformers`, only
    as many as every row has filled.
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
            for (kept, index), state in layer.settled.items():
                (copy.update_conv_state if kept == "conv" else copy.update_recurrent_state)(state, index)
        layers.append(copy)
    past.layers[:] = layers


def _stock_kind(layer: object) -> type[Any]:
    """Return the class in which `transformers` keeps such a layer."""
    with_states = LinearAttentionAndFullAttentionLayer if isinstance(layer, CacheLayerMixin) else LinearAttentionLayer
    kind: type[Any] = with_states if isinstance(layer, RecurrentLayer) else DynamicLayer
    return kind


def _has_states(layer: object) -> list[bool]:
    return list(getattr(layer, "has_previous_state", {}).values())


def _tensors(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer that hold a token."""
    states = list(layer.conv_states.values()) if any(_has_states(layer)) else []
    keys = [layer.keys] if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() else []
    return [tensor for tensor in [*keys, *states] if tensor is not None]


def _names(kinds: Sequence[type[Any]]) -> str:
    return ", ".join(dict.fromkeys(kind.__name__ for kind in kinds))


def _picked(states: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Gather each row's chosen slots side by side, from the first on."""
    picked = states.new_zeros(*states.shape[:2], max(map(len, slots)), states.shape[3])
    for row, chosen in enumerate(slots):
        picked[row, :, : len(chosen)] = states[row][:, chosen.to(states.device)]
    return picked


def _placed(states: Tensor, places: Sequence[Tensor], length: int) -> Tensor:
    """Scatter each row's first slots to their places among `length`."""
    placed = states.new_zeros(*states.shape[:2], length, states.shape[3])
    for row, chosen in enumerate(places):
        placed[row][:, chosen.to(states.device)] = states[row, :, : len(chosen)]
    return placed
