"""Run a stock model over a text block by block, with its own passes and its own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from selfspec.architecture import takes
from selfspec.compat import cache_argument
from selfspec.model.identity import weight_of
from selfspec.model.positions import tables_change
from selfspec.model.view import copied, view_of

# Logits in memory at once, if a pass reads more tokens than one block.
_NUMBERS_AT_ONCE = 2**28


@torch.no_grad()
def block_logits(model: PreTrainedModel, blocks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Read blocks of a text, `[1, tokens]` each, over a cache, and yield the logits of each, `[tokens, vocab]`.

    Where this would change logits (layers with states start anew, rotary tables change), passes read the whole text.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    widths = [block.shape[1] for block in blocks]
    with_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    if tables_change(config, widths[0], sum(widths)) or (with_states and any(width > 1 for width in widths[1:])):
        yield from _by_whole_passes(model, blocks)
        return
    start = 0
    for block in blocks:
        yield logits_after(model, cache, block, start)[0]
        start += block.shape[1]


def logits_after(model: PreTrainedModel, cache: Cache, tokens: Tensor, start: int) -> Tensor:
    """Pass tokens, `[rows, tokens]`, that follow those in a cache; return their logits, `[rows, tokens, vocab]`."""
    # As `generate` does: without positions, some models count from 0 in every pass.
    logits: Tensor = model(tokens, **over_cache(model, cache), **_positions(model, tokens, start)).logits
    return logits


def over_cache(model: nn.Module, cache: Cache) -> dict[str, Any]:
    """Return the arguments by which a stock model reads and extends a cache of `transformers`."""
    return {cache_argument(model): cache, "use_cache": True}


def _by_whole_passes(model: PreTrainedModel, blocks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Read the whole text once, or several times if its logits do not fit into memory at once."""
    whole = torch.cat(list(blocks), 1)
    own = view_of(model, _with_own_buffers)
    inputs = {"use_cache": False, **_positions(model, whole, 0)}
    vocabulary = weight_of(model.get_input_embeddings()).shape[0]
    most = _NUMBERS_AT_ONCE // vocabulary if takes(model, "logits_to_keep") else whole.shape[1]
    waiting, start = list(blocks), 0
    while waiting:
        ends = list(accumulate(block.shape[1] for block in waiting))
        count = max(sum(end <= most for end in ends), 1)
        if count < len(blocks):
            inputs["logits_to_keep"] = torch.arange(start, start + ends[count - 1], device=whole.device)
        logits: Tensor = own(whole, **inputs).logits[0]
        yield from logits.split([block.shape[1] for block in waiting[:count]])
        start += ends[count - 1]
        del waiting[:count]


def _positions(model: PreTrainedModel, block: Tensor, start: int) -> dict[str, Tensor]:
    if not takes(model, "position_ids"):
        return {}
    positions = torch.arange(start, start + block.shape[1], device=block.device)
    return {"position_ids": positions.expand(*block.shape)}


def _with_own_buffers(module: nn.Module, others: Any) -> nn.Module | None:
    """Copy the buffers of a part without weights: a pass may write to them, and other threads use the model."""
    if others or module._parameters or not module._buffers:
        return None
    view = copied(module)
    buffers = {name: buffer if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    view.__dict__["_buffers"] = buffers
    return view
