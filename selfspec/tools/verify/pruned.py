"""Compare a draft with a pruned copy of the model: a wrong adapter shows in the draft's logits, and not in the text.

The text is the full model's own whatever the draft proposes, so it cannot tell whether the draft left out the right
layers or sublayers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.model.stock_passes import over_cache
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner


@torch.no_grad()
def draft_logits(
    model: PreTrainedModel, draft: LayerPathDrafter, ids: Tensor, block: int, adapter: Adapter | None = None
) -> Tensor:
    """Compute logits of draft steps over the end of texts, `[batch, length]`, whose beginning the full model has read.

    The draft reads the last `block` tokens, one at a time, with at least one before. Returns `[batch, block, vocab]`.

    Raises:
        DraftConfigError: the draft does not fit the model.
        UnsupportedModelError: there is no adapter.
    """
    found = adapter or find_adapter(model)
    depth = len(found.decoder_layers(model))
    path = draft.path(depth)
    draft.check_model(model, found)
    cache = found.shared_cache(model, ids.shape[0], ids.shape[1] + 1, slack=block, device=ids.device)
    passes = ModelRunner(model, found, cache)
    past = ids.shape[1] - block
    passes.run(PassRequest(LayerPath.full(depth), ids[:, :past], headless=True))
    cache.commit([past] * ids.shape[0])
    logits = []
    for number, token in enumerate(ids[:, past:].split(1, 1)):
        logits.append(passes.run(PassRequest(path, token, head=draft.head, first=number - 1)).logits)
    return torch.cat(logits, 1)


@torch.no_grad()
def pruned_logits(model: PreTrainedModel, pruned: PreTrainedModel, ids: Tensor, block: int) -> Tensor:
    """Compute the same by `transformers` alone: the full model reads the beginning, a pruned copy continues.

    In the copy the weights and biases of the linears that end the skipped sublayers are 0.
    """
    cache = DynamicCache(config=model.config)
    past = ids.shape[1] - block
    model(ids[:, :past], **over_cache(model, cache))
    logits: Tensor = pruned(ids[:, past:], **over_cache(pruned, cache)).logits
    return logits
