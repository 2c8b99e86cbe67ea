"""Logits processors that other engines offer as simple parameters: biases, and penalties for tokens that occurred."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


class LogitBias(LogitsProcessor):
    """Adds biases to the logits of some tokens at every place.

    Args:
        biases: by token id.
    """

    stateless = True

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens = torch.tensor(list(biases))
        self._biases = torch.tensor(list(biases.values()))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, `[rows, vocab]`, with the biases added."""
        biased = scores.clone()
        biased[:, self._tokens.to(scores.device)] += self._biases.to(scores)
        return biased


class OccurrencePenalty(LogitsProcessor):
    """Lowers the logits of tokens that occur in the new text: once per token, and once per occurrence.

    Args:
        prompt: number of prompt tokens, which do not count.
        presence: subtracted from the logit of each token that occurs.
        frequency: subtracted once for each occurrence.
    """

    stateless = True

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt = prompt
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, `[rows, vocab]`, minus the penalties; `input_ids` is each row's text, `[rows, length]`."""
        new = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._presence * (counts > 0) - self._frequency * counts
