"""A request to the engine: a text to continue, and how, in the words of `generate`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.arguments import is_finite, shown
from selfspec.errors import PromptError, UnsupportedOptionError

# Options of `generate` that mean the same for a row that runs beside others.
_OPTIONS = frozenset(
    {
        "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids", "sequence_bias",
        "renormalize_logits", "min_new_tokens", "eos_token_id", "logits_processor",
    }
)  # fmt: skip

_LEAST = 1e-6


@dataclass(frozen=True)
class RowRequest:
    """One row.

    Attributes:
        input_ids: the prompt, at least one token.
        max_new_tokens: the most tokens it grows by, at least 1.
        options: keywords of `generate` that say how its tokens are chosen and which of them end it, with the meaning
            and the defaults that they have there. Its `logits_processor` are of this row alone: those with memory, such
            as grammars, are called once for each committed token, in order.
        seed: makes the row repeatable, whatever runs beside it and whatever drafts: its tokens are those of
            `spec.generate(..., seed=seed, accept="coupled")`. None: tokens are drawn by a seed of the engine's own,
            with the rule that accepts most.
        logprobs: how many of the likeliest tokens at each place are reported with their log-probabilities, beside the
            chosen one; None: nothing is.
        prediction: token ids that the new text is expected to be, which are drafted ahead of all other drafts; they
            change speed alone. None: nothing is predicted.
        drafts: whether anything drafts for it; such rows and others wait for each other.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    logprobs: int | None = None
    prediction: tuple[int, ...] | None = None
    drafts: bool = True

    @property
    def kind(self) -> Hashable:
        """A key that requests share whose processors are alike, where these read scores alone."""
        plain = (bool, int, float, list, tuple, dict, type(None))
        # Arrays are not written out in full.
        said: dict[str, Hashable] = {
            name: repr(each) if isinstance(each, plain) else object() for name, each in self.options.items()
        }
        said["logits_processor"] = tuple(map(id, self.options.get("logits_processor") or ()))
        return frozenset(said.items())

    def check(self, vocabulary: int) -> None:
        """Refuse what `generate` would not be shown; its model's head writes the ids below `vocabulary`.

        Raises:
            PromptError: the prompt is no tuple of token ids.
            UnsupportedOptionError: a field or an option cannot be honoured, by name.
        """
        if not isinstance(self.input_ids, tuple) or not all(map(_is_word, self.input_ids)):
            raise PromptError(f"input_ids must be a tuple of token ids, got {shown(self.input_ids)}")
        if not _is_word(self.max_new_tokens) or self.max_new_tokens < 1:
            raise UnsupportedOptionError(
                f"max_new_tokens must be an integer of at least 1, got {shown(self.max_new_tokens)}"
            )
        if not isinstance(self.options, Mapping):
            raise UnsupportedOptionError(f'options must be a mapping such as {{"top_k": 5}}, got {shown(self.options)}')
        unknown = next((name for name in self.options if name not in _OPTIONS), None)
        if unknown is not None:
            known = ", ".join(sorted(_OPTIONS))
            raise UnsupportedOptionError(f"options: a row takes no {shown(unknown)}; it takes {known}")
        for name in ("temperature", "repetition_penalty"):
            value = self.options.get(name)
            if value is not None and is_finite(value) and 0 < value < _LEAST:
                raise UnsupportedOptionError(
                    f"{name} must be at least {_LEAST}, got {shown(value)}: scores are divided by it"
                )
        if self.logprobs is not None and not (_is_word(self.logprobs) and 0 <= self.logprobs <= vocabulary):
            raise UnsupportedOptionError(f"logprobs must be an integer in 0..{vocabulary}, got {shown(self.logprobs)}")
        if self.seed is not None and not _is_word(self.seed):
            raise UnsupportedOptionError(f"seed={shown(self.seed)} is no integer of 64 bits; pass e.g. seed=0")


def _is_word(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63


class OccurrencePenalty(LogitsProcessor):
    """Subtracts `presence` from a token's logit if it occurs after the prompt, and `frequency` for each occurrence."""

    stateless = True

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt = prompt
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, `[rows, vocab]`, minus penalties; `input_ids` is each row's text, `[rows, length]`."""
        new = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._presence * (counts > 0) - self._frequency * counts
