"""Reduced vocabularies that a model's own text chooses: where the head is most of what a draft step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft import LowPrecision, ReducedVocabulary
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError
from selfspec.measure.own_text import Continuation
from selfspec.model.early_head import plain_head
from selfspec.model.vocabulary import weight_of

# Sizes to choose from, as shares of the vocabulary, and the share of texts not counted that the smallest must hold:
# steps that read half as much make up for drafts that end earlier.
_SIZES, _HELD = (1 / 16, 1 / 8, 1 / 4), 0.92
# What a draft step must save of what it reads.
_SAVES = 0.2
# Probabilities added up at a time.
_AT_ONCE = 64


def with_own_vocabulary(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: Mapping[str, LayerPathDrafter],
    texts: Sequence[Sequence[Continuation]],
    file: Path,
) -> list[ReducedVocabulary]:
    """Return the drafts in fewer bits that save much of a step's work by fewer rows of the head.

    They name `file`, which is not written. There are none where a quarter of the vocabulary does not hold what the
    model writes.

    Args:
        model: the stock model.
        adapter: where its layers are.
        drafters: to choose from.
        texts: that the model wrote from the same prompts, in some ways.
        file: where the tokens will be.
    """
    whole = [each for each in drafters.values() if isinstance(each, LowPrecision) and each.fewer is None]
    head = plain_head(model)
    if head is None or not whole:
        return []
    vocabulary = model.get_submodule(head).weight.shape[0]
    least = ReducedVocabulary(whole[0], tuple(range(max(1, int(vocabulary * _SIZES[0])))))
    try:
        least.check_model(model, adapter)
    except DraftConfigError:
        return []
    if least.cost(model, adapter) > (1 - _SAVES) * whole[0].cost(model, adapter):
        return []
    tokens = own_vocabulary(model, texts)
    return [] if tokens is None else [ReducedVocabulary(each, tokens, str(file)) for each in whole]


def own_vocabulary(model: PreTrainedModel, texts: Sequence[Sequence[Continuation]]) -> tuple[int, ...] | None:
    """Return the fewest tokens that hold what a model writes, ascending; None: a quarter of its vocabulary does not.

    Tokens are ordered by how often the model expects them at the places of its own texts, and how often they are there.
    How many it takes is seen on the texts of every other prompt, which are not counted then.
    """
    counted = [text for some in texts for text in some[::2]]
    others = [text for some in texts for text in some[1::2]]
    if not others:
        return None
    expected = _expected(model, counted)
    order = expected.argsort(descending=True, stable=True)
    written = torch.cat([text.ids[0, text.prompt :].cpu() for text in others])
    for share in _SIZES:
        size = max(1, int(len(order) * share))
        if float(torch.isin(written, order[:size]).double().mean()) >= _HELD:
            expected += _expected(model, others)
            kept = expected.argsort(descending=True, stable=True)[:size]
            return tuple(kept.sort().values.tolist())
    return None


@torch.no_grad()
def _expected(model: PreTrainedModel, texts: Sequence[Continuation]) -> Tensor:
    """How often each token is in some texts, and how often it was expected there, summed, `[vocab]`, float64."""
    found = torch.zeros(weight_of(model.get_output_embeddings()).shape[0], dtype=torch.float64)
    for text in texts:
        ids = text.ids.to(model.device)
        found += torch.bincount(ids[0], minlength=len(found)).cpu()
        for logits in model(input_ids=ids, use_cache=False).logits[0].split(_AT_ONCE):
            found += logits.float().softmax(-1).sum(0).cpu()
    return found
