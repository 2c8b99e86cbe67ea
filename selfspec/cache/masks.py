"""Masks: the slots that each token of a pass attends to, in the form of the model's attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from selfspec.cache.cursors import OpenBlock

Pattern = Callable[..., Tensor]
"""Says whether a query sees a key, from row, head and positions: tensors that broadcast against each other."""


@dataclass(frozen=True)
class Window:
    """Limits attention to the latest positions of a text, the token's own included, and the first ones, the sinks.

    Without the first few a model fails (StreamingLLM; Xiao et al., 2024, arXiv 2309.17453).
    """

    recent: int
    sinks: int


_WITH_KEYS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid"})
# These layers read no keys: they have states, or only an MLP.
_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "moe", "sparse", "dense"})
# Models with recurrent layers ask for these, whatever their layer types are called.
_ALWAYS_ASKED = ("full_attention", "linear_attention", "conv")


def smallest_window(config: PreTrainedConfig) -> int | None:
    """Return the smallest window of a layer in slots, the token itself included; None: no layer has a window."""
    spans = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((span for span in spans if span is not None), default=None)


def unknown_layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the layer types for which no mask can be made, since it is not known what their tokens see."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _WITH_KEYS - _WITHOUT_KEYS)


def attention_mask(
    config: PreTrainedConfig,
    slots: Tensor,
    rows: int,
    visible: int,
    dtype: torch.dtype,
    *,
    block: OpenBlock | None = None,
    recurrent: bool = False,
    padded: bool = False,
    window: Window | None = None,
) -> Any:
    """Make the `attention_mask` of a stock model for a pass; None for full attention that needs none.

    It is 4-D, `[rows, 1, tokens, visible]`, or a dict of one per layer type where the config has layer types. `slots`
    are `[rows or 1, tokens]`; without `block`, slot i holds position i. Windows and chunks count positions, not slots.
    `recurrent`: some layers have states; `padded`: slots past the last token may be visible; `window`: of all layers.
    """
    tokens = slots.shape[1]
    # On sdpa a single token per row, all in one slot, needs no mask.
    masks_full = block is not None or padded or slots.shape != (1, 1) or config._attn_implementation != "sdpa"
    slots = slots.expand(rows, tokens)
    allowed = _by_slots(slots) if block is None else _by_positions(block, slots, visible)

    def mask(pattern: Pattern) -> Tensor | None:
        if pattern is causal_mask_function and not masks_full and window is None:
            return None

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found = pattern(row, head, query, key)
            return found if window is None else found & ((query - key < window.recent) | (key < window.sinks))

        made: Tensor = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
            batch_size=rows,
            q_length=tokens,
            kv_length=visible,
            mask_function=allowed(seen),
            allow_is_causal_skip=False,
            dtype=dtype,
            device=slots.device,
        )
        return made

    sliding = getattr(config, "sliding_window", None)
    patterns = {"full_attention": causal_mask_function, "hybrid": causal_mask_function}
    if sliding is not None:
        patterns["sliding_attention"] = sliding_window_causal_mask_function(sliding)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None:
        unpadded = torch.zeros(rows, dtype=torch.long, device=slots.device)
        patterns["chunked_attention"] = chunked_causal_mask_function(chunk, unpadded)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None and not recurrent:
        return mask(patterns.get("sliding_attention", causal_mask_function))
    # Types that are missing here read no keys, so they need no mask: recurrent layers, or layers with only an MLP.
    kinds = dict.fromkeys([*(layer_types or ()), *(_ALWAYS_ASKED if recurrent else ())])
    return {kind: mask(patterns[kind]) if kind in patterns else None for kind in kinds}


def _by_slots(slots: Tensor) -> Callable[[Pattern], Pattern]:
    """Apply patterns to tokens of a pass and all slots, where slot i holds position i."""
    return lambda pattern: lambda row, head, query, key: pattern(row, head, slots[row, query], key)


def _by_positions(block: OpenBlock, slots: Tensor, visible: int) -> Callable[[Pattern], Pattern]:
    """Apply patterns to tokens of a pass and all slots, where the tokens are nodes of a tree."""
    keys = torch.arange(visible, device=slots.device)[None]
    sees = block.visible(slots, keys)
    query_positions, key_positions = block.positions(slots), block.positions(keys).expand(slots.shape[0], -1)

    return lambda pattern: (
        lambda row, head, query, key: (
            pattern(row, head, query_positions[row, query], key_positions[row, key]) & sees[row, query, key]
        )
    )
