"""Rows of one call with their own state, and how the next tokens of several calls' rows are chosen together.

Processors and criteria see the rows of a call side by side, padded to one length. Processed logits become
probabilities in the same way for target p and draft q.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers.generation import InfNanRemoveLogitsProcessor, LogitsProcessorList

from selfspec.decode.noise import Noise, Purpose, drawn
from selfspec.decode.output import ScoreRecords
from selfspec.decode.processors import (
    Processing,
    SequentialProcessing,
    Suppression,
    SuppressionAt,
    Warping,
    choice_of,
)
from selfspec.decode.stopping import Prefixes, Sequences, Stopping
from selfspec.device import to_device
from selfspec.draft.draft import Draft
from selfspec.draft.prediction import Prediction
from selfspec.runtime.request import Choice, Drawn


@dataclass(frozen=True)
class Sampling:
    """Defines how tokens are chosen, in the same way from the target's and the draft's logits."""

    processing: Processing  # turns logits into scores by temperature, top-k, top-p and other processors
    greedy: bool  # True if the distribution is one-hot at the largest score
    couples: bool = False  # True if the noise of their position chooses tokens, not independent draws

    def coupled(self) -> Sampling:
        """Return this sampling with tokens chosen by the noise of their position; greedy sampling is unchanged."""
        return self if self.greedy else replace(self, couples=True)

    @property
    def decided(self) -> bool:
        """True if each place has one possible token, so that nothing is drawn."""
        return self.greedy or self.couples

    def choice(self, length: int) -> Choice | None:
        """Return how to draw if logits alone suffice from `length` tokens on; None: they do not."""
        found = None if self.couples else choice_of(self.processing, length)
        if found is None or not self.greedy:
            return found
        # Leave processors that do not suppress tokens, such as temperature, to single steps.
        alone = all(isinstance(each, Suppression) for each in self.processing.processors)
        return replace(found, temperature=0.0) if alone else None

    @property
    def mends(self) -> bool:
        """True if processors replace logits that are not finite by numbers."""
        return any(type(each) is InfNanRemoveLogitsProcessor for each in self.processing.processors)

    @property
    def in_order(self) -> bool:
        """True if some processor has memory, so that the target's places are scored in order."""
        return isinstance(self.processing, SequentialProcessing)

    @property
    def reads_prefixes(self) -> bool:
        """True if some processor reads more than the scores of a place."""
        return not isinstance(self.processing, Warping)


@dataclass(frozen=True)
class JudgedScores:
    """Holds the target's scores and logits at places that were judged, `[running, places, vocab]`."""

    scores: Tensor
    logits: Tensor


@dataclass(eq=False)
class Group:
    """Holds rows of one call, which outlive the cache they run in: those of `generate`, or an engine's single row."""

    sequences: Sequences
    sampling: Sampling
    stopping: Stopping  # where rows end, or must be read again with other rotary tables
    noise: Noise  # noise of the rows; while they run, the batch's noise is ahead of it
    records: ScoreRecords = field(default_factory=ScoreRecords)
    predictions: Sequence[Prediction | None] = ()  # of the rows' new texts; empty: none
    kind: Hashable = None  # equal for groups whose processors read scores alone and do the same
    isolated: bool = False  # True if an error of a processor or criterion ends these rows alone instead of being raised
    whole: Stopping | None = None  # where rows end that may be read again; None: as `stopping`
    error: Exception | None = None  # that error in this round
    ahead: bool = False  # True if processors with memory saw tokens that are not committed yet
    failed: list[int] = field(default_factory=list)  # rows that ended because the target's logits were not finite

    @property
    def committed(self) -> list[list[int]]:
        return self.sequences.committed

    @property
    def unfinished(self) -> set[int]:
        return self.sequences.unfinished

    @property
    def running(self) -> list[int]:
        return self.sequences.running

    @property
    def length(self) -> int:
        """Number of tokens of the longest row, prompt and padding included."""
        return max(map(self.sequences.length, range(len(self.committed))))

    @property
    def longest(self) -> int:
        """Most tokens that a row may reach, prompt included."""
        return self.sequences.width + self.stopping.max_new_tokens

    @property
    def needs_lockstep(self) -> bool:
        """True if processors or stopping criteria need all unfinished rows at one length in every round."""
        return len(self.unfinished) > 1 and (self.sampling.in_order or self.stopping.needs_lockstep)

    def remaining(self, row: int) -> int:
        """Return the most tokens that a row may still commit."""
        return self.stopping.max_new_tokens - len(self.committed[row])

    def ends(self, runs: Sequence[Sequence[int]], judged: JudgedScores | None) -> list[int | None]:
        """Record what is asked for, of running rows; return how many new tokens each ending row keeps."""
        starts, counts = [len(tokens) for tokens in self.committed], [len(run) for run in runs]
        try:
            kept = None
            if judged is not None:
                kept = self.records.keep(judged.scores, judged.logits, self.running, starts, counts)
            return self.stopping.judged(self.sequences, runs, kept)
        except Exception as error:
            if not self.isolated:
                raise
            self.error = error
            return [0] * len(runs)


class BatchSampling:
    """Turns the running rows' logits into the distribution that plain decoding of each group would draw from.

    Groups of one kind are processed together, those whose processors read prefixes one by one. Flags say of all rows
    (`in_order`, `reads_prefixes`: of some) what `Sampling` says of a group.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        samplings = [group.sampling for group in groups]
        self.greedy = all(each.greedy for each in samplings)
        self.decided = all(each.decided for each in samplings)
        self.in_order = any(each.in_order for each in samplings)
        self.reads_prefixes = any(each.reads_prefixes for each in samplings)
        ends = list(accumulate(len(group.running) for group in groups))
        self._rows = [list(range(end - len(group.running), end)) for group, end in zip(groups, ends, strict=True)]
        self._mending = self._rows_of(lambda group: group.sampling.mends)
        self._greedy = self._rows_of(lambda group: group.sampling.greedy)
        self._choosing = self._rows_of(lambda group: group.sampling.decided and not group.sampling.greedy)
        self._drawn = self._rows_of(lambda group: not group.sampling.decided)
        self._alike: AlikeSampling | None = None
        self._together: dict[Hashable, list[int]] = {}
        for index, group in enumerate(groups):
            self._together.setdefault(index if group.sampling.reads_prefixes else (group.kind,), []).append(index)

    def alike(self) -> AlikeSampling | None:
        """Return how all rows choose tokens if the last logits suffice; None: they do not, or rows differ."""
        choices = {each.sampling.choice(each.sequences.shortest) for each in self._groups}
        choice = choices.pop() if len(choices) == 1 else None
        if choice is None:
            return None
        if self._alike is None or self._alike.choice != choice:
            processors = self._groups[0].sampling.processing.processors
            # A choice is of places behind those at which tokens are suppressed.
            kept = (each for each in processors if not isinstance(each, SuppressionAt))
            self._alike = AlikeSampling(choice, Warping(LogitsProcessorList(kept)))
        return self._alike

    def _rows_of(self, which: Callable[[Group], bool]) -> list[int]:
        return [row for group, rows in zip(self._groups, self._rows, strict=True) if which(group) for row in rows]

    def scores(self, logits: Tensor, drafted: Sequence[Tensor] = ()) -> Tensor:
        """Return the logits after processors and warpers, `[rows, places, vocab]`, float32; see `Prefixes`.

        If a processor of isolated rows raises, their group stores the error, and their scores are NaN.
        """

        def failed(group: Group, error: Exception, given: Tensor) -> Tensor:
            group.error = error
            return torch.full_like(given, torch.nan, dtype=torch.float32)

        return self._scores(logits, drafted, failed)

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """Return scores of draft tokens; raw logits if a processor raises, since the target may never read them."""
        return self._scores(logits, drafted, lambda group, error, given: given.float())

    def _scores(
        self, logits: Tensor, drafted: Sequence[Tensor], failed: Callable[[Group, Exception, Tensor], Tensor]
    ) -> Tensor:
        if len(self._together) == 1:
            return _processed(self._groups[0], logits, drafted, failed)
        scores = torch.empty_like(logits, dtype=torch.float32)
        for indices in self._together.values():
            rows = to_device([row for index in indices for row in self._rows[index]], logits.device)
            pieces = [piece[rows] for piece in drafted] if self._groups[indices[0]].sampling.reads_prefixes else []
            scores[rows] = _processed(self._groups[indices[0]], logits[rows], pieces, failed)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the distribution at each place, `[rows, places, vocab]`, from what `scores` returns."""
        if self.greedy:
            p = _one_hot(scores, scores.argmax(-1))
        else:
            p = scores.softmax(-1)
            if self._greedy:
                greedy = to_device(self._greedy, p.device)
                p[greedy] = _one_hot(p[greedy], scores[greedy].argmax(-1))
        if broken := self._broken:
            p[broken] = torch.nan
        return p

    def decide(self, p: Tensor, positions: Tensor, noise: Noise) -> Tensor:
        """Return the distributions to draw from: p, or one-hot at the choice of the positions' noise."""
        if not self._choosing:
            return p
        if len(self._choosing) == len(p):
            return _one_hot(p, noise.choose(p, positions))
        own, rows = noise.narrowed(self._choosing), to_device(self._choosing, p.device)
        decided = p.clone()
        decided[rows] = _one_hot(p[rows], own.choose(p[rows], positions.expand(len(p), -1)[rows]))
        return decided

    def legible(self, logits: Tensor) -> Tensor:
        """Return which logits without a draft are usable, `[rows, places]`: those that are finite or mended."""
        finite = logits.amax(-1).isfinite()
        for rows, usable in ((self._mending, True), (self._broken, False)):
            if rows:
                finite[rows] = usable
        return finite

    def judged(self, draft: Draft) -> Draft:
        """Return the draft with the distributions that judge its tokens: one-hot where all is decided."""
        if draft.probs is None or len(self._drawn) == len(draft.probs):
            return draft
        if self.decided:
            return replace(draft, probs=None)
        probs = _one_hot(draft.probs, draft.tokens)
        probs[self._drawn] = draft.probs[self._drawn]
        return replace(draft, probs=probs)

    def draw(self, weights: Tensor, noise: Noise, purpose: Purpose, first: int = 0) -> Tensor:
        """Return a token of each distribution, `[rows, places]`: decided, or drawn as in `noise.drawn`."""
        return chosen(weights, self.lots(noise, purpose, first, *weights.shape[1:]))

    def lots(self, noise: Noise, purpose: Purpose, first: int, count: int, vocabulary: int) -> tuple[Tensor, ...]:
        """Return the numbers by which `chosen` draws the tokens of some places; none where tokens are decided."""
        return () if self.decided else noise.lots(purpose, first, count, vocabulary)

    @property
    def _broken(self) -> list[int]:
        """Rows whose processors raised in this round."""
        return self._rows_of(lambda group: group.error is not None)


@dataclass(frozen=True)
class AlikeSampling:
    """Does for rows that choose tokens alike, by logits alone, what `BatchSampling` does: functions of tensors alone.

    Samplings of equal choices are equal, so that what was captured for one serves the others.
    """

    choice: Choice
    warping: Warping = field(compare=False)

    @property
    def greedy(self) -> bool:
        return not self.choice.temperature

    @property
    def decided(self) -> bool:
        return self.greedy

    def scores(self, logits: Tensor, drafted: Sequence[Tensor] = ()) -> Tensor:
        return self.warping.scores(logits)

    def probabilities(self, scores: Tensor) -> Tensor:
        return _one_hot(scores, scores.argmax(-1)) if self.greedy else scores.softmax(-1)

    def legible(self, logits: Tensor) -> Tensor:
        return logits.amax(-1).isfinite()

    def judged(self, draft: Draft) -> Draft:
        return replace(draft, probs=None) if self.greedy else draft

    def drawn(self, logits: Tensor, lots: Sequence[Tensor]) -> Drawn:
        """Take a draft step's token from its logits, `[rows, 1, vocab]`."""
        scores = self.scores(logits)
        p = scores.softmax(-1)
        confidences = p[:, 0].amax(-1).nan_to_num(0.0)
        if self.greedy:
            return Drawn(scores.argmax(-1), None, confidences)
        q = proper(p)
        return Drawn(drawn(q, lots), q, confidences)


def _processed(
    group: Group, logits: Tensor, drafted: Sequence[Tensor], failed: Callable[[Group, Exception, Tensor], Tensor]
) -> Tensor:
    if not group.sampling.processing.processors:
        return logits.float()
    try:
        return group.sampling.processing.scores(logits, Prefixes(group.sequences, drafted))
    except Exception as error:
        if not group.isolated:
            raise
        return failed(group, error, logits)


def chosen(weights: Tensor, lots: Sequence[Tensor]) -> Tensor:
    """Return a token of each distribution, `[rows, places]`: drawn by lots, or the largest where there are none."""
    return drawn(weights, lots) if lots else weights.argmax(-1)


def _one_hot(like: Tensor, tokens: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, tokens[..., None], 1.0)


def proper(q: Tensor) -> Tensor:
    """Return q, `[..., vocab]`, with the uniform distribution wherever it is not finite."""
    # A draft path may overflow where the target does not. Any q is exact if the q drawn from is the q judged.
    return torch.where(q.sum(-1, keepdim=True).isfinite(), q, 1.0 / q.shape[-1])
