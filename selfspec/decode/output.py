"""The output of a generation: each committed round, and the whole at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from selfspec.compat import OUTPUT_CACHE
from selfspec.draft.draft import Verdict


@dataclass(frozen=True)
class RowRound:
    """One row's part of a round.

    Attributes:
        tokens: committed tokens, final: accepted draft tokens, then a residual or bonus token unless the row ends or
            lockstep cuts it before; empty for a row that was finished before.
        draft: proposed draft tokens, one for each node of a tree.
        accepted: number of draft tokens among `tokens`.
        rejected: draft tokens after the accepted ones; in a tree the first child, its first child, and so on.
    """

    tokens: tuple[int, ...]
    draft: tuple[int, ...]
    accepted: int
    rejected: tuple[int, ...] = ()


@dataclass(frozen=True)
class Round:
    """The committed tokens of one round.

    Attributes:
        rows: one for each row of the batch.
        steps: draft steps; 0 without a draft, and for a look-up.
    """

    rows: tuple[RowRound, ...]
    steps: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Committed tokens of a batch of one row; `ValueError` for several rows, which `rows` holds."""
        if len(self.rows) != 1:
            raise ValueError(f"this round has {len(self.rows)} rows; read chunk.rows[i].tokens")
        return self.rows[0].tokens


def streamed(
    rounds: Generator[Round, None, None], prompt: Tensor, streamer: BaseStreamer
) -> Generator[Round, None, None]:
    """Yield rounds and feed a streamer as plain decoding does: the prompt, `[1, prompt]`, each token, and the end.

    It is ended even if the rounds, closed with this generator, fail or are abandoned: no reader waits forever.
    """
    with closing(rounds):
        try:
            streamer.put(prompt.cpu())
            for committed in rounds:
                for token in committed.tokens:
                    streamer.put(torch.tensor([token]))
                yield committed
        finally:
            streamer.end()


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """A finished generation: the output of `transformers` with `lengths`, `stats` and `lossless`.

    Items, slices and iteration are as in `GenerateDecoderOnlyOutput`. The three fields that selfspec adds are
    attributes and not items, so that code which iterates over an output finds only fields that it knows.

    Attributes:
        sequences: token ids, `[batch, length]`, prompt included as given; rows that ended early are padded right.
            Without an end token, rows that a criterion ended continue until all have ended, as in `transformers`.
        scores: for each new token the logits after processors and warpers, `[batch, vocab]`, float32, if
            `return_dict_in_generate` and `output_scores` ask for them; after a row's end, 0 for padding, else -inf.
        logits: the full model's own logits in the same form, for `output_logits`.
        cache: keys and values of all tokens except each row's last, for the next turn: the caller's cache, or a new one
            for `return_dict_in_generate`; None before the end. In `transformers` before 5.24 its item is
            `past_key_values`.
        lengths: number of new tokens of each row, up to where it ended.
        stats: counts and times.
        lossless: True if tokens are distributed exactly as the full model's own; False under a relaxed rule.
    """

    # Declared again for type checkers, which do not read the fields of transformers.
    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    if TYPE_CHECKING:
        cache: Cache | None = None
    # transformers rebuilds outputs from their items, so these need a default.
    lengths: tuple[int, ...] = None  # type: ignore[assignment]
    stats: Stats = None  # type: ignore[assignment]
    lossless: bool = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Return the cache if `transformers` has another name for its field."""
        if name == "cache" != OUTPUT_CACHE:
            return getattr(self, OUTPUT_CACHE)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ATTRIBUTES_ALONE:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _ATTRIBUTES_ALONE:
            object.__setattr__(self, key, value)
        else:
            super().__setitem__(key, value)


@dataclass
class EncoderDecoderOutput(GenerateOutput, GenerateEncoderDecoderOutput):
    """A finished generation of a model with an encoder.

    Attributes:
        cross_attentions: attention weights over the encoder's output for timestamps of tokens, if asked for, `[batch,
            heads, tokens, places]` for each pass of plain decoding and each layer.
    """

    cross_attentions: tuple[tuple[Tensor, ...], ...] | None = None


_ATTRIBUTES_ALONE = frozenset({"lengths", "stats", "lossless"})


@dataclass
class Stats:
    """Counts and times of one generation, over all its rows.

    Attributes:
        rounds: rounds of propose, verify, judge and commit, with one target pass each.
        row_rounds: rounds of each unfinished row, summed over rows; equals `rounds` for a batch of one.
        new_tokens: tokens committed.
        drafted: draft tokens of unfinished rows, judged or not.
        judged: draft tokens that the target judged, siblings as one: none after a rejected one, the row's end or a cut.
        accepted: draft tokens committed.
        predicted: draft tokens out of predictions, committed or rejected.
        predicted_accepted: those of them committed.
        judged_per_depth: `judged` by depth in the draft, first token first.
        accepted_per_depth: `accepted` by depth in the draft.
        cache_bytes: most bytes allocated for keys and values.
        substitute_bytes: bytes of the substitutes made for the model so far.
        draft_bytes: bytes of the drafter itself: a head's weights, keys and values, or the table of recycling.
        seconds: wall time by phase: prefill, draft, verify, accept, commit.
    """

    rounds: int = 0
    row_rounds: int = 0
    new_tokens: int = 0
    drafted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    judged_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)
    cache_bytes: int = 0
    substitute_bytes: int = 0
    draft_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        return sum(self.judged_per_depth)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_depth)

    @property
    def acceptance_rate(self) -> float:
        """Alpha of Leviathan et al. (2023): accepted per judged draft token. NaN if none was judged."""
        return self.accepted / self.judged if self.judged else float("nan")

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed per target pass of a row, bonus token included. NaN before the first round."""
        return self.new_tokens / self.row_rounds if self.row_rounds else float("nan")

    def count(self, nodes: int, depth: int, verdict: Verdict) -> None:
        """Count a round by the places of the draft that it committed, with the draft's token or another one."""
        self.rounds += 1
        for row in verdict.rows.values():
            count = len(row.tokens)
            self.row_rounds += 1
            self.drafted += nodes
            self.new_tokens += count
            # Lockstep drops places because of other rows alone, so the acceptance rate is the rule's.
            _add(self.judged_per_depth, depth, row.judged_of(count))
            _add(self.accepted_per_depth, depth, row.accepted_of(count))

    @classmethod
    def together(cls, parts: Sequence[Stats]) -> Stats:
        """Return the counts of several generations as one, with the most bytes of any of them."""
        seconds: Counter[str] = Counter()
        for part in parts:
            seconds.update(part.seconds)
        whole = cls(seconds=dict(seconds))
        for names, merged in ((_SUMMED, sum), (_MOST, max)):
            for name in names:
                setattr(whole, name, merged(getattr(part, name) for part in parts))
        for name in _PER_DEPTH:
            counts = zip_longest(*(getattr(part, name) for part in parts), fillvalue=0)
            setattr(whole, name, [sum(at_depth) for at_depth in counts])
        return whole

    def to_dict(self) -> dict[str, Any]:
        """Return all counts, rates and times, ready for JSON; a rate without data is None."""
        derived = {
            "judged": self.judged,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate if self.judged else None,
            "mean_accepted_length": self.mean_accepted_length if self.row_rounds else None,
        }
        return {**asdict(self), **derived}


_SUMMED = ("rounds", "row_rounds", "new_tokens", "drafted", "predicted", "predicted_accepted")
_PER_DEPTH = ("judged_per_depth", "accepted_per_depth")
_MOST = ("cache_bytes", "substitute_bytes", "draft_bytes")


def _add(counts: list[int], positions: int, first: int) -> None:
    """Add 1 to each of the first `first` counts, of at least `positions`."""
    counts.extend([0] * (positions - len(counts)))
    for position in range(first):
        counts[position] += 1


class ScoreRecord:
    """Holds a tensor `[batch, vocab]` for each new token, as `transformers` returns them.

    After a row's end, entries are 0 for padding and -inf for others, so that a row's sum counts its own tokens.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad
        self._steps: list[Tensor] = []

    @property
    def steps(self) -> tuple[Tensor, ...]:
        return tuple(self._steps)

    def padded(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return one tensor for each new token of the longest row, of rows with `lengths` new tokens."""
        steps = self._steps[: max(lengths)]
        for index, step in enumerate(steps):
            if ended := [row for row, length in enumerate(lengths) if length <= index]:
                steps[index] = step.clone()
                steps[index][ended] = -torch.inf
                steps[index][ended, self._pad : self._pad + 1] = 0.0
        return tuple(steps)

    def keep(self, values: Tensor, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Keep committed tokens' values, from `[rows, places, vocab]` of the running rows, numbered `rows`.

        For each row of the batch, `starts` counts its new tokens before the first place, and `counts` the places kept.
        """
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        while len(self._steps) < longest:
            self._steps.append(values.new_zeros(len(starts), values.shape[-1], dtype=torch.float32))
        for index, row in enumerate(rows):
            for place in range(counts[row]):
                self._steps[starts[row] + place][row] = values[index, place]


@dataclass(frozen=True)
class ScoreRecords:
    """Records of committed tokens: scores after processors and warpers, and the target's own logits."""

    scores: ScoreRecord | None = None
    logits: ScoreRecord | None = None

    @property
    def wanted(self) -> bool:
        """True if there is a record to keep."""
        return any(each is not None for each in vars(self).values())

    def keep(
        self, scores: Tensor, logits: Tensor, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """Record tokens, as `ScoreRecord.keep` does; return the scores of all new tokens so far, if kept."""
        if self.logits is not None:
            self.logits.keep(logits, rows, starts, counts)
        if self.scores is None:
            return None
        self.scores.keep(scores, rows, starts, counts)
        return self.scores.steps
