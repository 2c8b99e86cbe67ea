"""What a generation gives: each round as it is committed, and the whole at the end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import Cache

from selfspec.stats import Stats


@dataclass(frozen=True)
class RowRound:
    """One row's part of a round.

    Attributes:
        tokens: committed tokens, final: accepted draft tokens and then one of the target's own. Empty for a row that
            had ended before. A row that ends inside its accepted draft has no token of the target's after it, nor has
            one that is cut there to stay in step with the other rows.
        draft: the draft tokens that were proposed.
        accepted: how many of them are among `tokens`.
    """

    tokens: tuple[int, ...]
    draft: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Round:
    """What one round committed.

    Attributes:
        rows: one entry per row of the batch.
        steps: draft steps it took; 0 without a draft, and for a look-up.
    """

    rows: tuple[RowRound, ...]
    steps: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed tokens of a batch of one.

        Raises:
            ValueError: the batch has several rows; read `rows` instead.
        """
        if len(self.rows) != 1:
            raise ValueError(f"this round has {len(self.rows)} rows; read chunk.rows[i].tokens")
        return self.rows[0].tokens


@dataclass(frozen=True)
class GenerateOutput:
    """A finished generation.

    Attributes:
        sequences: token ids, `[batch, length]`, prompt included as given; rows that ended early are padded right.
        lengths: number of new tokens of each row.
        stats: what was counted.
        lossless: whether the tokens are distributed exactly as the full model's own; False under a relaxed rule.
        scores: for each new token the logits as processors and warpers left them, `[batch, vocab]`, float32; None
            unless `return_dict_in_generate` and `output_scores` ask for them. Where a row has ended, 0 for the padding
            token and -inf for others.
        logits: the same of the full model's own logits, for `output_logits`.
        past_key_values: keys and values of all tokens but each row's last, for the next turn: a cache that the caller
            passed, or a new one for `return_dict_in_generate`; else None, and of a generation under way.
    """

    sequences: Tensor
    lengths: tuple[int, ...]
    stats: Stats
    lossless: bool
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    past_key_values: Cache | None = None
