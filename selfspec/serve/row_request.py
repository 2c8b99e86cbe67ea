"""A request to the engine: a text to continue, how its tokens are chosen, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from transformers import LogitsProcessor


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one row are chosen. What is None is as in `generate`: as the model's generation config says.

    Attributes:
        temperature: 0: greedy decoding.
        top_k: tokens to choose among; 0: all.
        top_p: mass of the nucleus; 1: all.
        min_p: the least chance, of the largest; 0: any.
        seed: makes the row repeatable, whatever runs beside it and whatever drafts: its tokens are those of
            `spec.generate(..., seed=seed, accept="coupled")`. None: tokens are drawn by a seed of the engine's own,
            with the rule that accepts most.
        logit_bias: what is added to the logit of a token, by its id.
        presence_penalty: what is taken from the logits of tokens that are among the new ones.
        frequency_penalty: the same, for each time that they are.
        repetition_penalty: divides positive logits of tokens in the text, prompt included; multiplies others.
        processors: further logits processors, of this row alone: those with memory, such as grammars, are called once
            for each committed token, in order. They run after the penalties and before temperature and filters.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    processors: tuple[LogitsProcessor, ...] = ()


@dataclass(frozen=True)
class RowRequest:
    """One row.

    Attributes:
        input_ids: the prompt, at least one token.
        max_new_tokens: the most tokens it grows by, at least 1.
        sampling: how its tokens are chosen.
        eos: token ids that end it; None: those of the model's generation config. The token is committed.
        logprobs: how many of the likeliest tokens at each place are reported with their log-probabilities, beside the
            chosen one; None: nothing is.
        min_new_tokens: before which no token of `eos` is chosen.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos: frozenset[int] | None = None
    logprobs: int | None = None
    min_new_tokens: int = 0
