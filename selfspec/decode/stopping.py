"""Where a row ends: at its longest, at an end-of-sequence token, or where a stopping criterion says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from selfspec.decode.sequences import Sequences, first_end
from selfspec.errors import UnsupportedOptionError


@dataclass(frozen=True)
class Stopping:
    """What ends a row.

    Attributes:
        max_new_tokens: the most tokens a row may grow by, at least 1.
        eos: token ids that end a row.
        criteria: all others. They see what they would see in `transformers`: the whole batch, token by token as each
            row grows. A stateless criterion may be shown rows of different lengths: others are then cut or padded to
            that of the call, and what is said of them is not used.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)

    @property
    def stateful(self) -> bool:
        """Whether a criterion may have memory: it is shown rows in lockstep, then, as in plain decoding."""
        return any(not is_stateless(criterion) for criterion in self.criteria)

    def ends(self, count: int, last: int) -> bool:
        """Whether a row ends with its `count`-th new token, criteria aside."""
        return count >= self.max_new_tokens or last in self.eos

    def shortened(self, sequences: Sequences, runs: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each row's run up to the first end-of-sequence token, and no longer than there is room for.

        Args:
            sequences: what was committed before.
            runs: accepted tokens of each row; empty for rows that have ended.
        """
        return [
            list(run[: min(first_end(run, self.eos) + 1, self.max_new_tokens - len(tokens))])
            for run, tokens in zip(runs, sequences.committed, strict=True)
        ]

    def judged(
        self, sequences: Sequences, runs: Sequence[Sequence[int]], scores: tuple[Tensor, ...] | None
    ) -> list[int | None]:
        """How many tokens of each shortened run stand when its row ends there; None for rows that go on.

        Args:
            sequences: what was committed before.
            runs: as `shortened` leaves them.
            scores: one tensor `[batch, vocab]` for each new token, those of the runs included; None: not kept.
        """
        ends = [
            len(run) if run and self.ends(len(tokens) + len(run), run[-1]) else None
            for run, tokens in zip(runs, sequences.committed, strict=True)
        ]
        if not self.criteria:
            return ends
        sooner = self._by_criteria(sequences, runs, scores)
        return [sooner.get(row, end) for row, end in enumerate(ends)]

    def _by_criteria(
        self, sequences: Sequences, runs: Sequence[Sequence[int]], scores: tuple[Tensor, ...] | None
    ) -> dict[int, int]:
        ids = sequences.followed_by(runs)
        ends: dict[int, int] = {}
        starts = [sequences.length(row) for row in range(len(runs))]
        for length in range(min(starts) + 1, ids.shape[1] + 1):
            grown = [row for row, run in enumerate(runs) if starts[row] < length <= starts[row] + len(run)]
            rows = [row for row in grown if row not in ends]
            if not rows:
                continue
            so_far = None if scores is None else scores[: length - sequences.width]
            verdicts = self.criteria(ids[:, :length].contiguous(), so_far).tolist()
            for row in rows:
                if verdicts[row]:
                    ends[row] = length - starts[row]
                    ids[row, length:] = sequences.pad
        return ends


def read_stopping(criteria: StoppingCriteriaList, width: int, max_length: int) -> Stopping:
    """Where rows end, by the criteria that `transformers` has prepared.

    Args:
        criteria: all of them; those of length and end of sequence, the caller's own among them, need not be asked.
        width: length of the prompts, padding included.
        max_length: the most tokens a row may hold, prompt included, where no criterion says so.

    Raises:
        UnsupportedOptionError: a criterion that stops a draft model, by name.
    """
    # Their exact classes: one that derives from them may do anything.
    longest = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    ends = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
    others = [criterion for criterion in criteria if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)]
    for criterion in others:
        if isinstance(criterion, ConfidenceCriteria):
            raise UnsupportedOptionError(
                f"the stopping criterion {type(criterion).__name__} is not supported: it stops a draft model; drop it"
            )
    return Stopping(
        # One token is generated whatever the length.
        max_new_tokens=max(min(longest, default=max_length) - width, 1),
        eos=frozenset(token for tokens in ends for token in tokens.flatten().tolist()),
        criteria=StoppingCriteriaList(others),
    )


def is_stateless(criterion: StoppingCriteria) -> bool:
    """Whether a criterion is known to answer by what it is shown alone, whatever it was shown before.

    Those of `transformers` are; others say so by an attribute `stateless = True`.
    """
    # Their exact classes: one that derives from them may do anything.
    return type(criterion) in (StopStringCriteria, MaxTimeCriteria) or getattr(criterion, "stateless", False) is True
