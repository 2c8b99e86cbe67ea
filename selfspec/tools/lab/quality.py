"""What texts are worth: how likely the model itself finds them, arm by arm on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from selfspec.measure.estimate import Estimate, holm_rejects
from selfspec.measure.stock import bare
from selfspec.tools.lab.arms import ArmSpec
from selfspec.tools.lab.cell import Prompts
from selfspec.tools.lab.record import Record

_LEVEL = 0.05


@dataclass(frozen=True)
class TextQuality:
    """The texts of an arm beside those of plain decoding on the same prompts.

    Attributes:
        perplexity: of all texts under the model, with a 95 % interval by a bootstrap over prompts.
        against_plain: its ratio to plain decoding's, prompt by prompt; None of plain decoding itself.
        p_value: the chance of a ratio as far from 1 if neither were better, by a permutation test of signs.
    """

    perplexity: Estimate
    against_plain: Estimate | None = None
    p_value: float | None = None


@torch.no_grad()
def nats_of(
    model: PreTrainedModel, prompts: Sequence[Prompts], texts: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """Return the negative log-likelihood of each text under the stock model at temperature 1, by call and row."""
    stock = bare(model)
    found: list[list[float]] = []
    for asked, rows in zip(prompts, texts, strict=True):
        found.append([])
        for prompt, row in zip(asked.rows, rows, strict=True):
            ids = torch.tensor([[*prompt, *row]], device=model.device)
            logits = stock(ids).logits[0, len(prompt) - 1 : -1]
            likelihoods = logits.float().log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
            found[-1].append(-float(likelihoods.sum()))
    return found


def qualities(arms: Sequence[Record]) -> dict[ArmSpec, TextQuality]:
    """Return what is known of the arms of a cell whose texts were scored."""
    scored = {record.arm: record for record in arms if record.nats}
    plain = next((record for record in scored.values() if record.arm.kind == "plain"), None)
    return {arm: _quality(record, plain) for arm, record in scored.items()}


def differing(found: Mapping[ArmSpec, TextQuality]) -> list[ArmSpec]:
    """Return the arms that differ from plain decoding by more than chance, at 5 % for all of them together (Holm)."""
    compared = {arm: each.p_value for arm, each in found.items() if each.p_value is not None}
    rejected = holm_rejects(list(compared.values()), _LEVEL)
    return [arm for arm, rejects in zip(compared, rejected, strict=True) if rejects]


def _quality(record: Record, plain: Record | None) -> TextQuality:
    nats, tokens = _by_prompt(record)
    perplexity = _exp(Estimate.of_ratio(nats, tokens))
    if plain is None or record is plain:
        return TextQuality(perplexity)
    # Of each prompt a mean over tokens, since texts of two arms end at different places.
    own, other = ([n / t for n, t in zip(*_by_prompt(each), strict=True)] for each in (record, plain))
    pairs = [one - two for one, two in zip(own, other, strict=True)]
    return TextQuality(perplexity, _exp(Estimate.of_ratio(pairs, [1.0] * len(pairs))), p_value(pairs))


def _by_prompt(record: Record) -> tuple[list[float], list[float]]:
    """Nats and tokens of each prompt, all repeats together."""
    nats = [[each for call in repeat for each in call] for repeat in record.nats]
    tokens = [[float(len(row)) for call in repeat for row in call] for repeat in record.texts]
    return np.sum(nats, 0).tolist(), np.sum(tokens[: len(nats)], 0).tolist()


def p_value(pairs: Sequence[float], draws: int = 9_999) -> float:
    """Return the chance of a mean as far from 0 if either sign of each difference were as likely (Fisher, 1935)."""
    from scipy.stats import permutation_test

    if len(pairs) < 2:
        return 1.0
    how = {"permutation_type": "samples", "n_resamples": draws, "rng": np.random.default_rng(0)}
    return float(permutation_test((np.array(pairs),), np.mean, **how).pvalue)


def _exp(estimate: Estimate) -> Estimate:
    ends = math.exp
    return replace(estimate, value=ends(estimate.value), low=ends(estimate.low), high=ends(estimate.high))
