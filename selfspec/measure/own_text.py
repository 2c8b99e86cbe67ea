"""Texts that a model writes on from some prompts: what its drafts meet when it generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.measure.continuation import Continuation
from selfspec.measure.progress import Unwatched, Watch
from selfspec.measure.stock import bare
from selfspec.model.adapter import Adapter


def continued(
    model: PreTrainedModel,
    adapter: Adapter,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[Continuation]:
    """Prompts continued by the model itself, plainly, without filters of its own.

    Args:
        model: writes.
        adapter: where its layers are.
        prompts: token ids, each `[1, prompt]`, on the model's device.
        max_new_tokens: tokens of each continuation; nothing ends it early.
        temperature: 0 writes greedily.
        seed: of the first text; the next ones count on from it.
        watch: is told of each text.

    Raises:
        PromptError, UnsupportedModelError: before any forward pass.
    """
    spec, told = wrap(bare(model), adapter=adapter), watch or Unwatched()
    options: dict[str, Any] = {"do_sample": temperature > 0, "eos_token_id": None, "max_new_tokens": max_new_tokens}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    told.begin(len(prompts))
    texts = []
    for number, prompt in enumerate(prompts):
        told.step("the model's own text")
        output = spec.generate(prompt, seed=seed + number, **options)
        texts.append(Continuation(output.sequences, prompt.shape[1]))
    return texts
