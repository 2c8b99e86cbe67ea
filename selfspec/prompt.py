"""Prompts and their attention masks, checked before any pass."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.errors import PromptError


def checked_prompt(model: PreTrainedModel, inputs: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The prompts as int64 and their mask of ones and zeros, both `[batch, prompt]`.

    Raises:
        PromptError: empty, ids outside the vocabulary, or a mask that does not fit.
    """
    if isinstance(inputs, Tensor) and not has_values(inputs):
        raise PromptError("input_ids is a tensor without values (meta, sparse or nested); pass a dense one")
    if not isinstance(inputs, Tensor) or inputs.dtype not in (torch.int64, torch.int32):
        raise PromptError("input_ids must be a LongTensor of shape [batch, prompt]; tokenize with return_tensors='pt'")
    input_ids = inputs.long()
    if input_ids.ndim != 2:
        raise PromptError(
            f"input_ids has shape {list(inputs.shape)}, not [batch, prompt]; for a single prompt write input_ids[None]"
        )
    if input_ids.numel() == 0:
        raise PromptError(f"the prompt is empty (input_ids of shape {list(inputs.shape)}); give at least the bos token")
    vocabulary = model.get_input_embeddings().num_embeddings
    lowest, highest = input_ids.min().item(), input_ids.max().item()
    if lowest < 0 or highest >= vocabulary:
        raise PromptError(
            f"token id {int(lowest if lowest < 0 else highest)} is outside the vocabulary 0..{vocabulary - 1}; "
            "is this the model's own tokenizer?"
        )
    if attention_mask is None:
        return input_ids, torch.ones_like(input_ids)
    check_mask(attention_mask)
    if attention_mask.shape != input_ids.shape:
        raise PromptError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}; they must agree"
        )
    mask = (attention_mask.to(input_ids.device) != 0).long()
    if not bool(mask.any(1).all()):
        rows = (~mask.any(1).bool()).nonzero().flatten().tolist()
        raise PromptError(f"row(s) {rows} of the attention mask are all zero; drop these rows or give them a token")
    if bool((mask.diff(dim=1) < 0).any()):
        raise PromptError(
            "the attention mask has zeros after ones; pad on the left: AutoTokenizer.from_pretrained(..., "
            "padding_side='left')"
        )
    return input_ids, mask


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds a value at each place: it is neither on the meta device, nor sparse, nor nested."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def check_mask(attention_mask: Tensor) -> None:
    """Refuse a mask that says anything but token or padding of a place.

    Raises:
        PromptError: it is no dense tensor, or holds something else than zeros and ones.
    """
    if not isinstance(attention_mask, Tensor):
        raise PromptError(f"attention_mask must be a tensor of the shape of input_ids, got {attention_mask!r}")
    if not has_values(attention_mask):
        raise PromptError(
            "attention_mask is a tensor without values of its own (meta, sparse or nested); pass a dense one"
        )
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise PromptError("attention_mask may hold nothing but 1 for tokens and 0 for padding")
