"""The keys and values that a pass reads: what it costs beside weights where texts are long."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from selfspec.cache.rounded_copy import copied_bytes
from selfspec.cache.top_slots import EVERY
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.summary import layer_caches


def cache_bytes_read(config: PreTrainedConfig, dtype: torch.dtype, path: LayerPath, lengths: Sequence[int]) -> float:
    """Count the bytes of keys and values that a pass over one token of each row reads behind the row's others.

    Args:
        config: of the text model.
        dtype: of its keys and values.
        path: that the pass runs.
        lengths: of the rows' texts, in tokens.
    """
    read = 0.0
    view = path.view
    of_view = None if view.window is None else view.window.recent + view.window.sinks
    for layer, cache in enumerate(layer_caches(config)):
        if not path.runs(Sublayer(layer, Part.ATTENTION)):
            continue
        seen = [most for most in (cache.window, of_view) if most is not None]
        if view.top_keys is not None and cache.window is None:
            seen = [view.top_keys + EVERY // 2]
        exact = cache.numbers * dtype.itemsize
        each = exact if view.bits is None else copied_bytes(cache.numbers, cache.key, view.bits)
        read += each * sum(min(length, *seen) if seen else length for length in lengths)
    return read
