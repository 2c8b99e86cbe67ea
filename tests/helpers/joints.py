"""Settings of sampling, models with five tokens, and the exact joint of what they generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny

VOCAB, EOS, PAD = 5, 4, 0


TOKENS = 4


ROWS, BATCHES = 512, 8


PROMPTS = ((1, 2, 3), (2, 1, 4, 3, 1, 2))


def small(**options: Any) -> PreTrainedModel:
    return tiny.llama(vocab_size=VOCAB, num_hidden_layers=3, initializer_range=0.25, **options)


@dataclass(frozen=True)
class Warp:
    """A sampling setting, as `generate` takes it and as this file computes it by hand."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k or None,
            "top_p": self.top_p,
            "min_p": self.min_p or None,
        }

    def distribution(self, logits: Tensor) -> list[float]:
        p = (logits / self.temperature).softmax(-1)
        order = p.argsort(descending=True).tolist()
        kept = order[: self.top_k or None]
        p = torch.where(torch.isin(torch.arange(len(p)), torch.tensor(kept)), p, 0.0)
        p = p / p.sum()
        before, nucleus = 0.0, []
        for token in kept:
            if before < self.top_p:
                nucleus.append(token)
            before += float(p[token])
        p = torch.where(torch.isin(torch.arange(len(p)), torch.tensor(nucleus)), p, 0.0)
        p = p / p.sum()
        p = torch.where(p >= self.min_p * p.max(), p, 0.0)
        return (p / p.sum()).tolist()


@torch.no_grad()
def joint(model: PreTrainedModel, prompt: tuple[int, ...], warp: Warp, eos: int | None) -> dict[tuple[int, ...], float]:
    """Probability of every possible output of `TOKENS` tokens, padded after the end, from plain forward passes."""
    outputs: dict[tuple[int, ...], float] = {}
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        if not prefixes:
            break
        batch = torch.tensor([prompt + prefix for prefix in prefixes])
        logits = model(batch).logits[:, -1]
        longer: dict[tuple[int, ...], float] = {}
        for (prefix, chance), scores in zip(prefixes.items(), logits, strict=True):
            for token, probability in enumerate(warp.distribution(scores)):
                if probability == 0:
                    continue
                if token == eos:
                    ended = (*prefix, token)
                    outputs[ended + (PAD,) * (TOKENS - len(ended))] = chance * probability
                else:
                    longer[(*prefix, token)] = chance * probability
        prefixes = longer
    return {**outputs, **prefixes}


def padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts of `[1, length]` as one left-padded batch, and its mask."""
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    return ids, torch.tensor([[0] * (width - prompt.shape[1]) + [1] * prompt.shape[1] for prompt in prompts])


def assert_rows_are_stock(
    model: PreTrainedModel, spec: selfspec.SelfSpeculative, prompts: list[Tensor], **options: Any
) -> None:
    """Every row of a batch is what `model.generate` gives for its prompt alone, and then padding."""
    options = {"do_sample": False, "pad_token_id": 0, **options}
    ids, mask = padded(prompts)
    together = spec.generate(ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :]
        end = ids.shape[1] + together.lengths[row]
        assert torch.equal(together.sequences[row, ids.shape[1] : end], alone)
        assert (together.sequences[row, end:] == 0).all()
