"""Coupled sampling: at equal seeds, drafting gives the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from selfspec.api import SelfSpeculative
from selfspec.decode.noise import Noise
from selfspec.measure.expected_time import Watch
from selfspec.measure.stock import stepwise_logits
from selfspec.tools.verify.comparison import Check, Comparison
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.texts import sampled_texts


def check_coupled(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    tested: Mapping[str, SelfSpeculative],
    settings: Settings,
    watch: Watch,
) -> dict[str, dict[str, Comparison]]:
    """Sample from all prompts, each `[1, prompt]`, in one batch, by plain decoding and with every draft, and compare.

    Returns:
        What agreed, by draft and coupling rule. Of what is tested, plain decoding is the first.
    """
    rows = [prompt[0] for prompt in prompts]
    # Of different lengths, so that rows advance by different amounts.
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    compared: dict[str, dict[str, Comparison]] = {name: {} for name in tested}
    for rule in settings.coupled_rules:
        texts = {}
        for name, spec in tested.items():
            watch.step(f"{rule} sampling: {name}")
            texts[name] = sampled_texts(spec, ids, rule, settings.max_new_tokens, seed=settings.seed, mask=mask)
        plain, *drafting = texts.items()
        for name, found in drafting:
            compared[name][rule] = comparison = Comparison(Check.COUPLED, name, rule)
            for row, (own, other) in enumerate(zip(plain[1], found, strict=True)):
                comparison.add(row, own, other, partial(_gap, model, prompts[row], row, own, other, settings.seed))
    return compared


def _gap(
    model: PreTrainedModel, prompt: Tensor, row: int, own: Sequence[int], other: Sequence[int], seed: int, index: int
) -> float:
    """What a logit would have to rise by, for the noise of the place to choose the other of the tokens at an index.

    How likely they are is what the stock model's one-token passes say. The noise is that of a row of the batch.
    """
    logits = stepwise_logits(model, prompt, own[: index + 1])[-1].double()
    position = torch.tensor([[prompt.shape[1] + index]], device=prompt.device)
    race = logits - Noise(seed, [row], prompt.device).exponentials(position, len(logits))[0, 0].log()
    return abs((race[own[index]] - race[other[index]]).item())
