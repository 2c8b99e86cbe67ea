"""Keys and values that a caller hands in and gets back: caches of `transformers`, for the next turn of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicCache, DynamicLayer

from selfspec.cache import SharedCache
from selfspec.errors import PromptError, UnsupportedOptionError


def check_past(past: Cache, rows: int, width: int) -> None:
    """Refuse a cache whose contents cannot be taken over.

    Args:
        past: what the caller passes as `past_key_values`.
        rows: of the batch.
        width: length of the prompts, padding included.

    Raises:
        UnsupportedOptionError: it is no dynamic cache of whole keys and values, or of another batch.
        PromptError: the prompt does not go beyond it.
    """
    # Their exact classes: windows, quantised and static layers hold something else.
    if type(past) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in past.layers):
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in getattr(past, "layers", ())))
        raise UnsupportedOptionError(
            f"past_key_values of type {type(past).__name__} ({kinds}) is not supported; pass a DynamicCache() made "
            "without a config, or out.past_key_values of an earlier generation"
        )
    length = past.get_seq_length()
    if length and past.layers[0].keys.shape[0] != rows:
        raise UnsupportedOptionError(
            f"past_key_values hold {past.layers[0].keys.shape[0]} rows, the batch has {rows}; they must agree, "
            "num_return_sequences included"
        )
    if length >= width:
        raise PromptError(
            f"past_key_values hold {length} tokens and input_ids {width}; pass the whole conversation as input_ids, "
            "with at least one token that is not in the cache"
        )


def load_past(past: Cache, cache: SharedCache, padding: Sequence[int]) -> None:
    """Copy keys and values into an empty shared cache, and move its cursors behind them.

    Args:
        past: checked; slot i of a row belongs to column i of the prompts. It is left as it is.
        cache: of the same model.
        padding: columns of padding on the left of each row.
    """
    length = past.get_seq_length()
    known = [max(length - columns, 0) for columns in padding]
    if max(known) == 0:
        return
    cache.reserve(max(known) + 1)
    for index, layer in enumerate(past.layers):
        shifts = [-columns for columns in padding]
        cache.update(_moved(layer.keys, shifts, max(known)), _moved(layer.values, shifts, max(known)), index)
    cache.commit(known)


def store_past(cache: SharedCache, past: Cache, padding: Sequence[int]) -> None:
    """Copy what a shared cache holds behind its cursors into a dynamic cache, in place of what that held.

    Rows stand as `transformers` has them: after their padding, and with nothing of use after a row that is shorter.

    Args:
        cache: of a generation that has ended.
        past: a dynamic cache.
        padding: columns of padding on the left of each row.
    """
    length = max(columns + known for columns, known in zip(padding, cache.lengths, strict=True))
    layers = []
    for layer in cache.layers:
        copy = DynamicLayer()
        copy.update(_moved(layer.keys, padding, length), _moved(layer.values, padding, length))
        layers.append(copy)
    past.layers[:] = layers


def can_store(cache: SharedCache) -> bool:
    """Whether keys and values are all that a cache holds."""
    return cache.rolls_back_by_cursor


def _moved(states: Tensor, shifts: Sequence[int], length: int) -> Tensor:
    """The first `length` slots after each row has been moved right (left, if negative) by its own number of slots."""
    moved = states.new_zeros(*states.shape[:2], length, states.shape[3])
    for row, shift in enumerate(shifts):
        source = states[row, :, max(-shift, 0) :]
        count = min(source.shape[1], length - max(shift, 0))
        moved[row, :, max(shift, 0) : max(shift, 0) + count] = source[:, :count]
    return moved
