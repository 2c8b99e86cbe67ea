"""What keys and values take, by how they are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.cache.shared_layer import CacheKind
from selfspec.model.summary import CacheSummary

# Bytes of the scale of a token's keys, or values, in one head.
_SCALE = 2


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a budget is of: of all slots, and of one layer copied for a pass in the model's dtype."""

    slots: int
    copied: int


def cache_bytes(cache: CacheSummary, dtype: torch.dtype, context: int, layers: int, kept: CacheKind) -> CacheBytes:
    """Count the bytes of keys and values, kept as named, for `context` tokens of all rows together."""
    exact = cache.bytes_per_token * context
    if kept == "exact":
        return CacheBytes(exact, 0)
    copied = exact // max(layers, 1)
    if kept == "host":
        return CacheBytes(0, copied)
    numbers = exact // dtype.itemsize
    scales = 2 * numbers // max(cache.head_dim + cache.value_dim, 1)
    return CacheBytes(numbers + scales * _SCALE, copied)
