"""A tree of what is likely in each row: rows share its shape, and each fills it with tokens of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget
from selfspec.draft.tree_growth import sizes_within

TokenPath = tuple[int, ...]
"""The tokens from the text's end on to a node of a tree."""

# The highest probability that a token may have after the tokens before it.
_SUREST = 0.98
# How many places the prior of a kind counts for.
_WEIGHT = 4.0


@dataclass(frozen=True)
class Offer:
    """Holds the paths that are proposed for one row.

    Attributes:
        kind: groups offers of equal trust, such as the length of a match; a larger kind promises more.
        shares: probability of each path's last token after the tokens before it. Prefixes of a path come first.
    """

    kind: int
    shares: dict[TokenPath, float]


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


def likeliest_path(reach: dict[TokenPath, float], depth: int) -> TokenPath:
    """Return the likeliest token after the text, the likeliest after that, and so on, at most `depth` tokens."""
    best: dict[TokenPath, TokenPath] = {}
    for path, chance in reach.items():
        before = path[:-1]
        if before not in best or chance > reach[best[before]]:
            best[before] = path
    found: TokenPath = ()
    while found in best and len(found) < depth:
        found = best[found]
    return found


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
