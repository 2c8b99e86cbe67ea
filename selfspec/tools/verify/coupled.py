"""Coupled sampling: at equal seeds, drafting gives the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.decode.noise import Noise
from selfspec.measure.progress import Watch
from selfspec.measure.stock import stepwise_logits
from selfspec.tools.verify.comparison import Check, ComparedTexts
from selfspec.tools.verify.drafts import DraftUnderTest
from selfspec.tools.verify.settings import Settings

# Enough halvings to find a gap of any size to the last bit that matters.
_WIDEST_GAP = 1000.0
_HALVINGS = 60


@dataclass(frozen=True)
class _Batch:
    """All prompts as one, left-padded: rows then advance by different amounts.

    Attributes:
        input_ids: `[prompts, longest]`.
        mask: 1 for tokens, 0 for padding, of the same shape.
    """

    input_ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Tensor]) -> _Batch:
        longest = max(prompt.shape[1] for prompt in prompts)
        padded = [torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts]
        masks = [torch.nn.functional.pad(torch.ones_like(prompt), (longest - prompt.shape[1], 0)) for prompt in prompts]
        return cls(torch.cat(padded), torch.cat(masks))


def check_coupled(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    tested: Sequence[DraftUnderTest],
    settings: Settings,
    watch: Watch,
) -> dict[str, dict[str, ComparedTexts]]:
    """Sample from all prompts, each `[1, prompt]`, in one batch, plainly and with every draft, and compare.

    Args:
        model: the stock model.
        prompts: where the texts begin.
        tested: what samples, plain decoding first.
        settings: rules, lengths and seed.
        watch: is told of the steps.

    Returns:
        What agreed, by draft and coupling rule.

    Raises:
        NonFiniteLogitsError: logits became NaN or infinite.
    """
    batch = _Batch.of(prompts)
    plain, *drafting = tested
    agreed: dict[str, dict[str, ComparedTexts]] = {each.name: {} for each in drafting}
    for rule in settings.coupled_rules:
        watch.step(f"{rule} sampling: plain decoding")
        expected = _sampled(plain, batch, rule, settings)
        for each in drafting:
            watch.step(f"{rule} sampling: {each.name}")
            found = _sampled(each, batch, rule, settings)
            compared = agreed[each.name][rule] = ComparedTexts(Check.COUPLED, each.name, rule)
            for row, (own, other) in enumerate(zip(expected, found, strict=True)):

                def gap(index: int, row: int = row, own: list[int] = own, other: list[int] = other) -> float:
                    return _gap(model, prompts[row], row, own[: index + 1], other[index], settings.seed)

                compared.add(row, own, other, gap)
    return agreed


def _sampled(tested: DraftUnderTest, batch: _Batch, rule: str, settings: Settings) -> list[list[int]]:
    output = tested.spec.generate(
        batch.input_ids,
        batch.mask,
        max_new_tokens=settings.max_new_tokens,
        do_sample=True,
        # At temperature 1 gaps are in logits, and no filter takes a token away.
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=settings.seed,
        accept=rule,
    )
    start = batch.input_ids.shape[1]
    return [new[:length] for new, length in zip(output.sequences[:, start:].tolist(), output.lengths, strict=True)]


def _gap(model: PreTrainedModel, prompt: Tensor, row: int, own: list[int], other: int, seed: int) -> float:
    """What the logit of one of two tokens would have to rise by, for the noise of the place to choose the other.

    Args:
        model: the stock model, whose one-token passes say how likely the two are.
        prompt: `[1, prompt]`.
        row: of the batch, which the noise depends on.
        own: new tokens up to the one in question.
        other: the token in its place.
        seed: of the noise.
    """
    p = stepwise_logits(model, prompt, own)[-1].float().softmax(-1).double()
    noise = Noise(seed, [row], prompt.device)
    position = torch.tensor([[prompt.shape[1] + len(own) - 1]], device=prompt.device)

    def other_wins(raised: float) -> bool:
        weights = torch.zeros(1, 1, len(p), dtype=p.dtype, device=p.device)
        weights[0, 0, own[-1]] = p[own[-1]] * torch.tensor(-raised / 2).double().exp()
        weights[0, 0, other] = p[other] * torch.tensor(raised / 2).double().exp()
        return int(noise.choose(weights, position).item()) == other

    low, high = -_WIDEST_GAP, _WIDEST_GAP
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if other_wins(middle) else (middle, high)
    return abs(high)
