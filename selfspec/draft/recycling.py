"""Drafting from what earlier passes left over: their candidates for each place, grown into a tree for nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.cache.tree import Tree
from selfspec.draft.candidate_file import About, CandidateFile, write_candidates
from selfspec.draft.candidate_table import NONE, CandidateTable
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.draft_state import DraftState, Memory
from selfspec.draft.drafter import Drafter
from selfspec.draft.offer import Offer
from selfspec.draft.rank_chances import RankChances
from selfspec.draft.rows_apart import chains
from selfspec.draft.tree_shape import best_shape, largest_products
from selfspec.errors import DraftConfigError
from selfspec.model.adapter import Adapter
from selfspec.model.vocabulary import Vocabulary
from selfspec.values import checked_path, shown

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict

CANDIDATES = 1
"""The match length of drafts of recycled candidates: they are one source of drafts."""

_RANGES = (("candidates", 1, 64), ("longest", 1, 16), ("most_bytes", 1 << 13, 1 << 34))
# Of what a row learns apart from others, at most.
_ROW_BYTES = 8 << 20
# What candidates of each rank were accepted at on the models measured, after contexts of one token and of more, and how
# many places that counts for.
_CHANCES, _WEIGHT = ((0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01), (0.6, 0.12, 0.06, 0.04, 0.03, 0.02, 0.01)), 30.0


@dataclass(frozen=True)
class Recycling(Drafter):
    """Token Recycling (Luo et al., 2024, arXiv 2408.08696): drafts trees without a model and without training.

    A table holds, for each token and for each few tokens in a row, the candidates that followed when the target last
    ran them, in whatever text and place, rejected nodes included; and what followed in prompts. The draft is the tree
    that these candidates grow into, after the longest context that is known at each place: of text that comes again it
    is that text, as in REST (He et al., 2023, arXiv 2311.08252) and SuffixDecoding (Oliaro et al., 2024, arXiv
    2411.04975), with the target's other candidates beside it. Nothing is drawn, so q is one-hot at each node.

    The table is the wrapper's: later generations draft from what earlier ones left. Under greedy decoding and under
    `coupled` that changes speed alone; sampled otherwise, a seed repeats its tokens with a new wrapper. Where rows are
    apart (see `FixedLength`) a row has a chain, of what was known before the call and what the row itself left since;
    the wrapper learns that once the last row has ended.

    Attributes:
        candidates: kept for each context, 1 to 64.
        longest: tokens of the longest context, 1 to 16; 1 is the table of the paper.
        most_bytes: of the table, 8 KiB to 16 GiB. A new context takes the place of an older one where there is no room.
        saved: the file that the table of a new wrapper is read from; None: it begins empty.
    """

    candidates: int = 8
    longest: int = 4
    most_bytes: int = 8 << 20
    saved: str | None = None

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            given = getattr(self, name)
            if type(given) is not int or not least <= given <= most:
                raise DraftConfigError(f"{name} must be an integer from {least} to {most}, got {shown(given)}")

    @classmethod
    def from_file(cls, file: str | Path) -> Recycling:
        """Begin with a table that `SelfSpeculative.save_candidates` wrote. The file stays as it is.

        Args:
            file: safetensors; nothing is unpickled.

        Raises:
            DraftConfigError: the file is missing, truncated, foreign or of another format.
        """
        about = CandidateFile(checked_path("file", file, DraftConfigError)).about
        return cls(about.candidates, about.longest, about.most_bytes, str(file))

    def check(self, depth: int) -> None:
        return

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        adapter.check_trees(model)
        if self.saved is not None:
            self._check_file(CandidateFile(self.saved), Vocabulary.of(model))

    def begin(self, batch: Batch) -> RecyclingState:
        if self not in batch.memories:
            made = RecyclingMemory(self.candidates, self.longest, self.most_bytes, self.saved)
            if self.saved is not None:
                # Models of one tokenizer may have heads of different sizes.
                made.table.keep_below(batch.runner.vocabulary)
            batch.memories[self] = made
        memory = batch.memories[self]
        assert isinstance(memory, RecyclingMemory)
        state = RecyclingState(memory, batch.rows_apart)
        for row in range(batch.size):
            state.table(row).learn_text(batch.sequences.text_from(row, 0))
        return state

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        found = self.look_up(batch, budget)
        return found if found.length and batch.controller.tries(found.match_length) else batch.no_draft()

    def look_up(self, batch: Batch, budget: Budget) -> Draft:
        """Propose a tree; none where nothing is known of some unfinished row, or none would pay."""
        state = self._state(batch)
        contexts = self._contexts(batch)
        state.lengths = self._known(batch, state, contexts)
        # What a batch can hope for is set by the row with least to go by.
        lengths = [state.lengths[index] for index, row in enumerate(batch.running) if row in batch.unfinished]
        if not any(lengths):
            return batch.no_draft()
        if batch.rows_apart:
            state.proposed = self._chains(batch, state, contexts, budget)
            return state.proposed
        # Logits processors with memory judge chains alone.
        chances = state.memory.chances[max(min(lengths), 1) - 1].rates()[: 1 if batch.sampling.in_order else None]
        tree = best_shape(chances, lambda nodes: batch.controller.round_cost(0, nodes), budget).tree
        tokens = torch.from_numpy(state.memory.table.grown(contexts, tree)).to(batch.last_tokens.device)
        state.proposed = Draft(tokens, tree, match_length=CANDIDATES)
        return state.proposed

    def offers(self, batch: Batch, budget: Budget) -> list[tuple[Offer, ...]]:
        """Return what is offered to each running row: the tree of `look_up`, for each row by itself."""
        state = self._state(batch)
        contexts = self._contexts(batch)
        lengths = self._known(batch, state, contexts).tolist()
        return [
            (self._offer(state.rates(length), state.table(row), context[None], length, batch.budget_of(row, budget)),)
            for row, context, length in zip(batch.running, contexts, lengths, strict=True)
        ]

    def _offer(
        self,
        chances: tuple[float, ...],
        table: CandidateTable,
        context: NDArray[np.int64],
        length: int,
        budget: Budget,
    ) -> Offer:
        tree = largest_products(chances, budget.nodes if length else 0, budget.depth).tree
        tokens: list[int] = table.grown(context, tree)[0].tolist()
        shares: dict[tuple[int, ...], float] = {}
        for path, rank in zip(tree.paths, tree.ranks, strict=True):
            # A candidate that is there twice has the chance of the first.
            shares.setdefault(tuple(tokens[node] for node in path), chances[rank])
        return Offer(length, shares)

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        state = self._state(batch)
        if draft is state.proposed:
            for length, row in zip(state.lengths.tolist(), verdict.running, strict=True):
                if length and row in verdict.rows:
                    state.memory.chances[length - 1].count(draft.tree, verdict.rows[row].path)
        contexts = contexts_of(self._contexts(batch), draft.tokens.cpu().numpy(), draft.tree)
        candidates = logits.topk(min(self.candidates, logits.shape[-1])).indices.cpu().numpy()
        if not batch.rows_apart:
            state.memory.table.learn(contexts.reshape(-1, self.longest), candidates.reshape(-1, candidates.shape[-1]))
            return
        for index, (row, length) in enumerate(zip(batch.running, batch.row_lengths(draft), strict=True)):
            if row in verdict.rows:
                # What only fills the row up is another number of tokens beside other rows.
                state.table(row).learn(contexts[index, : length + 1], candidates[index, : length + 1])
        if all(found.ended for found in verdict.rows.values()):
            state.hand_over()

    def _known(self, batch: Batch, state: RecyclingState, contexts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of the longest context that is known of each running row, `[rows]`."""
        if not batch.rows_apart:
            return state.memory.table.find(contexts).lengths
        each = zip(batch.running, contexts, strict=True)
        return np.array([state.table(row).find(context).lengths for row, context in each])

    def _chains(self, batch: Batch, state: RecyclingState, contexts: NDArray[np.int64], budget: Budget) -> Draft:
        tree = Tree.chain(budget.depth)
        rows: list[list[int]] = [
            state.table(row).grown(context[None], tree)[0].tolist() if length and row in batch.unfinished else []
            for row, context, length in zip(batch.running, contexts, state.lengths, strict=True)
        ]
        return chains(batch, rows, match_length=CANDIDATES)

    def _check_file(self, file: CandidateFile, vocabulary: Vocabulary) -> None:
        if not file.about.vocabulary.is_same(vocabulary):
            raise DraftConfigError(
                f"{self.saved} holds candidates of another tokenizer than the model's; draft with Recycling() alone, "
                "or save a table of this model"
            )
        about = (file.about.candidates, file.about.longest, file.about.most_bytes)
        if about != (self.candidates, self.longest, self.most_bytes):
            raise DraftConfigError(f"{self.saved} holds another table by now; make the draft of it anew")

    def _state(self, batch: Batch) -> RecyclingState:
        state = self.state(batch)
        assert isinstance(state, RecyclingState)
        return state

    def _contexts(self, batch: Batch) -> NDArray[np.int64]:
        """The last tokens of each running row, `[rows, longest]`."""
        sequences = batch.sequences
        ends = [sequences.text_from(row, max(sequences.text_length(row) - self.longest, 0)) for row in batch.running]
        return np.array([[*[NONE] * (self.longest - len(end)), *end] for end in ends], dtype=np.int64)


class RecyclingMemory(Memory):
    """What the drafter keeps as long as the wrapper: candidates, and how often those of each rank are accepted.

    Args:
        candidates: kept for each context.
        longest: tokens of the longest context.
        nbytes: the most that the table takes.
        saved: the file that all of it is read from; None: nothing is known at first.

    Attributes:
        table: candidates of each context.
        chances: of the ranks, in drafts after contexts of one token, of two, ...
    """

    def __init__(self, candidates: int, longest: int, nbytes: int, saved: str | None = None) -> None:
        self._size = (candidates, longest, nbytes)
        self.table = CandidateTable(candidates, longest, nbytes)
        first = (_CHANCES[min(length, 1)] for length in range(longest))
        self.chances = [RankChances([*rates, *[0.005] * candidates][:candidates], _WEIGHT) for rates in first]
        if saved is not None:
            kept = CandidateFile(saved).read(self._arrays())
            for name, values in self._arrays().items():
                values[:] = kept[name]

    def save(self, file: str | Path, vocabulary: Vocabulary) -> None:
        """Write all of it to a file.

        Raises:
            StorageError: it cannot be written.
        """
        write_candidates(file, About(2, vocabulary, *self._size), self._arrays())

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """What it consists of, by name; what is written there is known from then on."""
        counts = {f"chances.{length}": chances.counts for length, chances in enumerate(self.chances)}
        return {**self.table.arrays, **counts}

    def of_row(self) -> CandidateTable:
        """Make a table that knows what this one knows, and learns by itself."""
        candidates, longest, nbytes = self._size
        return CandidateTable(candidates, longest, min(nbytes, _ROW_BYTES), under=self.table)


class RecyclingState(DraftState):
    """What the drafter keeps during a generation.

    Args:
        memory: what it keeps as long as the wrapper.
        rows_apart: see `Batch`.

    Attributes:
        memory: as given.
        proposed: its last draft, whether or not the round took it.
        lengths: tokens of the longest known context of each running row then.
    """

    def __init__(self, memory: RecyclingMemory, rows_apart: bool) -> None:
        self.memory = memory
        self.proposed: Draft | None = None
        self.lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        # What rows learn apart, and what was known of ranks before.
        self._tables: defaultdict[int, CandidateTable] | None = defaultdict(memory.of_row) if rows_apart else None
        self._rates = [chances.rates() for chances in memory.chances] if rows_apart else None

    @property
    def nbytes(self) -> int:
        own = () if self._tables is None else self._tables.values()
        return self.memory.table.nbytes + sum(table.nbytes for table in own)

    def table(self, row: int) -> CandidateTable:
        """Return what a row drafts from and teaches: where rows are apart its own, over what was known before."""
        return self.memory.table if self._tables is None else self._tables[row]

    def rates(self, length: int) -> tuple[float, ...]:
        """Return the chances of ranks after known contexts of `length` tokens; where rows are apart, as before."""
        place = max(length, 1) - 1
        return self.memory.chances[place].rates() if self._rates is None else self._rates[place]

    def hand_over(self) -> None:
        """Give what rows learnt apart to later generations."""
        for _, table in sorted((self._tables or {}).items()):
            self.memory.table.take(table)


def contexts_of(contexts: NDArray[np.int64], tokens: NDArray[np.int64], tree: Tree) -> NDArray[np.int64]:
    """Return the last tokens at the last committed token and at each node, `[rows, nodes + 1, longest]`.

    Args:
        contexts: the last tokens of each row, `[rows, longest]`.
        tokens: of each node, `[rows, nodes]`.
        tree: which node follows which.
    """
    ends = np.empty((len(contexts), len(tree) + 1, contexts.shape[1]), dtype=np.int64)
    ends[:, 0] = contexts
    for node, parent in enumerate(tree.parents):
        ends[:, node + 1, :-1] = ends[:, parent + 1, 1:]
        ends[:, node + 1, -1] = tokens[:, node]
    return ends
