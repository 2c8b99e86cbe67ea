"""Counts what rounds of assisted generation of `transformers` drafted, and how much of it was accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator


@dataclass(frozen=True)
class AssistedRound:
    """One round: tokens drafted, and tokens accepted."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class AssistedText:
    """Prompt and text, `[1, tokens]`, and the rounds in order."""

    ids: Tensor
    rounds: list[AssistedRound]


def assisted(model: PreTrainedModel, draft: PreTrainedModel, ids: Tensor, length: int, **options: Any) -> AssistedText:
    """Generate from a prompt, `[1, tokens]`, with an assistant that always drafts `length` tokens."""
    rounds: list[AssistedRound] = []
    stock = AssistedCandidateGenerator.update_candidate_strategy

    def counted(self: Any, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        rounds.append(AssistedRound(scores.shape[1] - 1, int(num_matches)))
        stock(self, input_ids, scores, num_matches)

    draft.generation_config.num_assistant_tokens = length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0
    AssistedCandidateGenerator.update_candidate_strategy = counted
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = stock
    return AssistedText(out, rounds)
