"""Apply logits processors of `transformers` to every place of a block, each as plain decoding would there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor, LogitsProcessorList, generation

from selfspec.arguments import check_scores
from selfspec.decode.stopping import Prefixes, first_end
from selfspec.errors import UnsupportedOptionError
from selfspec.runtime.request import Choice


class Suppression(LogitsProcessor):
    """Suppresses tokens like the processor of `transformers`, without a search of the vocabulary in every call."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        # Speech models suppress about 90 of 50,000 tokens; looking each up would take a large part of a draft step.
        self._mask = torch.empty(0, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._mask.shape != scores.shape[-1:] or self._mask.device != scores.device:
            self._mask = torch.isin(torch.arange(scores.shape[-1], device=scores.device), self.tokens.to(scores.device))
        return torch.where(self._mask, -torch.inf, scores)


class SuppressionAt(Suppression):
    """Suppresses tokens at one place of the text, after `place` tokens."""

    def __init__(self, tokens: Tensor, place: int) -> None:
        super().__init__(tokens)
        self.place = place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return super().__call__(input_ids, scores) if input_ids.shape[-1] == self.place else scores


def without_search(processor: LogitsProcessor) -> LogitsProcessor:
    """Return a faster processor with the same scores; the processor itself if there is none."""
    # Exact classes: a subclass may do anything.
    if type(processor) is generation.SuppressTokensLogitsProcessor:
        return Suppression(processor.suppress_tokens)
    if type(processor) is generation.SuppressTokensAtBeginLogitsProcessor:
        return SuppressionAt(processor.begin_suppress_tokens, processor.begin_index)
    return processor


class Processing(Protocol):
    """Turns the logits of a block of places into scores by processors, in the order of `transformers`."""

    @property
    def processors(self) -> LogitsProcessorList: ...

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Return the running rows' scores, `[rows, places, vocab]`, float32; after a row's end they are arbitrary."""
        ...


@dataclass(frozen=True)
class Warping:
    """Processors that depend on the scores alone, such as temperature, and process all places at once."""

    processors: LogitsProcessorList

    def scores(self, logits: Tensor, prefixes: Prefixes | None = None) -> Tensor:
        scores = logits.float()
        if not self.processors:
            return scores
        flat = scores.flatten(0, 1)
        no_prefix = torch.empty(flat.shape[0], 0, dtype=torch.long, device=flat.device)
        # Call them one by one: the list would inspect each signature again, which takes longer than the warper itself.
        for warper in self.processors:
            flat = warper(no_prefix, flat)
        return flat.reshape(scores.shape)


@dataclass(frozen=True)
class PrefixProcessing:
    """Processors that depend on the prefix of a place and are called once for each length of prefix.

    A call holds the whole batch, so that processors with data for each row find it: rows without a place at that length
    are cut or padded to it and their result dropped, and dropped rows have scores of zero. Every block waits for the
    device. Processors must be functions of ids and scores, since they also see draft tokens that are rejected later.
    """

    processors: LogitsProcessorList
    eos: frozenset[int]  # they end a row; later places of a draft are not processed
    limit: int  # length, prompt included, at which rows end

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        scores = logits.float()
        runs = prefixes.runs()
        ids = prefixes.sequences.followed_by(runs)
        # The first place of the block comes before the last `places - 1` tokens of the draft.
        skipped = prefixes.length + 1 - logits.shape[1]
        first = [prefixes.sequences.length(row) + skipped for row in range(len(runs))]
        last = [prefixes.sequences.length(row) + first_end(run, self.eos) for row, run in enumerate(runs)]
        running = prefixes.sequences.running
        processed = scores.clone()
        for length in range(min(first), min(max(last), self.limit - 1) + 1):
            asked = [
                index
                for index, row in enumerate(running)
                if row in prefixes.sequences.unfinished and first[row] <= length <= last[row]
            ]
            if not asked:
                continue
            places = [min(max(length - first[row], 0), logits.shape[1] - 1) for row in running]
            whole = scores.new_zeros(len(runs), scores.shape[-1])
            whole[running] = scores[range(len(running)), places]
            found = called(self.processors, ids[:, :length], whole)
            processed[asked, [places[index] for index in asked]] = found[[running[index] for index in asked]]
        return processed


@dataclass(frozen=True)
class SequentialProcessing:
    """Processors, some with memory, that are called once for each committed token, in order."""

    processors: LogitsProcessorList
    for_drafts: Processing  # without memory or with roll-back, since a rejected token would spoil other memory

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Return the scores of a draft step; the target's places are scored one after the other, by `called`."""
        return self.for_drafts.scores(logits, prefixes)

    def forget_draft(self) -> None:
        if isinstance(self.for_drafts, RollbackProcessing):
            self.for_drafts.roll_back()


class RollbackProcessing:
    """Processors for draft steps: stateless, or with `rollback(calls)`, which undoes the last `calls` calls."""

    def __init__(self, processors: LogitsProcessorList, eos: frozenset[int]) -> None:
        self.processors = processors
        self._eos = eos
        self._calls = 0
        self._stuck = False

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Return the scores of a draft step, `[rows, 1, vocab]`: raw logits if no row goes on or one has no token."""
        scores = logits.float()
        sequences = prefixes.sequences
        drafted = prefixes.runs()
        ends = [first_end(run, self._eos) for run in drafted]
        runs = [run[: end + 1] for run, end in zip(drafted, ends, strict=True)]
        going = [row for row in range(len(runs)) if row in sequences.unfinished and ends[row] == len(drafted[row])]
        if self._stuck or not going:
            return scores
        whole = scores.new_zeros(len(runs), scores.shape[-1])
        whole[sequences.running] = scores[:, 0]
        self._calls += 1
        found = called(self.processors, sequences.followed_by(runs), whole)
        self._stuck = not bool(found[going].amax(-1).isfinite().all())
        return found[sequences.running][:, None]

    def roll_back(self) -> None:
        calls, self._calls, self._stuck = self._calls, 0, False
        for processor in self.processors:
            if calls and _can_roll_back(processor):
                processor.rollback(calls)


def called(processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor:
    """Apply processors, in order, to the scores of one place of each row, `[batch, vocab]`, with prefixes `ids`."""
    ids, found = ids.contiguous(), scores.to(ids.device)
    for processor in processors:
        found = check_scores(processor, processor(ids, found), found)
    return found.to(scores.device)


def choice_of(processing: Processing, length: int) -> Choice | None:
    """Return how to draw from `length` tokens on by suppression, temperature, top-k and top-p alone, else None."""
    if not isinstance(processing, Warping | PrefixProcessing):
        return None
    known: Iterator[tuple[type, str]] = iter(_OF_CHOICE.items())
    values: dict[str, Any] = {"temperature": 1.0}
    suppressed: list[int] = []
    for each in processing.processors:
        if isinstance(each, SuppressionAt) and each.place < length:
            continue
        if type(each) is Suppression and values.keys() == {"temperature"}:
            suppressed.extend(each.tokens.tolist())
            continue
        name = next((name for kind, name in known if type(each) is kind), None)
        plain = getattr(each, "filter_value", -torch.inf) == -torch.inf
        if name is None or not plain or getattr(each, "min_tokens_to_keep", 1) != 1:
            return None
        values[name] = getattr(each, name)
    # Top-p without top-k sorts all tokens.
    if "top_p" in values and "top_k" not in values:
        return None
    return Choice(**values, suppressed=tuple(suppressed))


# The parameter that describes each warper, in the order in which `transformers` applies them.
_OF_CHOICE = {
    generation.TemperatureLogitsWarper: "temperature",
    generation.TopKLogitsWarper: "top_k",
    generation.TopPLogitsWarper: "top_p",
}
# Processors that depend on the scores alone. Exact classes: a subclass may do anything.
_WARPERS = frozenset(
    {
        generation.EpsilonLogitsWarper,
        generation.EtaLogitsWarper,
        generation.InfNanRemoveLogitsProcessor,
        generation.LogitNormalization,
        generation.MinPLogitsWarper,
        generation.TemperatureLogitsWarper,
        generation.TopHLogitsWarper,
        generation.TopKLogitsWarper,
        generation.TopPLogitsWarper,
        generation.TypicalLogitsWarper,
        Suppression,
    }
)
# Processors that may depend on the prefix and remember nothing.
_STATELESS = _WARPERS | {
    generation.EncoderNoRepeatNGramLogitsProcessor,
    generation.EncoderRepetitionPenaltyLogitsProcessor,
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.WatermarkLogitsProcessor,
    SuppressionAt,
    # Processors of speech models, named after the models.
    *(getattr(generation, name) for name in dir(generation) if name.endswith("TimeStampLogitsProcessor")),
}


# Processors that use tokens of the text as indices into the scores.
_BY_TEXT = (
    generation.EncoderNoRepeatNGramLogitsProcessor,
    generation.EncoderRepetitionPenaltyLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
)


class _Widened(LogitsProcessor):
    """Gives a processor scores of all ids that a text may hold: -inf for ids that the head does not write."""

    stateless = True

    def __init__(self, processor: LogitsProcessor, more: int) -> None:
        self._processor = processor
        self._more = more

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = self._processor(input_ids, pad(scores, (0, self._more), value=-torch.inf))
        return found[:, : scores.shape[1]]


def widened(processors: LogitsProcessorList, more: int) -> LogitsProcessorList:
    """Wrap processors that look up scores by text, which may hold `more` ids that the head does not write."""
    if more <= 0:
        return processors
    return LogitsProcessorList(_Widened(each, more) if type(each) in _BY_TEXT else each for each in processors)


def is_stateless(processor: Any) -> bool:
    """Return whether a processor is known to be a function of ids and scores, independent of earlier calls.

    Those of `transformers` are, but for SynthID, guidance and prefix functions; others declare `stateless = True`.
    """
    if type(processor) is generation.PrefixConstrainedLogitsProcessor:
        processor = processor._prefix_allowed_tokens_fn
    return type(processor) in _STATELESS or getattr(processor, "stateless", False) is True


def _can_roll_back(processor: Any) -> bool:
    return callable(getattr(processor, "rollback", None))


def read_processing(processors: LogitsProcessorList, eos: frozenset[int], limit: int) -> Processing:
    """Choose how to apply processors to rows that end at `limit` tokens; refuse guidance, which needs more rows."""
    for processor in processors:
        if isinstance(processor, generation.ClassifierFreeGuidanceLogitsProcessor):
            raise UnsupportedOptionError(
                f"the logits processor {type(processor).__name__} is not supported: it needs a batch of conditional "
                "and unconditional rows; pass guidance_scale=... instead"
            )
    processors = LogitsProcessorList(map(without_search, processors))
    if all(map(is_stateless, processors)):
        return _stateless(processors, eos, limit)
    kept = LogitsProcessorList(each for each in processors if is_stateless(each) or _can_roll_back(each))
    if all(map(is_stateless, kept)):
        return SequentialProcessing(processors, _stateless(kept, eos, limit))
    return SequentialProcessing(processors, RollbackProcessing(kept, eos))


def _stateless(processors: LogitsProcessorList, eos: frozenset[int], limit: int) -> Processing:
    if all(type(processor) in _WARPERS for processor in processors):
        return Warping(processors)
    return PrefixProcessing(processors, eos, limit)
