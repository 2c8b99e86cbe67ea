"""Drafting by counts: the tokens that followed earlier matches of the text's end, merged into one tree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from selfspec.arguments import shown
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import Drafter, DraftMemory, drafter
from selfspec.draft.prompt_lookup import NONE, TextProposer, Tokens, places_in
from selfspec.draft.row_trees import Offer, TokenPath, Trust, likeliest_path, merged
from selfspec.draft.rows_view import RowsView, chains, guesses, last_known, lengths_of, remembered
from selfspec.errors import DraftConfigError
from selfspec.runtime.request import PassResult

# Matches that are enough to count. With fewer of one length, shorter matches count too, each with a lower weight.
_ENOUGH, _SHORTER = 8, 0.3
# Matches at least this long have the same trust, and the longest that is looked for.
_LONG_MATCH, _LONGEST = 12, 16


@drafter("suffix", help="what followed in the text and in earlier ones of the wrapper")
@dataclass(frozen=True)
class Suffixes(Drafter):
    """Drafts from suffixes of earlier text, as in SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975).

    Continuations of the longest matches in the text and in earlier texts of the wrapper form one tree, weighted by
    their counts. Nothing is drawn, so q is one-hot. Under greedy decoding and
    `coupled`, earlier texts (prompts included) change speed alone; with other sampling, a seed repeats its tokens only
    with a new wrapper. Where rows are apart (see `FixedLength`), a row has a chain, and copies nothing from texts that
    end during the call.

    Attributes:
        most_bytes: size of earlier texts, at most 64 MiB, which each round reads; the oldest make room. 0: none.

    Raises:
        DraftConfigError: `most_bytes` is out of range.
    """

    branches = True
    most_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if type(self.most_bytes) is not int or not 0 <= self.most_bytes <= 1 << 26:
            raise DraftConfigError(f"most_bytes must be an integer from 0 to {1 << 26}, got {shown(self.most_bytes)}")

    def begin(self, rows: RowsView) -> SuffixProposer:
        return SuffixProposer(rows, remembered(rows, self, partial(TextMemory, self.most_bytes)))


class SuffixProposer(TextProposer):
    """Counts continuations in each row's text and in earlier texts of the wrapper."""

    def __init__(self, rows: RowsView, memory: TextMemory) -> None:
        super().__init__(map(rows.source, range(rows.size)))
        self._rows_apart = rows.rows_apart
        self._memory, self._at_first = memory, memory.tokens
        self._trust: defaultdict[int, Trust] = defaultdict(Trust)
        # The last draft, taken or not, and the offers behind it, by running row.
        self._proposed: Draft | None = None
        self._offered: Sequence[Offer] = ()

    @property
    def nbytes(self) -> int:
        return self._memory.tokens.nbytes

    def trust(self, row: int) -> Trust:
        """Return the trust in offers to a row: its own where rows are apart, else that of all rows."""
        return self._trust[row if self._rows_apart else -1]

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a tree, or chains where rows are apart; none if no unfinished row has a match or no tree pays."""
        self._offered = [self._offer(rows, row, rows.budget_of(row, budget).depth) for row in rows.running]
        each = zip(rows.running, self._offered, strict=True)
        if self._rows_apart:
            found = [
                likeliest_path(self.trust(row).reach(offer), rows.budget_of(row, budget).depth)
                if row in rows.unfinished
                else ()
                for row, offer in each
            ]
            self._proposed = chains(rows, found, match_length=2)
            return self._proposed

        def promise(nodes: int, committed: float) -> float:
            return (1 + committed) / rows.controller.round_cost(0, nodes)

        going = [(row, offer) for row, offer in each if row in rows.unfinished]
        reach = [self.trust(row).reach(offer) for row, offer in going]
        tree = merged(reach, budget, promise, branches=not rows.chains_only)
        if not tree.parents:
            return rows.no_draft()
        known = iter(tree.tokens)
        nothing = [None] * len(tree.parents)
        tokens = [
            [last if token is None else token for token in (next(known) if row in rows.unfinished else nothing)]
            for row, last in zip(rows.running, last_known(rows), strict=True)
        ]
        # The row with the shortest match limits the batch. A match of 1 is a recycled candidate.
        least = min(offer.kind for _, offer in going)
        self._proposed = Draft(guesses(rows, tokens), Tree(tree.parents), match_length=max(least, 2))
        return self._proposed

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        # Where rows are apart, the draft may hold chains of a source behind this one, too.
        if self._proposed is not None and (draft.length if self._rows_apart else draft is self._proposed):
            lengths = lengths_of(rows, self._proposed)
            for row, offer, length in zip(verdict.running, self._offered, lengths, strict=True):
                if length and row in verdict.rows:
                    found, tree = verdict.rows[row], Tree.chain(length) if self._rows_apart else draft.tree
                    self.trust(row).count(offer, tree, found.drafted, found.path[:length])
        for row, found in verdict.rows.items():
            if found.ended:
                self._memory.add([*rows.text(row), *found.tokens])

    def _offer(self, rows: RowsView, row: int, depth: int) -> Offer:
        own, earlier = self.text_of(rows, row), self._at_first if self._rows_apart else self._memory.tokens
        context: list[int] = own[-_LONGEST:].tolist()
        # A loop that reaches the end of the text continues with its beginning.
        found = [_Found(own, places_in(own, context, _LONGEST), goes_round=True)]
        found.append(_Found(earlier, places_in(earlier, context, _LONGEST)))
        longest = max(len(each.places) for each in found)
        shares = counted(_weighted(found, longest, depth))
        return Offer(min(longest, _LONG_MATCH), shares)


@dataclass(frozen=True)
class _Found:
    """Holds a context's places in a text; if it `goes_round`, continuations start again at the text's end."""

    tokens: Tokens
    places: Sequence[np.ndarray]
    goes_round: bool = False

    def continuations(self, length: int, depth: int) -> Counter[tuple[int, ...]]:
        """Count the continuations, of up to `depth` tokens, of matches of exactly `length` tokens."""
        if length > len(self.places):
            return Counter()
        places = self.places[length - 1]
        if length < len(self.places):
            places = np.setdiff1d(places, self.places[length], assume_unique=True)
        steps = np.arange(depth)
        if self.goes_round:
            steps = steps % (len(self.tokens) - places[:, None])
        # Every other text ends with `NONE`.
        reads = np.minimum(places[:, None] + steps, len(self.tokens) - 1)
        runs = self.tokens[reads].tolist()
        return Counter(tuple(tokens[: tokens.index(NONE)] if NONE in tokens else tokens) for tokens in runs)


def _weighted(found: Sequence[_Found], longest: int, depth: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield continuations of the longest matches, and of shorter ones until there are enough."""
    places = 0
    for length in range(longest, 0, -1):
        for each in found:
            counts = each.continuations(length, depth)
            places += counts.total()
            for tokens, count in counts.items():
                yield count * _SHORTER ** (longest - length), tokens
        if places >= _ENOUGH:
            break


def counted(continuations: Iterable[tuple[float, Sequence[int]]]) -> dict[TokenPath, float]:
    """Return each token's probability by counts, with method C (Witten and Bell, 1991) for unseen tokens."""
    counts: dict[TokenPath, float] = {(): 0.0}
    kinds: dict[TokenPath, int] = {}
    for weight, tokens in continuations:
        counts[()] += weight
        for length in range(1, len(tokens) + 1):
            path = tuple(tokens[:length])
            if path not in counts:
                counts[path] = 0.0
                kinds[path[:-1]] = kinds.get(path[:-1], 0) + 1
            counts[path] += weight
    return {path: count / (counts[path[:-1]] + kinds[path[:-1]]) for path, count in counts.items() if path}


class TextMemory(DraftMemory):
    """Keeps the latest texts that fit into its bytes, with `NONE` after each. A search reads all of them."""

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes // 4
        self.tokens: Tokens = np.empty(0, dtype=np.int32)

    def add(self, text: Sequence[int]) -> None:
        """Add a text, and drop the oldest tokens that no longer fit."""
        if not self._most:
            return
        # Adding makes a new array, so that the old one stays as it is.
        kept = np.concatenate([self.tokens, text, [NONE]]).astype(np.int32)
        self.tokens = kept[max(len(kept) - self._most, 0) :]
