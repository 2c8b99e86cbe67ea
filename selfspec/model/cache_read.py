"""The keys and values that a pass reads: what it costs beside weights where texts are long."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from selfspec.cache.rounded_copy import copied_bytes
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.summary import layer_caches


def cache_bytes_read(config: PreTrainedConfig, dtype: torch.dtype, path: LayerPath, length: int) -> float:
    """Count the bytes of keys and values that a pass over one token reads behind `length` others.

    Args:
        config: of the text model.
        dtype: of its keys and values.
        path: that the pass runs.
        length: of the text, in tokens.
    """
    read = 0.0
    for layer, cache in enumerate(layer_caches(config)):
        if not path.runs(Sublayer(layer, Part.ATTENTION)):
            continue
        tokens = length if cache.window is None else min(length, cache.window)
        if path.window is not None:
            tokens = min(tokens, path.window.recent + path.window.sinks)
        bits = path.cache_bits
        read += tokens * (
            cache.numbers * dtype.itemsize if bits is None else copied_bytes(cache.numbers, cache.key, bits)
        )
    return read
