"""Passes of the stock model over its own cache: the reference, which shares nothing with selfspec's decoding."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.model.stock_passes import block_logits


@dataclass(frozen=True)
class Reference:
    """A greedy text by `model.generate`, and logits of one-token passes over it, `[new tokens, vocab]`."""

    prompt: Tensor
    tokens: list[int]
    logits: Tensor


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """Return a shallow copy of the model without its generation defaults, except its special tokens."""
    given = model.generation_config
    copied = copy.copy(model)
    copied.generation_config = GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
    )
    return copied


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a text."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def until_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return the tokens of a text up to and with the first that ends it."""
    return list(tokens[: next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))])


def read_reference(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> Reference:
    """Continue a prompt, `[1, prompt]`, greedily by `model.generate`, and compute the logits that decided."""
    mask = torch.ones_like(prompt)
    sequences = model.generate(prompt, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    tokens: list[int] = sequences[0, prompt.shape[1] :].tolist()
    return Reference(prompt, tokens, stepwise_logits(model, prompt, tokens))


@torch.no_grad()
def stepwise_logits(model: PreTrainedModel, prompt: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the logits of each new token, `[new tokens, vocab]`: a pass over the prompt, then one-token passes."""
    following = torch.tensor([list(tokens)], device=prompt.device)
    blocks = [prompt, *following[:, :-1].split(1, 1)][: len(tokens)]
    return torch.cat(list(block_logits(model, blocks)))[-len(tokens) :]


@torch.no_grad()
def blockwise_logits(model: PreTrainedModel, prompt: Tensor, tokens: Sequence[int], width: int) -> Tensor:
    """Return the logits of each new token, `[new tokens, vocab]`, by passes over `width` tokens each.

    As in speculative decoding, the first pass is over the prompt less its last token. A model that cannot continue in
    such passes reads the whole text in one.
    """
    following = torch.tensor([list(tokens)], device=prompt.device)
    read = torch.cat([prompt[:, -1:], following[:, :-1]], 1)
    before = [prompt[:, :-1]] if prompt.shape[1] > 1 else []
    return torch.cat(list(block_logits(model, [*before, *read.split(width, 1)])))[-len(tokens) :]
