"""Proves that an exported checkpoint, as `transformers` loads it, computes what the draft does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter, takes
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import UnsupportedModelError
from selfspec.model.checkpoint import without_progress_bar
from selfspec.model.early_head import DraftHead
from selfspec.model.vocabulary import weight_of
from selfspec.runtime.runner import ModelRunner

_TOKENS = 24
# Largest difference of logits, in their standard deviations. Another order of sums is within a tenth of it.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_ROUGH = 0.1


@torch.no_grad()
def prove(folder: Path, model: PreTrainedModel, adapter: Adapter, drafter: LayerPathDrafter) -> float:
    """Compare the logits of a checkpoint on random tokens with those of a draft along a path, its vocabulary apart.

    Returns:
        The largest difference, in standard deviations of the logits.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    head = drafter.head
    whole = None if head is None or head.adapter is None else DraftHead(head.adapter)
    ids = _random_tokens(model)
    cache = adapter.shared_cache(model, batch=1, limit=ids.shape[1])
    cache.reserve(ids.shape[1])
    path = drafter.path(len(adapter.decoder_layers(model)))
    draft = ModelRunner(model, adapter, cache).logits(path, ids, head=whole).logits.double()
    with without_progress_bar():
        loaded = type(model).from_pretrained(folder, dtype=model.dtype, **_kernels(model), use_safetensors=True)
    # As `generate` counts them.
    places = (
        {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None]} if takes(model, "position_ids") else {}
    )
    exported = loaded.to(model.device).eval()(input_ids=ids, use_cache=False, **places).logits.double()
    off = float((exported - draft).abs().max() / draft.std())
    if not off <= _TOLERANCE.get(model.dtype, _ROUGH):
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} do not compute by themselves what they do in the whole model "
            f"(logits differ by {off:.2g} standard deviations); choose another exit, or export from another model"
        )
    return off


def _random_tokens(model: PreTrainedModel) -> Tensor:
    """Token ids, `[1, tokens]`, none of which pads: some models take positions from where padding is."""
    config = model.config.get_text_config(decoder=True)
    longest = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    vocabulary = weight_of(model.get_input_embeddings()).shape[0]
    words = [token for token in range(min(vocabulary, 1000)) if token != getattr(config, "pad_token_id", None)]
    drawn = torch.randint(len(words), (1, longest), generator=torch.Generator().manual_seed(0))
    return torch.tensor(words)[drawn].to(model.device)


def _kernels(model: PreTrainedModel) -> dict[str, str]:
    """What the model computes attention and experts with, as `from_pretrained` takes it."""
    named = {name: getattr(model.config, f"_{name}_implementation", None) for name in ("attn", "experts")}
    return {f"{name}_implementation": kernel for name, kernel in named.items() if kernel is not None}
