"""Drafting by counts: the tokens that followed earlier matches of the text's end, merged into one tree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from selfspec.arguments import shown
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import Drafter, DraftMemory, drafter
from selfspec.draft.prompt_lookup import NONE, TextProposer, Tokens, places_in
from selfspec.draft.rows_view import RowsView, guesses, last_known, remembered
from selfspec.draft.tree_growth import sizes_within
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
    with a new wrapper.

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
        self._memory, self._trust = memory, Trust()
        # The last draft, taken or not, and the offers behind it, by running row.
        self._proposed: Draft | None = None
        self._offered: Sequence[Offer] = ()

    @property
    def nbytes(self) -> int:
        return self._memory.tokens.nbytes

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a tree; none if no unfinished row has a match or no tree pays."""
        self._offered = [self._offer(rows, row, budget.depth) for row in rows.running]

        def promise(nodes: int, committed: float) -> float:
            return (1 + committed) / rows.controller.round_cost(0, nodes)

        each = zip(rows.running, self._offered, strict=True)
        going = [offer for row, offer in each if row in rows.unfinished]
        tree = merged(list(map(self._trust.reach, going)), budget, promise, branches=not rows.chains_only)
        if not tree.parents:
            return rows.no_draft()
        known = iter(tree.tokens)
        nothing = [None] * len(tree.parents)
        tokens = [
            [last if token is None else token for token in (next(known) if row in rows.unfinished else nothing)]
            for row, last in zip(rows.running, last_known(rows), strict=True)
        ]
        # The row with the shortest match limits the batch. A match of 1 is a recycled candidate.
        least = min(offer.kind for offer in going)
        self._proposed = Draft(guesses(rows, tokens), Tree(tree.parents), match_length=max(least, 2))
        return self._proposed

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        if draft is self._proposed:
            for row, offer in zip(verdict.running, self._offered, strict=True):
                if (found := verdict.rows.get(row)) is not None:
                    self._trust.count(offer, draft.tree, found.drafted, found.path)
        for row, found in verdict.rows.items():
            if found.ended:
                self._memory.add([*rows.text(row), *found.tokens])

    def _offer(self, rows: RowsView, row: int, depth: int) -> Offer:
        own, earlier = self.text_of(rows, row), self._memory.tokens
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


# The tree of what is likely in each row: rows share its shape, and each fills it with tokens of its own.
TokenPath = tuple[int, ...]
"""The tokens from the text's end on to a node of a tree."""

# The highest probability that a token may have after the tokens before it.
_SUREST = 0.98
# How many places the prior of a kind counts for.
_WEIGHT = 4.0


@dataclass(frozen=True)
class Offer:
    """Holds the paths that are proposed for one row.

    `kind` groups offers of equal trust, such as the length of a match; a larger kind promises more.
    """

    kind: int
    shares: dict[TokenPath, float]  # of each path's last token after the tokens before it; prefixes come first


class Trust:
    """Learns how often the tokens of offers are accepted, for each kind of offer."""

    def __init__(self) -> None:
        # From the prior on, by kind: tokens accepted, and shares added up.
        self._accepted: defaultdict[int, float] = defaultdict(lambda: _WEIGHT)
        self._promised: defaultdict[int, float] = defaultdict(lambda: _WEIGHT)

    def reach(self, offer: Offer) -> dict[TokenPath, float]:
        """Return each path's probability, by its shares and by how often such shares came true."""
        trust = self._accepted.get(offer.kind, _WEIGHT) / self._promised.get(offer.kind, _WEIGHT)
        reach: dict[TokenPath, float] = {(): 1.0}
        for path, share in offer.shares.items():
            reach[path] = reach[path[:-1]] * min(share * trust, _SUREST)
        del reach[()]
        return reach

    def count(self, offer: Offer, tree: Tree, tokens: Sequence[int], path: Sequence[int]) -> None:
        """Learn which offered tokens were accepted, at each place reached, by a row's `tokens` and accepted `path`."""
        for depth, place in enumerate((-1, *path)):
            before = tuple(tokens[node] for node in path[:depth])
            children = [tokens[node] for node in tree.children[place + 1]]
            offered = [child for child in children if (*before, child) in offer.shares]
            self._promised[offer.kind] += sum(offer.shares[*before, child] for child in offered)
            self._accepted[offer.kind] += depth < len(path) and tokens[path[depth]] in offered


@dataclass(frozen=True)
class Merged:
    """Holds the tree of all rows: the nodes' parents, and each row's tokens, `None` where it has none."""

    parents: tuple[int, ...]
    tokens: list[list[int | None]]


def merged(
    rows: Sequence[dict[TokenPath, float]], most: Budget, promise: Callable[[int, float], float], branches: bool
) -> Merged:
    """Merge the paths of each row, as `Trust.reach` returns them, into the tree that promises most for its cost.

    A node is its parent's first, second, ... likeliest child. The tree takes the nodes reached most often over all
    rows; without `branches` it is a chain. `promise` gives a tree's worth by its nodes and expected committed tokens;
    the empty tree may be worth most.
    """
    ranked = [_by_rank(each, most, branches) for each in rows]
    reached: dict[TokenPath, float] = {}
    for reach, row in zip(rows, ranked, strict=True):
        for place, path in row.items():
            reached[place] = reached.get(place, 0.0) + reach[path] / len(rows)
    # A node is reached no more often than its parent and its likelier siblings, and comes after them.
    chosen = sorted(reached, key=lambda place: (-reached[place], len(place), place))
    sizes = [size for size in sizes_within(most.nodes) if size <= len(chosen)]
    taken = chosen[: max(sizes, key=lambda size: promise(size, sum(reached[place] for place in chosen[:size])))]
    numbers = {(): -1} | {place: number for number, place in enumerate(taken)}
    tokens = [[row[place][-1] if place in row else None for place in taken] for row in ranked]
    return Merged(tuple(numbers[place[:-1]] for place in taken), tokens)


def _by_rank(reach: dict[TokenPath, float], most: Budget, branches: bool) -> dict[TokenPath, TokenPath]:
    """Return a row's likeliest paths, by the ranks of their tokens among siblings."""
    likeliest = sorted(reach, key=lambda path: (-reach[path], len(path)))
    ranks: dict[TokenPath, TokenPath] = {(): ()}
    children: dict[TokenPath, int] = {}
    found: dict[TokenPath, TokenPath] = {}
    for path in likeliest:
        before, rank = ranks.get(path[:-1]), children.get(path[:-1], 0)
        if before is None or (rank and not branches) or len(path) > most.depth:
            continue
        children[path[:-1]] = rank + 1
        ranks[path] = (*before, rank)
        found[ranks[path]] = path
        if len(found) == most.nodes:
            break
    return found
