"""The batch of one generation: every step of the loop reads it, and commit moves it on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import Cache

from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.control import Controller
from selfspec.decode.noise import Noise, Purpose
from selfspec.decode.sampling import Sampling, proper
from selfspec.decode.score_record import ScoreRecords
from selfspec.decode.sequences import Prefixes, Sequences
from selfspec.decode.stopping import Stopping
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.rows_view import DrawnToken
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.runner import ModelRunner


@dataclass
class Batch:
    """The rows of one generation. Drafters see of it what `RowsView` says.

    Attributes:
        runner: runs the model over the cache.
        cache: keys and values of all committed tokens but each row's last, which no pass has read yet.
        sampling: turns logits into probabilities, in the same way for p and q.
        noise: of the running rows.
        controller: chooses draft lengths.
        last_tokens: the last committed token of each running row, `[rows, 1]`.
        sequences: prompts and committed tokens.
        stopping: where rows end.
        records: keeps scores and logits of committed tokens, as far as the caller asked for them.
        past: receives keys and values when the generation ends; None: they are dropped.
        first_embeddings: the last embedding of each prompt, `[rows, 1, hidden]`, which the first round reads in place
            of `last_tokens`; None: prompts are token ids, or the first round has begun.
        needs_lockstep: whether processors or stopping criteria need all unfinished rows at one length in every round.
        nonfinite_rows: numbers of the rows whose logits were not finite after a draft token in the last round. The keys
            and values of that token may be the cause, so these rows get a round without a draft before they are ended.
        failed: numbers of the rows that ended because the target's logits were not finite.
        memories: what drafters keep as long as the wrapper.
        programs: the wrapper's recorded passes; None: the stock modules run all.
        prefill_width: tokens of each prompt that one pass may read; None: all.
    """

    runner: ModelRunner
    cache: SharedCache
    sampling: Sampling
    noise: Noise
    controller: Controller
    last_tokens: Tensor
    sequences: Sequences
    stopping: Stopping
    records: ScoreRecords
    past: Cache | None = None
    first_embeddings: Tensor | None = None
    needs_lockstep: bool = False
    nonfinite_rows: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    memories: dict[Hashable, object] = field(default_factory=dict)
    programs: GraphCache | None = None
    prefill_width: int | None = None

    @property
    def size(self) -> int:
        """Rows of the whole batch, finished ones included."""
        return len(self.sequences.committed)

    @property
    def committed(self) -> list[list[int]]:
        """The new tokens of each row, final."""
        return self.sequences.committed

    @property
    def unfinished(self) -> set[int]:
        """Numbers of the rows that have not ended."""
        return self.sequences.unfinished

    @property
    def running(self) -> list[int]:
        """Numbers of the rows that passes run, in the order in which tensors hold them."""
        return self.sequences.running

    @property
    def greedy(self) -> bool:
        """Whether all rows take the likeliest token."""
        return self.sampling.greedy

    @property
    def chains_only(self) -> bool:
        """Whether logits processors with memory judge drafts place by place, which takes chains."""
        return self.sampling.in_order

    @property
    def reads_prefixes(self) -> bool:
        """Whether logits processors depend on the tokens before a place."""
        return self.sampling.reads_prefixes

    @property
    def are_text(self) -> bool:
        """Whether prompts are token ids alone: no embeddings, and no past of other tokens."""
        return self.sequences.are_text

    def text(self, row: int, start: int = 0) -> list[int]:
        """Return the prompt and the committed tokens of a row, without padding, from number `start` on."""
        return self.sequences.text_from(row, start)

    def text_length(self, row: int) -> int:
        """Count these tokens."""
        return self.sequences.text_length(row)

    def open_block(self, tree: Tree) -> None:
        """Make room in the cache for a draft of this shape, before its first pass."""
        self.cache.open(tree)

    @property
    def longest(self) -> int:
        """The largest committed length of any row, prompt included."""
        return max(self.cache.seq_lens) + 1

    def remaining(self, row: int) -> int:
        """The most tokens that a row may still grow by."""
        return self.stopping.max_new_tokens - len(self.committed[row])

    @property
    def pacing(self) -> set[int]:
        """Numbers of the rows whose progress decides how fast the batch is: its slowest ones, which end last."""
        slowest = min(len(self.committed[row]) for row in self.unfinished)
        return {row for row in self.unfinished if len(self.committed[row]) == slowest}

    @property
    def rows_apart(self) -> bool:
        """Whether drafts of a row must be those that it would have alone: its tokens are drawn, and depend on them.

        The same all through a generation. Tokens that are decided do not depend on drafts.
        """
        return self.controller.rows_apart and not self.sampling.decided

    def budget_of(self, row: int, budget: Budget) -> Budget:
        """The part of a round's budget that a row may use: where rows are apart, what it would be given alone."""
        return budget.within(self.remaining(row) - 1) if self.rows_apart else budget

    def row_lengths(self, draft: Draft) -> list[int]:
        """The depth up to which a draft is judged in each running row.

        All of it where tokens are decided, since these do not depend on the draft.
        """
        whole = [draft.tree.depth] * len(self.running)
        if self.sampling.decided:
            return whole
        # One token of every round is the target's own.
        left = [self.remaining(row) - 1 for row in self.running]
        each = zip(self.running, draft.row_lengths or whole, left, strict=True)
        return [min(length, rest) if row in self.unfinished else draft.tree.depth for row, length, rest in each]

    def no_draft(self) -> Draft:
        """Return a draft of no tokens."""
        return Draft.chain(self.last_tokens[:, :0])

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """Return what draft tokens are drawn by, `[rows, places, vocab]`: logits as processors and warpers leave them.

        Args:
            logits: of the draft, `[rows, places, vocab]`.
            drafted: the draft tokens on the path to the last of these places, pieces of `[rows, tokens]`.
        """
        return self.sampling.scores(logits, Prefixes(self.sequences, drafted))

    def draw_draft(self, scores: Tensor, node: int, place: int) -> DrawnToken:
        """Draw a child of each of some nodes at one depth.

        Args:
            scores: of the children, `[rows, nodes, vocab]`.
            node: number of the first of these nodes, -1 for the last committed token.
            place: of the first draw: the number of tokens that were drawn for this draft before.
        """
        q = proper(self.sampling.probabilities(scores))
        decided = self.sampling.decide(q, self.cache.positions(1, node) + 1, self.noise)
        return DrawnToken(self.sampling.draw(decided, self.noise, Purpose.DRAFT, place), q)

    def drop_finished(self) -> None:
        """Drop finished rows once half of the running rows are finished: all copies together then cost less than two.

        A cache that is to be returned needs all its rows.
        """
        running = self.running
        kept = [index for index, row in enumerate(running) if row in self.unfinished]
        if self.past is not None or not kept or 2 * len(kept) > len(running):
            return
        self.sequences.running = [running[index] for index in kept]
        self.cache.narrow(kept)
        self.last_tokens = self.last_tokens[kept]
        self.noise = self.noise.narrowed(kept)
