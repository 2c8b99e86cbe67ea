"""Settings of sampling, models with five tokens, the exact joint of what they generate, and how well samples fit it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny

VOCAB, EOS, PAD, TOKENS = 5, 4, 0, 4
ROWS, BATCHES = 512, 8
Text = tuple[int, ...]
PROMPTS: tuple[Text, ...] = ((1, 2, 3), (2, 1, 4, 3, 1, 2))
EQUALLY_LONG: tuple[Text, ...] = ((1, 1, 1), (1, 0, 2))
"""Rows of these are at one place, so that they can be kept in lockstep."""


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


@dataclass(frozen=True)
class Drawn:
    """What a wrapper drew, padded after the end, by prompt."""

    texts: dict[Text, list[Text]]
    accepted: int
    judged: int

    def fits(self, exact: Callable[[Text], dict[Text, float]]) -> dict[str, float]:
        return {str(prompt): p_value(texts, exact(prompt)) for prompt, texts in self.texts.items()}


def drawn(
    spec: selfspec.SelfSpeculative,
    prompts: Sequence[Text] = PROMPTS,
    *,
    rows: int = ROWS,
    batches: int = BATCHES,
    seed: int = 0,
    tokens: int = TOKENS,
    fresh: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Drawn:
    """Draw texts of prompts, which take turns in the rows of each batch, left-padded where they differ in length.

    `fresh` makes options anew for each batch.
    """
    ids, mask = padded([torch.tensor([prompts[row % len(prompts)]]) for row in range(rows)])
    options = {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": PAD, "attention_mask": mask, **options}
    texts: dict[Text, list[Text]] = {prompt: [] for prompt in prompts}
    accepted = judged = 0
    for batch in range(batches):
        output = spec.generate(ids, seed=seed + batch, **options, **fresh())
        new = output.sequences[:, ids.shape[1] :]
        for row, text in enumerate(torch.nn.functional.pad(new, (0, tokens - new.shape[1]), value=PAD).tolist()):
            texts[prompts[row % len(prompts)]].append(tuple(text))
        accepted, judged = accepted + output.stats.accepted, judged + output.stats.judged
    return Drawn(texts, accepted, judged)


def p_values(
    spec: selfspec.SelfSpeculative, warp: Warp, eos: int | None = None, tokens: int = TOKENS, **drawing: Any
) -> dict[str, float]:
    """How well what a wrapper draws fits the joint of each prompt; keywords are those of `drawn`."""
    found = drawn(spec, eos_token_id=eos, tokens=tokens, **warp.options, **drawing)
    return found.fits(lambda prompt: joint(spec.model, prompt, warp, eos, tokens))


@torch.no_grad()
def enumerated(
    model: Callable[[Tensor], Any],
    prompt: Text,
    chances: Callable[[Text, Tensor], Sequence[float]],
    eos: int | None = None,
    tokens: int = TOKENS,
) -> dict[Text, float]:
    """Probability of every possible output, padded after the end, from plain forward passes.

    `chances` gives those of the tokens after a prefix, by the model's logits there.
    """
    outputs: dict[Text, float] = {}
    prefixes: dict[Text, float] = {(): 1.0}
    for _ in range(tokens):
        if not prefixes:
            break
        logits = model(torch.tensor([prompt + prefix for prefix in prefixes])).logits[:, -1]
        longer: dict[Text, float] = {}
        for (prefix, chance), scores in zip(prefixes.items(), logits, strict=True):
            for token, probability in enumerate(chances(prefix, scores)):
                if probability:
                    ended = token == eos
                    whole = (*prefix, token) + (PAD,) * (tokens - len(prefix) - 1) * ended
                    (outputs if ended else longer)[whole] = chance * probability
        prefixes = longer
    return {**outputs, **prefixes}


def joint(
    model: PreTrainedModel, prompt: Text, warp: Warp, eos: int | None = None, tokens: int = TOKENS
) -> dict[Text, float]:
    return enumerated(model, prompt, lambda _, logits: warp.distribution(logits), eos, tokens)


def padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts of `[1, length]` as one left-padded batch, and its mask."""
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    return ids, torch.tensor([[0] * (width - prompt.shape[1]) + [1] * prompt.shape[1] for prompt in prompts])


def assert_rows_are_stock(
    model: PreTrainedModel, spec: selfspec.SelfSpeculative, prompts: list[Tensor], **options: Any
) -> selfspec.GenerateOutput:
    """Every row of a batch, which is returned, is what `model.generate` gives for its prompt alone, then padding."""
    options = {"do_sample": False, "pad_token_id": 0, **options}
    ids, mask = padded(prompts)
    together = spec.generate(ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :]
        end = ids.shape[1] + together.lengths[row]
        assert torch.equal(together.sequences[row, ids.shape[1] : end], alone)
        assert (together.sequences[row, end:] == 0).all()
    return together


_SMALLEST_EXPECTED = 5.0


def p_value(observed: Iterable[tuple[int, ...]], joint: Mapping[tuple[int, ...], float]) -> float:
    """Probability of a fit this bad or worse if `observed` are draws from `joint`; 0 if one of them is impossible."""
    counts = Counter(observed)
    if any(joint.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    total = counts.total()
    cells: list[tuple[float, float]] = []
    pooled_observed, pooled_expected = 0.0, 0.0
    for outcome, probability in sorted(joint.items(), key=lambda item: item[1]):
        expected = total * probability
        if expected == 0:
            continue
        if expected < _SMALLEST_EXPECTED or 0 < pooled_expected < _SMALLEST_EXPECTED:
            pooled_observed += counts[outcome]
            pooled_expected += expected
        else:
            cells.append((counts[outcome], expected))
    if pooled_expected:
        cells.append((pooled_observed, pooled_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def holm_rejects(p_values: Mapping[str, float], level: float) -> list[str]:
    """Names whose hypothesis Holm's step-down procedure rejects at a family-wise `level`."""
    rejected = []
    for rank, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if value > level / (len(p_values) - rank):
            break
        rejected.append(name)
    return rejected


PAIR, THREE, MANY = (1, 2), 3, 8192
"""A prompt, new tokens and rows for `network`."""


def network(seed: int = 0, width: int = 8) -> PreTrainedModel:
    """Two layers of a small width over five tokens: thousands of rows a second."""
    return tiny.llama(
        vocab_size=5,
        num_hidden_layers=2,
        hidden_size=width,
        intermediate_size=width,
        num_attention_heads=1,
        num_key_value_heads=1,
        initializer_range=0.6,
        seed=seed,
    )


def brief_joint(model: PreTrainedModel, warp: Warp) -> dict[tuple[int, ...], float]:
    """Probability of every text of `THREE` tokens after `PAIR`."""
    return joint(model, PAIR, warp, tokens=THREE)
