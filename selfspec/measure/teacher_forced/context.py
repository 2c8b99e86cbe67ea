"""The exact keys and values of a text, and masks under which each of its tokens is read as a draft step reads it.

A draft step attends to what the target left for the committed tokens, and to what the draft itself left for the tokens
it has read since. So a text is read in `reach` copies at once: in copy k every token is the k-th that its draft
reads, sees the exact keys and values of all but the last k tokens, and those of the copies before it for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)


def exact_context(depth: int) -> Cache:
    """Return a cache that keeps what the first pass writes; each later pass sees that and its own tokens.

    Positions and masks of all passes must be given.
    """
    return Cache(layers=[_ContextLayer() for _ in range(depth)])


class _ContextLayer(DynamicLayer):
    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, heads, tokens, head_dim]`: those of the text, then the pass's own.

        The rows of a later pass may be several times those of the text.
        """
        if not self.is_initialized:
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
            return key_states, value_states
        times = key_states.shape[0] // self.keys.shape[0]
        return (
            torch.cat([self.keys.repeat(times, 1, 1, 1), key_states], 2),
            torch.cat([self.values.repeat(times, 1, 1, 1), value_states], 2),
        )

    def get_seq_length(self) -> int:
        """0: nothing counts on from the text."""
        return 0


def draft_masks(config: PreTrainedConfig, length: int, reach: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the `attention_mask` that a stock model takes for a pass over `reach` copies of a text, side by side.

    Returns:
        A 4-D mask in the form of the model's attention kernel, `[1, 1, reach * length, (1 + reach) * length]`, or a
        dict of one for each layer type, None for types that are not known here.
    """

    def mask(pattern: Callable[..., Tensor]) -> Tensor:
        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            copy, here = query // length, query % length
            # Key copy -1 is the exact context.
            key_copy, there = key // length - 1, key % length
            exact = (key_copy < 0) & (there < here - copy)
            own = (key_copy >= 0) & (there <= here) & (here - there == copy - key_copy)
            return pattern(row, head, here, there) & (exact | own)

        made: Tensor = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
            batch_size=1,
            q_length=reach * length,
            kv_length=(1 + reach) * length,
            mask_function=allowed,
            allow_is_causal_skip=False,
            dtype=dtype,
            device=device,
        )
        return made

    window = getattr(config, "sliding_window", None)
    patterns: dict[str, Callable[..., Tensor]] = {"full_attention": causal_mask_function}
    if window is not None:
        patterns["sliding_attention"] = sliding_window_causal_mask_function(window)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask(patterns.get("sliding_attention", causal_mask_function))
    return {kind: mask(patterns[kind]) if kind in patterns else None for kind in dict.fromkeys(layer_types)}
