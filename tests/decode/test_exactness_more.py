"""Exactness where a bias is small or the text does not show it: many draws from a network that costs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import Altered, Propose
from helpers.joints import Warp, holm_rejects, p_value
from helpers.tiny import in_turns
from helpers.tiny_joint import PROMPT, ROWS, TOKENS, joint, network
from selfspec.draft import Budget, Draft, Drafter

WARM, SHARP = Warp(temperature=1.5), Warp(temperature=0.7)
FILTERED = Warp(temperature=1.4, top_k=4, top_p=0.85)


def prompts(rows: int = ROWS) -> Tensor:
    return torch.tensor(PROMPT).expand(rows, -1)


def chance_by_q(draft: Draft) -> dict[tuple[int, ...], float]:
    """The joint of drafted texts that the draft itself claims: q of each position given the tokens before it."""
    assert draft.probs is not None
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for position in range(draft.length):
        rows = {tuple(before): row for row, before in enumerate(draft.tokens[:, :position].tolist())}
        texts = {
            (*text, token): chance * probability
            for text, chance in texts.items()
            # A text that was never drafted has no q that could be looked at.
            for token, probability in enumerate(draft.probs[rows[text], position].tolist() if text in rows else [1.0])
        }
    return texts


DRAFTERS = (
    selfspec.drafts.EarlyExit(1),
    selfspec.drafts.LayerSkip(attention=[1]),
    selfspec.drafts.LowPrecision(4),
    selfspec.drafts.LowPrecision(8, fewer=selfspec.drafts.EarlyExit(1)),
)


@pytest.mark.contract
@pytest.mark.parametrize(("drafter", "warp"), in_turns(DRAFTERS, (WARM, SHARP, FILTERED), mark=pytest.mark.statistical))
def test_a_draft_is_drawn_from_the_q_it_is_scored_with(drafter: Drafter, warp: Warp) -> None:
    kept: list[Draft] = []

    def keeping(propose: Propose, batch: Any, budget: Budget) -> Draft:
        kept.append(propose(batch, budget))
        return kept[-1]

    # Kernels in fewer bits take no smaller width.
    width = 32 if isinstance(drafter, selfspec.drafts.LowPrecision) else 8
    spec = selfspec.wrap(network(width=width), Altered(drafter, keeping), draft_length=TOKENS)
    next(spec.stream(prompts(2 * ROWS), max_new_tokens=TOKENS + 1, seed=0, **warp.options))
    (draft,) = kept
    assert p_value(map(tuple, draft.tokens.tolist()), chance_by_q(draft)) > 1e-3


def pairs(rows: list[tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
    return (one + other for one, other in zip(rows[::2], rows[1::2], strict=True))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.statistical
def test_rows_of_one_prompt_are_independent_samples(rule: str) -> None:
    model, found = network(), {}
    single: dict[tuple[int, ...], float] = {}
    for text, chance in joint(model, WARM).items():
        single[text[:2]] = single.get(text[:2], 0.0) + chance
    together = {one + other: single[one] * single[other] for one in single for other in single}
    for length in (1, 2):
        spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(1), draft_length=length, accept=rule)
        out = spec.generate(prompts(2 * ROWS), max_new_tokens=2, seed=length, **WARM.options)
        found[str(length)] = p_value(pairs(list(map(tuple, out.sequences[:, 2:].tolist()))), together)
    assert holm_rejects(found, 0.01) == [], found


@pytest.mark.parametrize(
    "draft",
    [selfspec.drafts.EarlyExit(3), selfspec.drafts.LayerSkip(mlp=[2]), selfspec.drafts.LowPrecision(4, layers=[3])],
    ids=str,
)
def test_coupled_drafts_are_accepted_as_often_as_is_promised(llama: PreTrainedModel, draft: Drafter) -> None:
    spec = selfspec.wrap(llama, draft, draft_length=4, accept="coupled")
    stats = spec.generate(
        tiny.prompt(4, batch=32), max_new_tokens=60, do_sample=True, top_k=None, temperature=2.0, seed=0
    ).stats
    # (1 - TV) / (1 + TV) is convex in 1 - TV, so the mean over places is no less than this of the mean.
    optimum = stats.optimal_acceptance_rate
    assert stats.judged > 1000
    assert stats.acceptance_rate < optimum < 1
    assert stats.to_dict()["optimal_acceptance_rate"] == optimum
    assert stats.acceptance_rate > optimum / (2 - optimum) - 0.05
