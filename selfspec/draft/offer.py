"""Offers of sources without a model for the next tokens: paths with probabilities, merged into one tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.tree_shape import sizes_within

Path = tuple[int, ...]

# The highest probability that a source may give a token, and how many places the prior of a kind counts for.
_SUREST, _WEIGHT = 0.98, 4.0


@dataclass(frozen=True)
class Offer:
    """Holds the paths that one source proposes after the text of one row.

    Attributes:
        kind: groups offers of equal trust, such as the length of a match; a larger kind promises more.
        shares: for each path of tokens, the probability that the source gives the path's last token after the tokens
            before it. Prefixes of a path come first.
    """

    kind: int
    shares: dict[Path, float]

    @classmethod
    def of_draft(cls, draft: Draft, tokens: Sequence[int], length: int) -> Offer:
        """Make an offer of one row's part of a draft, down to depth `length`; each token has probability 1."""
        paths = (path for path in draft.tree.paths if len(path) <= length)
        return cls(draft.match_length, {tuple(tokens[node] for node in path): 1.0 for path in paths})

    def reach(self, trust: float) -> dict[Path, float]:
        """Return, for each path, the probability that all its tokens are accepted.

        `trust` is the number of accepted tokens of such offers, divided by the sum of their shares.
        """
        reach: dict[Path, float] = {(): 1.0}
        for path, share in self.shares.items():
            reach[path] = reach[path[:-1]] * min(share * trust, _SUREST)
        del reach[()]
        return reach


class Trust:
    """Learns how often offers are accepted, for each source and kind of offer."""

    def __init__(self) -> None:
        self._accepted: dict[Hashable, float] = {}
        self._promised: dict[Hashable, float] = {}

    def reach(self, offers: Sequence[Offer], place: Hashable = 0) -> dict[Path, float]:
        """Return, for each path offered to a row, the highest probability by any source that all tokens are accepted.

        Trust is learnt separately for each `place` in a draft.
        """
        reach: dict[Path, float] = {}
        for source, offer in enumerate(offers):
            key = (place, source, offer.kind)
            trust = (_WEIGHT + self._accepted.get(key, 0.0)) / (_WEIGHT + self._promised.get(key, 0.0))
            for path, chance in offer.reach(trust).items():
                reach[path] = max(chance, reach.get(path, 0.0))
        return reach

    def count(self, offers: Sequence[Offer], outcome: Outcome, place: Hashable = 0) -> None:
        """Learn which offered tokens were accepted, at each place of the draft that was reached."""
        for source, offer in enumerate(offers):
            key = (place, source, offer.kind)
            for before, children, accepted in outcome.places():
                offered = [child for child in children if (*before, child) in offer.shares]
                promised = sum(offer.shares[*before, child] for child in offered)
                self._promised[key] = self._promised.get(key, 0.0) + promised
                self._accepted[key] = self._accepted.get(key, 0.0) + (accepted in offered)


@dataclass(frozen=True)
class Outcome:
    """Holds the draft of one row and its accepted path.

    Nodes before number `first` do not count: they come from another source.
    """

    tree: Tree
    tokens: Sequence[int]
    path: Sequence[int]
    first: int = 0

    def places(self) -> Iterator[tuple[Path, list[int], int | None]]:
        """Yield, for each place reached, the tokens before it, its children that count, and the accepted child."""
        for depth, place in enumerate((-1, *self.path)):
            before = tuple(self.tokens[node] for node in self.path[:depth])
            children = [self.tokens[node] for node in self.tree.children[place + 1] if node >= self.first]
            accepted = self.path[depth] if depth < len(self.path) else None
            yield before, children, None if accepted is None or accepted < self.first else self.tokens[accepted]


def likeliest_path(reach: dict[Path, float], depth: int) -> Path:
    """Return the likeliest token after the text, the likeliest after that, and so on, at most `depth`."""
    best: dict[Path, Path] = {}
    for path, chance in reach.items():
        before = path[:-1]
        if before not in best or chance > reach[best[before]]:
            best[before] = path
    found: Path = ()
    while found in best and len(found) < depth:
        found = best[found]
    return found


@dataclass(frozen=True)
class Merged:
    """Holds the merged offers of all rows: the nodes' parents, and each row's tokens, `None` where it has none."""

    parents: tuple[int, ...]
    tokens: list[list[int | None]]


def merged(
    rows: Sequence[dict[Path, float]],
    most: Budget,
    promise: Callable[[int, float], float],
    branches: bool,
    under: Sequence[dict[Path, int]] = (),
) -> Merged:
    """Merge the offers to each row into the tree that promises most for its cost.

    Rows share the shape of the tree, not its tokens: a node is the first, second, ... likeliest child of its parent.
    The tree takes the nodes that are reached most often over all rows.

    Args:
        rows: for each row, the probability of each path, as `Trust.reach` returns it.
        most: the largest tree.
        promise: returns the worth of a tree, given its number of nodes and the tokens that it commits in expectation;
            the empty tree may be worth more than any other.
        branches: whether a node may have several children; else the tree is a chain.
        under: for each row, the nodes that a draft has already, by the tokens of their paths, with the same numbers in
            all rows. The tree holds further nodes, numbered after these.
    """
    drawn = under or [{}] * len(rows)
    ranked = [_by_rank(*each, most, branches) for each in zip(rows, drawn, strict=True)]
    reached: dict[Path, float] = {}
    for row in ranked:
        for place, node in row.items():
            reached[place] = reached.get(place, 0.0) + node.reach / len(rows)
    # A node is reached no more often than its parent and its likelier siblings, and comes after them.
    chosen = sorted(reached, key=lambda place: (-reached[place], len(place), place))
    sizes = [size for size in sizes_within(most.nodes) if size <= len(chosen)]
    taken = chosen[: max(sizes, key=lambda size: promise(size, sum(reached[place] for place in chosen[:size])))]
    first = len(drawn[0])
    numbers = {(): -1} | {_place_of(node): node for node in range(first)}
    numbers |= {place: number for number, place in enumerate(taken, first)}
    tokens = [[row[place].token if place in row else None for place in taken] for row in ranked]
    return Merged(tuple(numbers[place[:-1]] for place in taken), tokens)


def _place_of(node: int) -> Path:
    """Return the place of a node that a draft has already: below 0, where no rank is."""
    return (-1 - node,)


@dataclass(frozen=True)
class _Node:
    token: int
    reach: float


def _by_rank(reach: dict[Path, float], drawn: dict[Path, int], most: Budget, branches: bool) -> dict[Path, _Node]:
    """Return the likeliest nodes of a row, by the ranks among siblings along their paths."""
    likeliest = sorted(reach, key=lambda path: (-reach[path], len(path)))
    ranks: dict[Path, Path] = {(): ()} | {path: _place_of(node) for path, node in drawn.items()}
    children: dict[Path, int] = {}
    nodes: dict[Path, _Node] = {}
    for path in likeliest:
        before, rank = ranks.get(path[:-1]), children.get(path[:-1], 0)
        if path in drawn or before is None or (rank and not branches) or len(path) > most.depth:
            continue
        children[path[:-1]] = rank + 1
        ranks[path] = (*before, rank)
        nodes[ranks[path]] = _Node(path[-1], reach[path])
        if len(nodes) == most.nodes:
            break
    return nodes


def counted(continuations: Iterable[tuple[float, Sequence[int]]]) -> dict[Path, float]:
    """Return the probability of each token of weighted continuations after the tokens before it, by its count.

    Unseen tokens share a probability by the number of distinct tokens seen (Witten and Bell, 1991, method C).
    """
    counts: dict[Path, float] = {(): 0.0}
    kinds: dict[Path, int] = {}
    for weight, tokens in continuations:
        counts[()] += weight
        for length in range(1, len(tokens) + 1):
            path = tuple(tokens[:length])
            if path not in counts:
                counts[path] = 0.0
                kinds[path[:-1]] = kinds.get(path[:-1], 0) + 1
            counts[path] += weight
    return {path: count / (counts[path[:-1]] + kinds[path[:-1]]) for path, count in counts.items() if path}
