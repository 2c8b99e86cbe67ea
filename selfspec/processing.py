"""Logits processors of `transformers`, applied to every place of a block as plain decoding would apply them there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    ClassifierFreeGuidanceLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from selfspec.errors import UnsupportedOptionError
from selfspec.text import Prefixes


class Processing(Protocol):
    """Turns the logits of a block into scores."""

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """The scores of each place, float32 as in `transformers`.

        Args:
            logits: `[rows, places, vocab]`, any floating dtype, of the rows that passes run.
            prefixes: what stands before each place.

        Returns:
            `[rows, places, vocab]`. Places after the end of a row hold anything.
        """
        ...


@dataclass(frozen=True)
class Warping:
    """Processors that look at the scores alone: all places of a block go through them at once.

    Attributes:
        warpers: temperature, top-k, top-p, min-p and the like, in the order in which `transformers` applies them.
    """

    warpers: LogitsProcessorList

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """All places at once; the prefixes are not looked at."""
        scores = logits.float()
        if not self.warpers:
            return scores
        flat = scores.flatten(0, 1)
        no_prefix = torch.empty(flat.shape[0], 0, dtype=torch.long, device=flat.device)
        # One by one: the list would look at the signature of each anew, which takes longer than what they do.
        for warper in self.warpers:
            flat = warper(no_prefix, flat)
        return flat.reshape(scores.shape)


@dataclass(frozen=True)
class PrefixProcessing:
    """Processors that read the prefix of a place: each length of prefix is a call of its own.

    A call holds the whole batch, as in `transformers`, so that processors which keep something for each row find it.
    Rows that have no place at that length are there too, cut or padded to it, and what they get is not used; rows that
    passes run no more have zeros for scores. Prefixes
    are known on the host, so each block waits for the device.

    Attributes:
        processors: in the order in which `transformers` applies them. Taken to be functions of ids and scores, for
            they also see draft tokens that are rejected later.
        eos: token ids that end a row; what a draft holds after one is no prefix of anything.
        limit: length, prompt included, at which rows end.
    """

    processors: LogitsProcessorList
    eos: frozenset[int]
    limit: int

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Place by place, each with its whole prefix."""
        scores = logits.float()
        runs = prefixes.runs()
        ids = prefixes.text.followed_by(runs)
        # The first place of the block comes before the last `places - 1` tokens of the draft.
        skipped = prefixes.length + 1 - logits.shape[1]
        first = [prefixes.text.length(row) + skipped for row in range(len(runs))]
        last = [prefixes.text.length(row) + self._before_end(run) for row, run in enumerate(runs)]
        running = prefixes.text.rows
        processed = scores.clone()
        for length in range(min(first), min(max(last), self.limit - 1) + 1):
            asked = [
                index
                for index, row in enumerate(running)
                if prefixes.text.live[row] and first[row] <= length <= last[row]
            ]
            if not asked:
                continue
            places = [min(max(length - first[row], 0), logits.shape[1] - 1) for row in running]
            whole = scores.new_zeros(len(runs), scores.shape[-1])
            whole[running] = scores[range(len(running)), places]
            found = self._called(ids[:, :length], whole)
            processed[asked, [places[index] for index in asked]] = found[[running[index] for index in asked]]
        return processed

    def _called(self, ids: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = self.processors(ids.contiguous(), scores.to(ids.device))
        return found.to(scores.device)

    def _before_end(self, run: list[int]) -> int:
        """How many tokens of a run stand before anything that ends the row."""
        return next((index for index, token in enumerate(run) if token in self.eos), len(run))


# Processors that look at the scores alone. Their exact classes: one that derives from them may do anything.
_WARPERS = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        LogitNormalization,
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)
# Processors of `transformers` that remember earlier calls, or that need more than the ids and scores of the rows.
_REFUSED: Mapping[type[LogitsProcessor], str] = MappingProxyType(
    {
        UnbatchedClassifierFreeGuidanceLogitsProcessor: (
            "guidance_scale keeps a cache of its own, which grows with every call and cannot take back a draft"
        ),
        ClassifierFreeGuidanceLogitsProcessor: "it needs a batch of conditional and unconditional rows",
        SynthIDTextWatermarkLogitsProcessor: "it remembers earlier calls, and a draft's cannot be taken back",
        InfNanRemoveLogitsProcessor: (
            "remove_invalid_values hides broken logits; selfspec ends the row there and says so"
        ),
    }
)


def read_processing(processors: LogitsProcessorList, eos: frozenset[int], limit: int) -> Processing:
    """How the processors that `transformers` has prepared are applied.

    Args:
        processors: in the order in which they are applied.
        eos: token ids that end a row.
        limit: length, prompt included, at which rows end.

    Raises:
        UnsupportedOptionError: a processor is none of ids and scores alone, by name.
    """
    for processor in processors:
        reason = next((reason for kind, reason in _REFUSED.items() if isinstance(processor, kind)), None)
        if reason is not None:
            raise UnsupportedOptionError(
                f"the logits processor {type(processor).__name__} is not supported: {reason}; drop it or use "
                "model.generate"
            )
    if all(type(processor) in _WARPERS for processor in processors):
        return Warping(processors)
    return PrefixProcessing(processors, eos, limit)
