"""Confirming candidates: real generations in turns with plain decoding, where slow ones drop out early."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from selfspec.api import SelfSpeculative
from selfspec.control import CostAware
from selfspec.decode.stats import Stats
from selfspec.draft.named import PLAIN
from selfspec.measure.estimate import Estimate
from selfspec.measure.progress import Watch
from selfspec.tools.calibrate.candidates import Candidate
from selfspec.tools.calibrate.settings import Settings

# Arms that go on after the first timed turn, besides plain decoding.
_KEPT = 3
# Turns before the first timed one, in which programs are made of most kinds of passes that will come.
_WARM_UPS = 2


@dataclass(frozen=True)
class Confirmed:
    """What a candidate was worth in real generations.

    Attributes:
        name: of the draft.
        speedup: over plain decoding in turns with it: decoding without prefill, tokens a second over all prompts, with
            a bootstrap interval over prompts.
        acceptance_rate: share of judged draft tokens that were accepted; None without any.
        mean_accepted_length: tokens committed per target pass of a row.
        turns: times it went through all prompts, timed.
    """

    name: str
    speedup: Estimate
    acceptance_rate: float | None
    mean_accepted_length: float
    turns: int


@dataclass
class _Arm:
    """One way of decoding, and the seconds a token took, by prompt."""

    name: str
    spec: SelfSpeculative
    seconds: list[list[float]]
    stats: list[Stats] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        return [statistics.median(turns) for turns in self.seconds]


def confirm(
    plain: SelfSpeculative,
    candidates: Sequence[Candidate],
    prompts: Sequence[Batch],
    temperature: float,
    settings: Settings,
    told: Watch,
) -> list[Confirmed]:
    """Generate with each candidate and plainly, in turns.

    All warm up on all prompts. After the first timed turn only the fastest candidates go on.

    Args:
        plain: wraps the model without a draft.
        candidates: with measured costs.
        prompts: what is gone on with.
        temperature: 0 decodes greedily.
        settings: how much.
        told: of each generation.

    Returns:
        The candidates, fastest first.
    """
    reference = _Arm(PLAIN, plain, [[] for _ in prompts])
    arms = [
        _Arm(
            each.name, plain.drafting(each.draft, CostAware(settings.longest_draft, each.costs)), [[] for _ in prompts]
        )
        for each in candidates
    ]
    kept = min(len(arms), _KEPT)
    told.begin(len(prompts) * ((_WARM_UPS + 1) * (1 + len(arms)) + (settings.repeats - 1) * (1 + kept)))
    going = arms
    for turn in range(-_WARM_UPS, settings.repeats):
        for number, prompt in enumerate(prompts):
            running = [reference, *going]
            start = (turn + number) % len(running)
            for arm in [*running[start:], *running[:start]]:
                told.step(f"confirming {arm.name} at temperature {temperature:g}")
                stats = _generated(arm.spec, prompt, temperature, settings, settings.seed + number)
                if turn >= 0:
                    arm.seconds[number].append(_decoding(stats) / stats.new_tokens)
                    arm.stats.append(stats)
        if turn == 0:
            going = sorted(arms, key=lambda arm: sum(arm.medians))[:_KEPT]
    confirmed = [_confirmed(arm, reference) for arm in arms]
    return sorted(confirmed, key=lambda each: each.speedup.value, reverse=True)


@dataclass(frozen=True)
class Batch:
    """Prompts that are gone on with together.

    Attributes:
        ids: token ids, left-padded, `[batch, prompt]`.
        mask: 1 for tokens and 0 for padding, the same shape.
    """

    ids: Tensor
    mask: Tensor


def batches(prompts: Sequence[Tensor], rows: int, texts: int = 1) -> list[Batch]:
    """Prompts in batches.

    Where they do not fill the last one they come again, each a token shorter than before: rows that are the same would
    go on in step, as those of a real batch do not.

    Args:
        prompts: each `[1, prompt]`.
        rows: of a batch.
        texts: the least number of rows in all batches together.
    """
    grouped = []
    for start in range(0, max(len(prompts), texts), rows):
        times_and_prompts = [divmod(number, len(prompts)) for number in range(start, start + rows)]
        group = [_shortened(prompts[number][0], times) for times, number in times_and_prompts]
        longest = max(map(len, group))
        ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in group])
        mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in group])
        grouped.append(Batch(ids, mask))
    return grouped


def _shortened(prompt: Tensor, tokens: int) -> Tensor:
    return prompt[: max(1, len(prompt) - tokens)]


def generation_options(temperature: float, settings: Settings) -> dict[str, Any]:
    """Keywords of a generation whose length nothing but the settings decides."""
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": None,
        "do_sample": temperature > 0,
    }
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    return options


def _generated(spec: SelfSpeculative, prompt: Batch, temperature: float, settings: Settings, seed: int) -> Stats:
    options = generation_options(temperature, settings)
    return spec.generate(prompt.ids, attention_mask=prompt.mask, seed=seed, **options).stats


def _decoding(stats: Stats) -> float:
    return sum(seconds for phase, seconds in stats.seconds.items() if phase != "prefill")


def _confirmed(arm: _Arm, plain: _Arm) -> Confirmed:
    judged = sum(stats.judged for stats in arm.stats)
    return Confirmed(
        name=arm.name,
        speedup=Estimate.of_ratio(_beside(plain, arm), arm.medians),
        acceptance_rate=sum(stats.accepted for stats in arm.stats) / judged if judged else None,
        mean_accepted_length=sum(stats.new_tokens for stats in arm.stats)
        / sum(stats.row_rounds for stats in arm.stats),
        turns=len(arm.seconds[0]),
    )


def _beside(plain: _Arm, arm: _Arm) -> list[float]:
    """Plain decoding's seconds in those turns that the arm took part in."""
    return [statistics.median(turns[: len(own)]) for turns, own in zip(plain.seconds, arm.seconds, strict=True)]
