"""Check prompts, their attention masks and soft prompts before any pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from selfspec.cache.transfer import holds_anything, is_callers, past_length, past_of
from selfspec.errors import PromptError, UnsupportedModelError, UnsupportedOptionError
from selfspec.model.identity import weight_of


def checked_ids(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """Return the prompts as 64-bit ids, `[batch, prompt]`; refuse shapes, dtypes and ids that do not fit."""
    _check_dense("input_ids", inputs)
    if not isinstance(inputs, Tensor) or inputs.dtype not in (torch.int64, torch.int32):
        raise PromptError("input_ids must be a LongTensor of shape [batch, prompt]; tokenize with return_tensors='pt'")
    input_ids = inputs.long()
    if input_ids.ndim != 2:
        raise PromptError(
            f"input_ids has shape {list(inputs.shape)}, not [batch, prompt]; for a single prompt write input_ids[None]"
        )
    if input_ids.numel() == 0:
        raise PromptError(f"the prompt is empty (input_ids of shape {list(inputs.shape)}); give at least the bos token")
    # Some modules that replace an embedding have no num_embeddings.
    vocabulary = weight_of(model.get_input_embeddings()).shape[0]
    lowest, highest = input_ids.min().item(), input_ids.max().item()
    if lowest < 0 or highest >= vocabulary:
        raise PromptError(
            f"token id {int(lowest if lowest < 0 else highest)} is outside the vocabulary 0..{vocabulary - 1}; "
            "is this the model's own tokenizer?"
        )
    return input_ids


def checked_embeddings(model: PreTrainedModel, embeddings: Tensor) -> Tensor:
    """Return the prompts as embeddings, `[batch, prompt, hidden]`; refuse others than the model's own kind."""
    own = weight_of(model.get_input_embeddings())
    wanted = f"a tensor of {own.dtype} of shape [batch, prompt, {own.shape[1]}], as the model's own are"
    if not isinstance(embeddings, Tensor) or embeddings.dtype != own.dtype:
        given = embeddings.dtype if isinstance(embeddings, Tensor) else repr(embeddings)
        raise PromptError(f"inputs_embeds must be {wanted}, got {given}")
    _check_dense("inputs_embeds", embeddings)
    if embeddings.ndim != 3 or embeddings.shape[2] != own.shape[1] or embeddings.numel() == 0:
        raise PromptError(f"inputs_embeds must be {wanted}, got shape {list(embeddings.shape)}")
    return embeddings


def checked_mask(attention_mask: Tensor, read: Tensor, past: Cache | None) -> Tensor:
    """Return the mask, 1 for tokens, of a past's columns and then of the prompts, `[batch, columns]`.

    Prompts begin with the past's tokens or after them. Refuses other shapes or values, empty rows, and padding right.
    """
    rows, columns = read.shape[:2]
    known = 0 if past is None else past_length(past)
    name = "inputs_embeds" if read.is_floating_point() else "input_ids"
    if not isinstance(attention_mask, Tensor):
        raise PromptError(f"attention_mask must be a tensor of the shape of {name}, got {attention_mask!r}")
    _check_dense("attention_mask", attention_mask)
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise PromptError("attention_mask may hold nothing but 1 for tokens and 0 for padding")
    if attention_mask.shape not in ((rows, columns), (rows, columns + known)):
        raise PromptError(
            f"attention_mask has shape {list(attention_mask.shape)}, {name} {list(read.shape[:2])}; they must agree"
            + (f", or the mask must also cover the {known} columns of the cache" if known else "")
        )
    mask = (attention_mask.to(read.device) != 0).long()
    if mask.shape[1] <= known:
        raise PromptError(
            f"the cache holds {known} tokens and {name} {columns}; pass the whole conversation as {name}, "
            "with at least one token that is not in the cache"
        )
    if not bool(mask[:, known:].any(1).all()):
        rows_of_zeros = (~mask[:, known:].any(1).bool()).nonzero().flatten().tolist()
        raise PromptError(
            f"row(s) {rows_of_zeros} of the attention mask are all zero; drop these rows or give them a token"
        )
    if not bool(mask[:, -1].all()):
        raise PromptError(
            "the attention mask ends with zeros; pad on the left: AutoTokenizer.from_pretrained(..., "
            "padding_side='left'). Without a mask, `transformers` takes the padding token for padding wherever it is: "
            "pass attention_mask=torch.ones_like(input_ids) if it is text"
        )
    return mask


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is dense: neither on the meta device, nor sparse, nor nested."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def _check_dense(name: str, value: object) -> None:
    if isinstance(value, Tensor) and not has_values(value):
        raise PromptError(f"{name} is a tensor without values (meta, sparse or nested); pass a dense one")


def first_inputs(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the first pass, from those that `generate` prepared, with a soft prompt if there is one.

    Libraries of soft prompts replace `prepare_inputs_for_generation` while `generate` runs, to return embeddings or a
    cache with a prefix; a `custom_generate` must call it. Raises UnsupportedModelError if it adds no soft prompt, and
    UnsupportedOptionError beside a caller's cache or for padded rows without position_ids.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    # Such a library later leaves the model's own method set on the instance.
    if prepare is None or getattr(prepare, "__func__", None) is type(model).prepare_inputs_for_generation:
        return {**model_kwargs, "input_ids": input_ids}
    past = past_of(model_kwargs)
    if past is not None and is_callers(past) and holds_anything(past):
        raise UnsupportedOptionError(
            "a cache beside a soft prompt is not supported: it does not say which of its columns the soft "
            "prompt takes; pass the whole conversation as input_ids alone"
        )
    inputs: dict[str, Any] = prepare(input_ids, is_first_iteration=True, **model_kwargs)
    past = past_of(inputs)
    # The caller's own prompt may be embeddings, too.
    embedded = inputs.get("inputs_embeds") is not None and model_kwargs.get("inputs_embeds") is None
    if not embedded and (past is None or not holds_anything(past)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a prepare_inputs_for_generation of its own, which adds no soft prompt and "
            "would not be called for later tokens; use model.generate, or do the same in forward or in a hook"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and inputs.get("position_ids") is None and bool((mask == 0).any()):
        raise UnsupportedOptionError(
            "a soft prompt before padded rows is not supported: without position_ids, which it drops, padding counts "
            "as positions; pass rows of one length, or one row at a time"
        )
    return inputs
