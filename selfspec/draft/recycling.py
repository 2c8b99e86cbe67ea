"""Drafting without a model: a tree of the candidates that earlier passes left over for each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from selfspec.arguments import shown
from selfspec.cache.tree import Tree
from selfspec.device import HostCopy
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import Drafter, DraftMemory, FreeProposer, OwnBytes, drafter
from selfspec.draft.prompt_lookup import NONE
from selfspec.draft.rows_view import RowsView, guesses, remembered
from selfspec.draft.tree_growth import RankChances, best_shape
from selfspec.errors import DraftConfigError
from selfspec.runtime.request import PassResult

# The match length of all drafts of recycled candidates, which count as one source.
_CANDIDATES = 1

_RANGES = (("candidates", 1, 64), ("longest", 1, 16), ("most_bytes", 1 << 13, 1 << 34))
# Acceptance rates of candidates by rank on the models measured, after contexts of one token and of more, and how many
# places they count for.
_CHANCES, _WEIGHT = ((0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01), (0.6, 0.12, 0.06, 0.04, 0.03, 0.02, 0.01)), 30.0


@drafter("recycle", help="trees of candidates that earlier passes left over")
@dataclass(frozen=True)
class Recycling(Drafter):
    """Drafts trees by Token Recycling (Luo et al., 2024, arXiv 2408.08696), without a model and without training.

    A table holds, for contexts of a few tokens, the candidates that followed when the target last ran them, rejected
    nodes included, and what followed in prompts. The draft is the tree of these candidates after the longest known
    contexts. Repeated text is drafted as in REST (He et al., 2023, arXiv 2311.08252) and SuffixDecoding (Oliaro et al.,
    2024, arXiv 2411.04975), with other candidates beside it. Nothing is drawn, so q is one-hot.

    The wrapper keeps the table. Under greedy decoding and `coupled` it changes speed alone; with other sampling, a seed
    repeats its tokens only with a new wrapper.

    Attributes:
        candidates: number kept for each context, 1 to 64.
        longest: tokens of the longest context, 1 to 16; 1 gives the paper's table.
        most_bytes: size of the table, 8 KiB to 16 GiB; when it is full, new contexts replace older ones.
    """

    branches = True
    candidates: int = 8
    longest: int = 4
    most_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            given = getattr(self, name)
            if type(given) is not int or not least <= given <= most:
                raise DraftConfigError(f"{name} must be an integer from {least} to {most}, got {shown(given)}")

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        return OwnBytes(self.most_bytes)

    def begin(self, rows: RowsView) -> RecyclingProposer:
        made = partial(RecyclingMemory, self.candidates, self.longest, self.most_bytes)
        return RecyclingProposer(remembered(rows, self, made), rows)


class RecyclingMemory(DraftMemory):
    """Keeps candidates, and the acceptance rates of their ranks by context length."""

    def __init__(self, candidates: int, longest: int, nbytes: int) -> None:
        self.table = CandidateTable(candidates, longest, nbytes)
        first = (_CHANCES[min(length, 1)] for length in range(longest))
        self.chances = [RankChances([*rates, *[0.005] * candidates][:candidates], _WEIGHT) for rates in first]


class RecyclingProposer(FreeProposer):
    """Drafts from the wrapper's table."""

    matches = (_CANDIDATES,)

    def __init__(self, memory: RecyclingMemory, rows: RowsView) -> None:
        self._longest = memory.table.longest
        self._memory = memory
        # Its last draft, whether or not the round took it, and how long the known context of each row was then.
        self._proposed: Draft | None = None
        self._lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        # Draft tokens of the round that is judged, and the target's candidates after each place.
        self._asked: tuple[HostCopy, HostCopy] | None = None
        for row in range(rows.size):
            memory.table.learn_text([*rows.source(row), *rows.text(row)])

    @property
    def nbytes(self) -> int:
        return self._memory.table.nbytes

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a tree; none if no unfinished row has a known context, or no tree would pay."""
        contexts = self._contexts(rows)
        self._lengths = self._memory.table.find(contexts).lengths
        # The row with the shortest context limits the batch.
        lengths = [self._lengths[index] for index, row in enumerate(rows.running) if row in rows.unfinished]
        if not any(lengths):
            return rows.no_draft()
        chances = self._memory.chances[max(min(lengths), 1) - 1].rates()[: 1 if rows.chains_only else None]
        tree = best_shape(chances, lambda nodes: rows.controller.round_cost(0, nodes), budget).tree
        tokens = guesses(rows, torch.from_numpy(self._memory.table.grown(contexts, tree)))
        self._proposed = Draft(tokens, tree, match_length=_CANDIDATES)
        return self._proposed

    def ask(self, draft: Draft, target: PassResult) -> None:
        candidates = target.logits.topk(min(self._memory.table.kept, target.logits.shape[-1])).indices
        self._asked = HostCopy(draft.tokens), HostCopy(candidates)

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        if draft is self._proposed:
            for length, row in zip(self._lengths.tolist(), verdict.running, strict=True):
                if length and row in verdict.rows:
                    self._memory.chances[length - 1].count(draft.tree, verdict.rows[row].path)
        assert self._asked is not None
        tokens, candidates = (each.read().numpy() for each in self._asked)
        self._asked = None
        contexts = contexts_of(self._contexts(rows), tokens, draft.tree)
        self._memory.table.learn(contexts.reshape(-1, self._longest), candidates.reshape(-1, candidates.shape[-1]))

    def _contexts(self, rows: RowsView) -> NDArray[np.int64]:
        """Return each running row's last tokens, `[rows, longest]`."""
        ends = [rows.text(row, max(rows.text_length(row) - self._longest, 0)) for row in rows.running]
        return np.array([[*[NONE] * (self._longest - len(end)), *end] for end in ends], dtype=np.int64)


def contexts_of(contexts: NDArray[np.int64], tokens: NDArray[np.int64], tree: Tree) -> NDArray[np.int64]:
    """Return the contexts that end at the last committed token and at each node, `[rows, nodes + 1, longest]`."""
    ends = np.empty((len(contexts), len(tree) + 1, contexts.shape[1]), dtype=np.int64)
    ends[:, 0] = contexts
    for node, parent in enumerate(tree.parents):
        ends[:, node + 1, :-1] = ends[:, parent + 1, 1:]
        ends[:, node + 1, -1] = tokens[:, node]
    return ends


# Odd factor and shift of the hash of a context.
_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
# Places of a context that count in one text, the last ones, for each candidate kept.
_PLACES = 2


@dataclass(frozen=True)
class Found:
    """Holds candidates, `[..., kept]`, some of them `NONE`, and the lengths of the longest known contexts, `[...]`."""

    candidates: NDArray[np.int32]
    lengths: NDArray[np.int64]


class CandidateTable:
    """Keeps the `kept` likeliest next tokens after contexts of one to `longest` tokens, as the target last gave them.

    `NONE` stands for an unknown candidate, and for a token before the beginning of a text.

    A context lies at the place of its hash, where a newer one replaces it.
    """

    def __init__(self, kept: int, longest: int, nbytes: int) -> None:
        places = max(nbytes // (longest * (8 + 4 * kept)), 1)
        self.kept, self.longest = kept, longest
        # Memory is taken as places are written to.
        self._keys: NDArray[np.uint64] = np.zeros((longest, places), dtype=np.uint64)
        self._rows: NDArray[np.int32] = np.zeros((longest, places, kept), dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return int(np.count_nonzero(self._keys)) * (8 + 4 * self.kept)

    def find(self, contexts: NDArray[np.int64]) -> Found:
        """Return the candidates after the longest known end of each context, `[..., longest]`."""
        keys = _keys(contexts.reshape(-1, self.longest))
        lengths, places = np.arange(self.longest), self._places(keys)
        known = self._keys[lengths, places] == keys
        found = np.where(known, lengths + 1, 0).max(1)
        rows = self._rows[found - 1, places[np.arange(len(keys)), found - 1]]
        rows[found == 0] = NONE
        return Found(rows.reshape(*contexts.shape[:-1], self.kept), found.reshape(contexts.shape[:-1]))

    def learn(self, contexts: NDArray[np.int64], candidates: NDArray[np.int64]) -> None:
        """Replace the candidates, `[n, kept]` or fewer, after contexts, `[n, longest]`; the last of equal ones wins."""
        keys = _keys(contexts)
        lengths, places = np.arange(self.longest), self._places(keys)
        missing = self.kept - candidates.shape[1]
        self._keys[lengths, places] = keys
        self._rows[lengths, places] = np.pad(candidates, ((0, 0), (0, missing)), constant_values=NONE)[:, None]

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Learn from a text that no pass has judged: the token after a context is its first candidate."""
        if len(tokens) < 2:
            return
        padded = np.array([*[NONE] * (self.longest - 1), *tokens])
        contexts = np.lib.stride_tricks.sliding_window_view(padded, self.longest)[:-1]
        followers = padded[self.longest :]
        for length, keys in enumerate(_keys(contexts).T):
            # How often each context comes again later in the text; those with most repetitions are learnt first.
            order = np.argsort(keys, kind="stable")
            _, firsts, counts = np.unique(keys[order], return_index=True, return_counts=True)
            again = np.repeat(firsts + counts, counts) - 1 - np.arange(len(order))
            for turn in range(min(int(counts.max()), _PLACES * self.kept) - 1, -1, -1):
                chosen = order[again == turn]
                self._put_first(length, keys[chosen], followers[chosen])

    def grown(self, contexts: NDArray[np.int64], tree: Tree) -> NDArray[np.int64]:
        """Return the nodes' tokens, `[rows, nodes]`: candidates after contexts, `[rows, longest]`, likeliest first."""
        tokens = np.empty((len(contexts), len(tree)), dtype=np.int64)
        ends, known = {-1: contexts}, {}
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
            if parent not in known:
                known[parent] = self.find(ends[parent]).candidates
            found = known[parent][:, rank]
            # Any guess keeps the output exact.
            tokens[:, node] = np.where(found == NONE, ends[parent][:, -1], found)
            ends[node] = np.column_stack([ends[parent][:, 1:], tokens[:, node]])
        return tokens

    def _put_first(self, length: int, keys: NDArray[np.uint64], tokens: NDArray[np.int64]) -> None:
        """Put one token before the other candidates of each context; the contexts must differ."""
        places = self._places(keys)
        rows = np.where((self._keys[length, places] == keys)[:, None], self._rows[length, places], NONE)
        same = rows == tokens[:, None]
        last = np.where(same.any(1), same.argmax(1), self.kept - 1)
        rows = np.where(np.arange(self.kept) <= last[:, None], np.roll(rows, 1, axis=1), rows)
        rows[:, 0] = tokens
        self._keys[length, places], self._rows[length, places] = keys, rows

    def _places(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return ((keys >> _SHIFT) % np.uint64(self._keys.shape[1])).astype(np.int64)


def _keys(contexts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return hashes of each context's last token, last two, ... all, `[n, longest]`; 0 means no context."""
    tokens = (contexts[:, ::-1] + 2).astype(np.uint64)
    keys = np.empty_like(tokens)
    key = np.ones(len(tokens), dtype=np.uint64)
    for length in range(tokens.shape[1]):
        key = (key ^ tokens[:, length]) * _FACTOR
        key ^= key >> _SHIFT
        keys[:, length] = key
    return keys
