"""The state of one generation, which every step of the loop reads and the commit moves on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache

from selfspec.cache.shared_cache import SharedCache
from selfspec.control import Controller
from selfspec.decode.sampling import Sampling
from selfspec.decode.score_record import Record
from selfspec.decode.sequences import Text
from selfspec.draft.draft import Draft
from selfspec.draft.suffix_index import SuffixIndex
from selfspec.model.runner import ModelRunner


@dataclass
class State:
    """One generation under way.

    Attributes:
        passes: runs the model over the cache.
        cache: keys and values of all committed tokens but each row's last, which no pass has read yet.
        sampling: logits to probabilities, the same for p and q.
        generator: the one source of randomness.
        control: decides how long drafts are.
        last: the last committed token of each row that passes run, `[rows, 1]`.
        text: prompts, and the new tokens of each row, final.
        scores: keeps the scores of committed tokens; None: nobody asked for them.
        logits: the same of the target's own logits.
        past: gets the keys and values when the generation ends; None: they go with it.
        opening: the last embedding of each prompt, `[rows, 1, hidden]`, which the first round reads in place of `last`;
            None: prompts are tokens, or the first round has begun.
        lockstep: whether processors or stopping criteria need all unfinished rows at one length in every round.
        doubted: numbers of rows whose logits were not finite in the last round, behind a draft. A draft token's keys
            and values may have done that, so they get a round without a draft before they are given up.
        indexes: of the text of each row that a look-up has asked for.
        failed: numbers of rows that ended because the target's logits were not finite.
    """

    runner: ModelRunner
    cache: SharedCache
    sampling: Sampling
    generator: torch.Generator
    control: Controller
    last: Tensor
    text: Text
    scores: Record | None = None
    logits: Record | None = None
    past: Cache | None = None
    opening: Tensor | None = None
    lockstep: bool = False
    doubted: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    indexes: dict[int, SuffixIndex] = field(default_factory=dict)

    def no_draft(self) -> Draft:
        """A draft of no tokens."""
        return Draft.chain(self.last[:, :0])

    def index(self, row: int, shortest: int, longest: int) -> SuffixIndex:
        """Where the end of a row's text stood before in it. It takes in what was committed since it was last asked for.

        Args:
            row: number of the row.
            shortest: tokens of the shortest match.
            longest: tokens of the longest that is indexed.
        """
        if row not in self.indexes:
            self.indexes[row] = SuffixIndex(shortest, longest)
        index = self.indexes[row]
        index.extend(self.text.tokens_from(row, len(index)))
        return index

    @property
    def committed(self) -> list[list[int]]:
        """The new tokens of each row, final."""
        return self.text.committed

    @property
    def live(self) -> list[bool]:
        """Whether each row goes on."""
        return self.text.live

    def leave_out_ended(self) -> None:
        """Run ended rows no more, once half of those that run have ended: so all copies together cost less than two.

        A cache that is to be returned needs all its rows.
        """
        running = self.text.rows
        kept = [index for index, row in enumerate(running) if self.live[row]]
        if self.past is not None or not kept or 2 * len(kept) > len(running):
            return
        self.text.rows = [running[index] for index in kept]
        self.cache.narrow(kept)
        self.last = self.last[kept]
        self.sampling = self.sampling.narrowed(self.text.rows, len(self.live))

    def record(
        self, scores: Tensor, logits: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """Keep scores and logits of tokens about to be committed, as far as the caller asked for them.

        Args:
            scores: `[rows, places, vocab]`, of the rows that passes run.
            logits: the same before processors and warpers.
            starts: new tokens that each row of the batch has before the first place.
            counts: places of each row of the batch to keep, from the first.

        Returns:
            The scores of all new tokens so far, one `[batch, vocab]` each; None where they are not kept.
        """
        if self.logits is not None:
            self.logits.keep(logits, self.text.rows, starts, counts)
        if self.scores is None:
            return None
        self.scores.keep(scores, self.text.rows, starts, counts)
        return self.scores.steps

    @property
    def longest(self) -> int:
        """The largest committed length of any row, prompt included."""
        return max(self.cache.lengths) + 1
