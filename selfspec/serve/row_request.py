"""A request to the engine: a text to continue, how its tokens are chosen, and where it ends; and its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.arguments import check_callables, is_finite, shown
from selfspec.decode.group import Group
from selfspec.decode.processors import LogitBias
from selfspec.errors import PromptError, UnsupportedOptionError
from selfspec.serve.row_decoder import RowDecoder

_LEAST = 1e-6


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
        eos: token ids that end it; None: those of the model's generation config. The token is committed. One that the
            model's head does not write never comes.
        logprobs: how many of the likeliest tokens at each place are reported with their log-probabilities, beside the
            chosen one; None: nothing is.
        min_new_tokens: before which no token of `eos` is chosen.
        prediction: token ids that the new text is expected to be, which are drafted ahead of all other drafts; they
            change speed alone. None: nothing is predicted.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos: frozenset[int] | None = None
    logprobs: int | None = None
    min_new_tokens: int = 0
    prediction: tuple[int, ...] | None = None


def read_row(decoder: RowDecoder, request: RowRequest) -> Group:
    """Check a request and make its row.

    Raises:
        PromptError: the prompt is empty, has ids outside the vocabulary, or leaves no room in the context.
        UnsupportedOptionError: an option cannot be honoured, by name.
    """
    if not isinstance(request, RowRequest):
        raise UnsupportedOptionError(
            f"a request is a RowRequest, got {shown(request)}; write RowRequest(input_ids=(1, 2), max_new_tokens=16)"
        )
    if not isinstance(request.sampling, SamplingParams):
        raise UnsupportedOptionError(
            f"sampling must be a SamplingParams, got {shown(request.sampling)}; write SamplingParams(temperature=0.7)"
        )
    _check(request, decoder.vocabulary)
    return decoder.row(
        tuple(map(int, request.input_ids)),
        _options(request),
        request.sampling.seed,
        _kind(request),
        request.logprobs,
        request.prediction,
    )


def _options(request: RowRequest) -> dict[str, Any]:
    """Write the request as keywords of `generate`."""
    sampling = request.sampling
    options: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "max_length": None}
    greedy = sampling.temperature is not None and sampling.temperature == 0
    given = {
        "temperature": None if greedy else sampling.temperature,
        "top_k": None if greedy else sampling.top_k,
        "top_p": None if greedy else sampling.top_p,
        "min_p": None if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    options |= {name: value for name, value in given.items() if value is not None}
    if sampling.temperature is not None:
        options["do_sample"] = not greedy
    if isinstance(options.get("temperature"), Integral):
        options["temperature"] = float(options["temperature"])
    if request.min_new_tokens:
        options["min_new_tokens"] = request.min_new_tokens
    if request.eos is not None:
        options["eos_token_id"] = sorted(request.eos) or None
    processors: list[LogitsProcessor] = []
    if sampling.logit_bias:
        processors.append(LogitBias(sampling.logit_bias))
    if sampling.presence_penalty or sampling.frequency_penalty:
        penalty = OccurrencePenalty(len(request.input_ids), sampling.presence_penalty, sampling.frequency_penalty)
        processors.append(penalty)
    processors += sampling.processors
    if processors:
        options["logits_processor"] = processors
    return options


def _kind(request: RowRequest) -> tuple[object, ...]:
    """Make what is equal for requests whose processors are alike."""
    sampling = request.sampling
    filters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    # What keeps an end away knows the length of its prompt.
    least = (len(request.input_ids), request.min_new_tokens, request.eos) if request.min_new_tokens else ()
    return (*filters, *least, tuple(sorted(sampling.logit_bias.items())), tuple(map(id, sampling.processors)))


def _check(request: RowRequest, vocabulary: int) -> None:
    """Refuse what `generate` would not be shown."""
    if not isinstance(request.input_ids, tuple) or not all(_is_whole(token) for token in request.input_ids):
        raise PromptError(f"input_ids must be a tuple of token ids, got {shown(request.input_ids)}")
    if not all(_is_word(token) for token in request.input_ids):
        raise PromptError(f"input_ids hold a number of more than 64 bits: {shown(request.input_ids)}")
    if not _is_whole(request.max_new_tokens) or request.max_new_tokens < 1:
        raise UnsupportedOptionError(
            f"max_new_tokens must be an integer of at least 1, got {shown(request.max_new_tokens)}"
        )
    least = request.min_new_tokens
    if not _is_whole(least) or not 0 <= least <= request.max_new_tokens:
        raise UnsupportedOptionError(f"min_new_tokens must be an integer in 0..max_new_tokens, got {shown(least)}")
    eos = request.eos
    if eos is not None and not (isinstance(eos, frozenset) and all(_is_word(token) and token >= 0 for token in eos)):
        raise UnsupportedOptionError(f"eos must be a frozenset of token ids, got {shown(eos)}")
    logprobs = request.logprobs
    if logprobs is not None and not (_is_whole(logprobs) and 0 <= logprobs <= vocabulary):
        raise UnsupportedOptionError(f"logprobs must be an integer in 0..{vocabulary}, got {shown(logprobs)}")
    sampling = request.sampling
    if sampling.seed is not None and not _is_word(sampling.seed):
        raise UnsupportedOptionError(f"seed={shown(sampling.seed)} is no integer of 64 bits; pass e.g. seed=0")
    for name in ("presence_penalty", "frequency_penalty"):
        if not is_finite(getattr(sampling, name)):
            raise UnsupportedOptionError(f"{name} must be a finite number, got {shown(getattr(sampling, name))}")
    bias = sampling.logit_bias
    if not isinstance(bias, Mapping) or not all(
        _is_whole(token) and 0 <= token < vocabulary and is_finite(value) for token, value in bias.items()
    ):
        raise UnsupportedOptionError(
            f"logit_bias must map token ids below {vocabulary}, those that the head writes, to finite numbers, got "
            f"{shown(bias)}"
        )
    if sampling.temperature is not None and not (is_finite(sampling.temperature) and sampling.temperature >= 0):
        raise UnsupportedOptionError(
            f"temperature must be a finite number of at least 0, got {shown(sampling.temperature)}; 0 is greedy"
        )
    for name in ("temperature", "repetition_penalty"):
        value = getattr(sampling, name)
        if value is not None and is_finite(value) and 0 < value < _LEAST:
            raise UnsupportedOptionError(
                f"{name} must be at least {_LEAST}, got {shown(value)}: scores are divided by it"
            )
    check_callables("processors", sampling.processors)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return _is_whole(value) and -(2**63) <= value < 2**63


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
