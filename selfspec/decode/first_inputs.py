"""What a model is given in its first pass, where a soft prompt stands in for a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.cache.transfer import holds_anything, is_callers, past_of
from selfspec.errors import UnsupportedOptionError


def first_inputs(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of the model's first pass.

    Libraries of soft prompts put a `prepare_inputs_for_generation` of their own on the model while its `generate` runs.
    It gives embeddings in place of ids, or a cache that holds a prefix. Only loops of `transformers` call it by
    themselves.

    Args:
        model: as `generate` finds it.
        input_ids: `[batch, prompt]`.
        model_kwargs: what `generate` has prepared besides.

    Raises:
        UnsupportedOptionError: the caller passes a cache as well, or there is padding and no word on positions.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    # What such a library leaves behind is the model's own method.
    if prepare is None or getattr(prepare, "__func__", None) is type(model).prepare_inputs_for_generation:
        return {**model_kwargs, "input_ids": input_ids}
    past = past_of(model_kwargs)
    if past is not None and is_callers(past) and holds_anything(past):
        raise UnsupportedOptionError(
            "past_key_values beside a soft prompt is not supported: it does not say which of its columns the soft "
            "prompt takes; pass the whole conversation as input_ids alone"
        )
    inputs: dict[str, Any] = prepare(input_ids, is_first_iteration=True, **model_kwargs)
    mask = inputs.get("attention_mask")
    if mask is not None and inputs.get("position_ids") is None and bool((mask == 0).any()):
        raise UnsupportedOptionError(
            "a soft prompt before padded rows is not supported: without position_ids, which it drops, padding counts "
            "as positions; pass rows of one length, or one row at a time"
        )
    return inputs
