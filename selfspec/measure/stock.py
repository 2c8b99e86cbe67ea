"""Texts and passes of the stock model, the reference that shares nothing with selfspec's decoding."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.device import has_streams
from selfspec.measure.watch import Watch
from selfspec.model.stock_passes import block_logits

# Shorter repeats are ordinary text: indentation, brackets, digits.
_RUN = 8


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


@dataclass(frozen=True)
class Continuation:
    """A text, `[1, tokens]`; drafts are judged on the tokens behind its prompt, which has at least one."""

    ids: Tensor
    prompt: int = 1


def own_text(
    model: PreTrainedModel,
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    seed: int = 0,
    mask: Tensor | None = None,
) -> Tensor:
    """Let the stock model continue prompts, without generation defaults such as top-k; at temperature 0 greedily.

    Nothing ends a text early. Prompts are `[texts, prompt]`, shorter ones padded on the left, where the mask is 0; the
    result is `[texts, prompt + new tokens]`.
    """
    sampled = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    length = prompts.shape[1] + new_tokens
    config = GenerationConfig(do_sample=bool(sampled), max_length=length, eos_token_id=None, pad_token_id=0, **sampled)
    writer, mask = bare(model), torch.ones_like(prompts) if mask is None else mask
    writer.generation_config = config
    with random_state_kept() if sampled else nullcontext():
        if sampled:
            torch.manual_seed(seed)
        ids: Tensor = writer.generate(prompts, attention_mask=mask, generation_config=config)
    return ids


def continued(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[Continuation]:
    """Let the stock model continue prompts, each `[1, prompt]`, one by one, up to where it ends the text.

    The seed is that of the first text; the others count on from it.
    """
    progress = watch or Watch()
    progress.begin(len(prompts))
    texts = []
    for number, prompt in enumerate(prompts):
        progress.step("the model's own text")
        ids, first = own_text(model, prompt, max_new_tokens, temperature, seed + number), prompt.shape[1]
        written = until_end(ids[0, first:].tolist(), end_tokens(model))
        texts.append(Continuation(ids[:, : first + len(written)], first))
    return texts


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of runs of eight tokens that came before (rep-n of Welleck et al., 2019); 0 where none is."""
    runs = [*zip(*(tokens[place:] for place in range(_RUN)), strict=False)]
    return 1 - len({*runs}) / len(runs) if runs else 0.0


def random_state_kept() -> AbstractContextManager[None]:
    """Return a context that restores the states of torch's generators, on the host and on all devices."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or not has_streams(found):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=range(torch.accelerator.device_count()), device_type=found.type)
