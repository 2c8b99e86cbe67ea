"""Texts that a model writes on from prompts: what its drafts meet when it generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.measure.progress import Unwatched, Watch
from selfspec.measure.stock import bare


@dataclass(frozen=True)
class Continuation:
    """A text, and where drafts begin to be judged on it.

    Attributes:
        ids: token ids, `[1, tokens]`.
        prompt: tokens of the prompt, at least 1; the tokens after them are judged.
    """

    ids: Tensor
    prompt: int = 1


def own_text(model: PreTrainedModel, prompts: Tensor, new_tokens: int, temperature: float, seed: int = 0) -> Tensor:
    """Let the stock model continue prompts of one length, without top-k, top-p or other defaults of its own.

    Nothing ends a text early. Prompts are `[texts, prompt]`, on its device; at temperature 0 it writes greedily.

    Returns:
        `[texts, prompt + new tokens]`.
    """
    sampled = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    length = prompts.shape[1] + new_tokens
    config = GenerationConfig(do_sample=bool(sampled), max_length=length, eos_token_id=None, pad_token_id=0, **sampled)
    writer = bare(model)
    writer.generation_config = config
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()), enabled=bool(sampled)):
        if sampled:
            torch.manual_seed(seed)
        ids: Tensor = writer.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    return ids


def continued(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[Continuation]:
    """Let the stock model continue prompts of any lengths, each `[1, prompt]`, one by one, as `own_text` does.

    The seed is that of the first text; the others count on from it.
    """
    told = watch or Unwatched()
    told.begin(len(prompts))
    texts = []
    for number, prompt in enumerate(prompts):
        told.step("the model's own text")
        texts.append(Continuation(own_text(model, prompt, max_new_tokens, temperature, seed + number), prompt.shape[1]))
    return texts
