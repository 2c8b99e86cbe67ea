"""Each row as `transformers` would hold it, the prompt with its padding and the committed tokens; and where it ends.

A row ends at its maximal length, at an end-of-sequence token, or where a stopping criterion says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
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

from selfspec.errors import UnsupportedOptionError


class Sequences:
    """Holds left-padded prompts, `[batch, prompt]`, and the tokens committed after them, as processors see them.

    `pad` fills shorter rows. `mask` says which columns of the prompts are text; None: passes read other inputs.
    """

    def __init__(self, prompts: Tensor, pad: int, mask: Tensor | None = None) -> None:
        rows = range(prompts.shape[0])
        self.committed: list[list[int]] = [[] for _ in rows]  # new tokens of each row, final; only append to them
        self.unfinished = set(rows)  # numbers of the rows that have not ended
        self.running = list(rows)  # rows that passes run, in tensor order; finished rows run until they are dropped
        self.text_ends: dict[int, int] = {}  # by row, the new tokens of a text that ended and is only filled up
        self.width = prompts.shape[1]
        self.pad = pad
        self._prompts = prompts
        self._mask = mask

    @property
    def are_text(self) -> bool:
        """True if passes read these ids alone: no embeddings, and no past of other tokens."""
        return self._mask is not None

    def length(self, row: int) -> int:
        """Count the tokens of a row, prompt and padding included."""
        return self.width + len(self.committed[row])

    @property
    def shortest(self) -> int:
        """Number of tokens of the shortest running row, prompt and padding included."""
        return min(map(self.length, self.running))

    def text_length(self, row: int) -> int:
        """Count the tokens of a row's text, prompt included, padding excluded."""
        return len(self._texts[row]) + len(self.committed[row])

    def text_from(self, row: int, start: int) -> list[int]:
        """Return the tokens of a row's text from token `start` on, padding neither counted nor included."""
        new = start - len(self._texts[row])
        if new >= 0:
            return self.committed[row][new:]
        return self._texts[row][start:] + self.committed[row]

    @cached_property
    def _texts(self) -> list[list[int]]:
        """Prompts without padding, copied to the host once: a copy in each round would wait for the device."""
        prompts: list[list[int]] = self._prompts.tolist()
        if self._mask is None:
            return prompts
        each = zip(prompts, self._mask.tolist(), strict=True)
        return [[token for token, kept in zip(ids, mask, strict=True) if kept] for ids, mask in each]

    def followed_by(self, runs: Sequence[Sequence[int]]) -> Tensor:
        """Return the ids of all rows, each followed by its uncommitted run, padded right, `[batch, length]`."""
        new = [[*tokens, *run] for tokens, run in zip(self.committed, runs, strict=True)]
        longest = max(map(len, new))
        padded = [tokens + [self.pad] * (longest - len(tokens)) for tokens in new]
        after = torch.tensor(padded, dtype=self._prompts.dtype).reshape(len(new), longest)
        return torch.cat([self._prompts, after.to(self._prompts.device)], 1)


@dataclass(frozen=True)
class Prefixes:
    """The prefix of each place of a block: the committed tokens, and the draft tokens up to the place.

    A block of m places has one before the last m - 1 draft tokens, and one after each. `drafted` holds the running
    rows' draft in pieces, `[rows, tokens]`; only processors that depend on the prefix read it.
    """

    sequences: Sequences
    drafted: Sequence[Tensor] = ()

    @property
    def length(self) -> int:
        return sum(piece.shape[1] for piece in self.drafted)

    def runs(self) -> list[list[int]]:
        """Return the draft tokens of each row of the batch, none for finished rows. Waits for the device."""
        runs: list[list[int]] = [[] for _ in self.sequences.committed]
        if self.drafted:
            drafted = torch.cat(list(self.drafted), 1).tolist()
            for row, run in zip(self.sequences.running, drafted, strict=True):
                runs[row] = run if row in self.sequences.unfinished else []
        return runs


def first_end(run: Sequence[int], eos: Collection[int]) -> int:
    """Return the index of a run's first end-of-sequence token; its length if it has none."""
    return next((index for index, token in enumerate(run) if token in eos), len(run))


@dataclass(frozen=True)
class Stopping:
    """The conditions that end a row."""

    max_new_tokens: int  # most tokens a row may grow by, at least 1
    eos: frozenset[int] = frozenset()
    # Criteria beside lengths and end tokens, which see the whole batch, token by token as each row grows. A stateless
    # one sees rows of other lengths cut or padded, and its answer for them is not used.
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    fills: bool = False  # rows that a criterion has ended go on until all have: without an end token nothing is padded

    @property
    def needs_lockstep(self) -> bool:
        """True if rows need one length in every round: for criteria that may have memory, or filled rows."""
        return self.fills or any(not is_stateless(criterion) for criterion in self.criteria)

    def ends(self, count: int, last: int) -> bool:
        """Return whether a row ends with its `count`-th new token `last`, without asking the criteria."""
        return count >= self.max_new_tokens or last in self.eos

    def shortened(self, sequences: Sequences, runs: Sequence[Sequence[int]]) -> list[list[int]]:
        """Cut each row's run, empty for finished rows, at its end-of-sequence token and at its maximal length."""
        return [
            list(run[: min(first_end(run, self.eos) + 1, self.max_new_tokens - len(tokens))])
            for run, tokens in zip(runs, sequences.committed, strict=True)
        ]

    def judged(
        self, sequences: Sequences, runs: Sequence[Sequence[int]], scores: tuple[Tensor, ...] | None
    ) -> list[int | None]:
        """Return how many tokens of its shortened run each row keeps if it ends there; None: it does not end.

        `scores` has one tensor `[batch, vocab]` for each new token, those of the runs included; None: not kept.
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
            for row in self.ended(sequences, [row for row in rows if verdicts[row]], length - sequences.width):
                ends[row] = length - starts[row]
                ids[row, length:] = sequences.pad
        return ends

    def ended(self, sequences: Sequences, rows: Sequence[int], count: int) -> Sequence[int]:
        """Return the rows that end after a criterion ended some: these, or none or all if rows are filled up."""
        if not self.fills:
            return rows
        # The text of these rows ends here, after `count` new tokens.
        for row in rows:
            sequences.text_ends.setdefault(row, count)
        return sorted(sequences.unfinished) if sequences.text_ends.keys() >= sequences.unfinished else ()


def read_stopping(criteria: StoppingCriteriaList, width: int, max_length: int) -> Stopping:
    """Read where rows end from prepared criteria, those of length and end of sequence as numbers.

    `width` is that of padded prompts; `max_length` holds if no criterion limits it. Refuses criteria of draft models.
    """
    # Exact classes: a subclass may do anything.
    longest = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    ends = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
    others = [criterion for criterion in criteria if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)]
    for criterion in others:
        if isinstance(criterion, ConfidenceCriteria):
            raise UnsupportedOptionError(
                f"the stopping criterion {type(criterion).__name__} is not supported: it stops a draft model; drop it"
            )
    return Stopping(
        # At least one token is generated.
        max_new_tokens=max(min(longest, default=max_length) - width, 1),
        eos=frozenset(token for tokens in ends for token in tokens.flatten().tolist()),
        criteria=StoppingCriteriaList(others),
        # `transformers` decides in the same way whether to pad.
        fills=bool(others) and not any(hasattr(criterion, "eos_token_id") for criterion in criteria),
    )


def is_stateless(criterion: StoppingCriteria) -> bool:
    """Return whether a criterion is a function of ids and scores: one of `transformers` or with `stateless = True`."""
    # Exact classes: a subclass may do anything.
    return type(criterion) in (StopStringCriteria, MaxTimeCriteria) or getattr(criterion, "stateless", False) is True
