"""Suppress tokens like the processors of `transformers`, but without searching the vocabulary in every call.

Speech models suppress about 90 of 50,000 tokens at each place, also in drafts; looking each up would take a large part
of a draft step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, generation


class Suppression(LogitsProcessor):
    """Suppresses tokens.

    Args:
        tokens: their ids.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._mask = torch.empty(0, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, `[rows, vocab]`, with -inf for the tokens."""
        if self._mask.shape != scores.shape[-1:] or self._mask.device != scores.device:
            self._mask = torch.isin(torch.arange(scores.shape[-1], device=scores.device), self.tokens.to(scores.device))
        return torch.where(self._mask, -torch.inf, scores)


class SuppressionAt(Suppression):
    """Suppresses tokens at one place of the text.

    Args:
        tokens: their ids.
        place: number of tokens before the place.
    """

    def __init__(self, tokens: Tensor, place: int) -> None:
        super().__init__(tokens)
        self.place = place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, `[rows, vocab]`, with -inf for the tokens if this is the place."""
        return super().__call__(input_ids, scores) if input_ids.shape[-1] == self.place else scores


def without_search(processor: LogitsProcessor) -> LogitsProcessor:
    """Return a faster processor with the same scores; the processor itself if there is none."""
    # Exact classes: a subclass may do anything.
    if type(processor) is generation.SuppressTokensLogitsProcessor:
        return Suppression(processor.suppress_tokens)
    if type(processor) is generation.SuppressTokensAtBeginLogitsProcessor:
        return SuppressionAt(processor.begin_suppress_tokens, processor.begin_index)
    return processor
