"""Texts that a model writes from prompts, which drafts meet as it generates; and how far they repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.device import has_streams
from selfspec.measure.stock import bare, end_tokens, until_end
from selfspec.measure.watch import Watch

# Shorter repeats are ordinary text: indentation, brackets, digits.
_RUN = 8


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
