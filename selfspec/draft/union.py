"""Several sources in one tree: offers of sources without a model, beside the draft of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.draft.cascade import JoinedDrafter, joined_spelling
from selfspec.draft.draft import Budget, Draft, Offer, TokenPath, Verdict
from selfspec.draft.drafter import MODEL, FreeProposer, Proposer, drafter
from selfspec.draft.rows_view import RowsView, chains, filled_up, guesses, last_known, lengths_of
from selfspec.draft.tree_growth import sizes_within
from selfspec.runtime.request import PassResult

# How many places the prior of a kind counts for.
_WEIGHT = 4.0


# The place, in `Trust`, of nodes beside a model's.
_BESIDE = "beside"
# Tokens that a round with the model's draft is assumed to commit at first, and how many rounds that counts for.
_COMMITS, _ROUNDS = 2.0, 4.0


@drafter(
    "union",
    argument=":DRAFT+DRAFT",
    written="before",
    example="union:suffix+recycle+exit:4",
    help="drafts without a model in one tree, beside what one with a model drew",
)
@dataclass(frozen=True, init=False)
class Union(JoinedDrafter):
    """Merges the offers of sources without a model into one tree, and puts them beside the draft of a model.

    A round takes the tree of the sources without a model if it promises more than the model's draft. Else the model
    drafts a chain, and the likeliest other offers are judged after its tokens. They are not drawn, so their q is
    one-hot; the rules are exact for such siblings. Rows in lockstep get the chain alone.

    Acceptance rates are learnt for each source, and separately beside a model's nodes. Where rows are apart (see
    `FixedLength`), each has a chain: of the sources without a model, or else of the model, which is asked last.
    """

    branches = True

    @property
    def spelling(self) -> str | None:
        names = joined_spelling(self.sources)
        return None if names is None else f"union:{names}"

    def begin(self, rows: RowsView) -> Proposer:
        free = [source.begin(rows) for source in self.sources if source.runs == "nothing"]
        drawn = [source.begin(rows) for source in self.sources if source.runs != "nothing"]
        merging = MergingProposer(rows, free)
        return UnionProposer(merging, drawn[0]) if drawn else merging


class MergingProposer(FreeProposer):
    """Drafts a tree from the offers to each row, or a chain for each where rows are apart; nothing is drawn.

    By default they are the offers of its parts, all of them without a model.
    """

    def __init__(self, rows: RowsView, parts: Sequence[Proposer] = ()) -> None:
        self.rows_apart, self.parts = rows.rows_apart, parts
        self._trust: defaultdict[int, Trust] = defaultdict(Trust)
        # The last draft, taken or not, and the offers behind it, by running row.
        self.proposed: Draft | None = None
        self.offered: Sequence[tuple[Offer, ...]] = ()

    def offers(self, rows: RowsView, budget: Budget) -> list[tuple[Offer, ...]]:
        each = [part.offers(rows, budget) for part in self.parts]
        return [tuple(chain.from_iterable(offers)) for offers in zip(*each, strict=True)]

    def trust(self, row: int) -> Trust:
        """Return the trust in offers to a row: its own where rows are apart, else that of all rows."""
        return self._trust[row if self.rows_apart else -1]

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a tree; none if no unfinished row has an offer, or no tree would pay."""
        self.offered = self.offers(rows, budget)
        if self.rows_apart:
            found = [
                likeliest_path(self.trust(row).reach(offers), rows.budget_of(row, budget).depth)
                if row in rows.unfinished
                else ()
                for row, offers in zip(rows.running, self.offered, strict=True)
            ]
            self.proposed = chains(rows, found, match_length=2)
            return self.proposed

        def promise(nodes: int, committed: float) -> float:
            return (1 + committed) / rows.controller.round_cost(0, nodes)

        each = zip(rows.running, self.offered, strict=True)
        going = [(row, offers) for row, offers in each if row in rows.unfinished]
        reach = [self.trust(row).reach(offers) for row, offers in going]
        tree = merged(reach, budget, promise, branches=not rows.chains_only)
        if not tree.parents:
            return rows.no_draft()
        # The row with the shortest match limits the batch. A match of 1 is a recycled candidate.
        least = min(max((offer.kind for offer in offers), default=0) for _, offers in going)
        self.proposed = Draft(filled(rows, tree), Tree(tree.parents), match_length=max(least, 2))
        return self.proposed

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        # Where rows are apart, the draft may hold chains of a source behind this one, too.
        took = draft.length > 0 if self.rows_apart else draft is self.proposed
        if self.proposed is None or not took:
            return
        lengths = lengths_of(rows, self.proposed)
        for row, offers, length in zip(verdict.running, self.offered, lengths, strict=True):
            if length and row in verdict.rows:
                found, tree = verdict.rows[row], Tree.chain(length) if self.rows_apart else draft.tree
                self.trust(row).count(offers, Outcome(tree, found.drafted, found.path[:length]))


class UnionProposer(Proposer):
    """Puts the offers of sources without a model beside the draft of a source with a model."""

    def __init__(self, free: MergingProposer, drawn: Proposer) -> None:
        self.parts = self._free, self._drawn = free, drawn
        self.early_exit = drawn.early_exit
        # Mean number of tokens that recent rounds with the model's draft committed.
        self._length = _COMMITS
        # The model's last draft with offers beside it, and how many of its nodes are the model's.
        self._joined: Draft | None = None
        self._nodes = 0

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        found, control = self._free.look_up(rows, budget), rows.controller
        if rows.rows_apart:
            without_branches = replace(budget, nodes=budget.depth)
            return filled_up(rows, found, without_branches, lambda rest: self._drawn.propose(rows, rest))
        if found.length and control.prefers(found.match_length, [MODEL]) and control.tries(found.match_length):
            return found
        drawn = self._drawn.propose(rows, Budget.chain(budget.depth))
        # The nodes beside a chain depend on all of its tokens.
        alone = rows.chains_only or rows.in_lockstep
        return drawn if alone or not drawn.length else self._beside(rows, budget, drawn)

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        if draft.steps and verdict.rows:
            lengths = [len(row.path) for row in verdict.rows.values()]
            self._length += (1 + sum(lengths) / len(lengths) - self._length) / (_ROUNDS + 1)
        if draft is self._joined:
            for number, offers in zip(verdict.running, self._free.offered, strict=True):
                if number in verdict.rows:
                    row = verdict.rows[number]
                    outcome = Outcome(draft.tree, row.drafted, row.path, self._nodes)
                    self._free.trust(number).count(offers, outcome, _BESIDE)

    def _beside(self, rows: RowsView, budget: Budget, drawn: Draft) -> Draft:
        nodes = len(drawn.tree)
        going = [index for index, row in enumerate(rows.running) if row in rows.unfinished]
        reach = [self._free.trust(rows.running[index]).reach(self._free.offered[index], _BESIDE) for index in going]
        drew = drawn.tokens.tolist()

        def path_of(row: int, node: int) -> TokenPath:
            return tuple(drew[row][each] for each in drawn.tree.paths[node])

        def promise(more: int, committed: float) -> float:
            return (self._length + committed) / rows.controller.round_cost(drawn.steps, nodes + more)

        under = [{path_of(index, node): node for node in range(nodes)} for index in going]
        found = merged(reach, Budget(budget.depth, budget.nodes - nodes), promise, branches=True, under=under)
        if not found.parents:
            return drawn
        others = filled(rows, found)
        probs = drawn.probs
        if probs is not None:
            q = probs.new_zeros(*others.shape, probs.shape[-1]).scatter_(-1, others[..., None], 1.0)
            probs = torch.cat([probs, q], 1)
        tree = Tree((*drawn.tree.parents, *found.parents))
        tokens = torch.cat([drawn.tokens, others], 1)
        behind = None if drawn.behind is None else drawn.behind.after_more()
        self._joined = replace(drawn, tokens=tokens, tree=tree, probs=probs, behind=behind)
        self._nodes = nodes
        return self._joined


def filled(rows: RowsView, found: Merged) -> Tensor:
    """Return the tokens of merged nodes, `[rows, nodes]`; a row's last token fills in for those that it lacks."""
    known = iter(found.tokens)
    nothing = [None] * len(found.parents)
    each = [next(known) if row in rows.unfinished else nothing for row in rows.running]
    filler = last_known(rows)
    tokens = [[last if token is None else token for token in row] for row, last in zip(each, filler, strict=True)]
    return guesses(rows, tokens)


class Trust:
    """Learns how often offers are accepted, for each source and kind of offer."""

    def __init__(self) -> None:
        # From the prior on, by place, source and kind.
        self._accepted: defaultdict[Hashable, float] = defaultdict(lambda: _WEIGHT)
        self._promised: defaultdict[Hashable, float] = defaultdict(lambda: _WEIGHT)

    def reach(self, offers: Sequence[Offer], place: Hashable = 0) -> dict[TokenPath, float]:
        """Return each path's highest probability by any source; each `place` has a trust of its own."""
        reach: dict[TokenPath, float] = {}
        for source, offer in enumerate(offers):
            key = (place, source, offer.kind)
            trust = self._accepted.get(key, _WEIGHT) / self._promised.get(key, _WEIGHT)
            for path, chance in offer.reach(trust).items():
                reach[path] = max(chance, reach.get(path, 0.0))
        return reach

    def count(self, offers: Sequence[Offer], outcome: Outcome, place: Hashable = 0) -> None:
        """Learn which offered tokens were accepted, at each place reached."""
        for source, offer in enumerate(offers):
            key = (place, source, offer.kind)
            for before, children, accepted in outcome.places():
                offered = [child for child in children if (*before, child) in offer.shares]
                self._promised[key] += sum(offer.shares[*before, child] for child in offered)
                self._accepted[key] += accepted in offered


@dataclass(frozen=True)
class Outcome:
    """Holds one row's draft and accepted path; nodes before number `first` come from another source."""

    tree: Tree
    tokens: Sequence[int]
    path: Sequence[int]
    first: int = 0

    def places(self) -> Iterator[tuple[TokenPath, list[int], int | None]]:
        """Yield, for each place reached, the tokens before it, its children that count, and the accepted child."""
        for depth, place in enumerate((-1, *self.path)):
            before = tuple(self.tokens[node] for node in self.path[:depth])
            children = [self.tokens[node] for node in self.tree.children[place + 1] if node >= self.first]
            accepted = self.path[depth] if depth < len(self.path) else None
            yield before, children, None if accepted is None or accepted < self.first else self.tokens[accepted]


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
    """Holds the merged offers of all rows: the nodes' parents, and each row's tokens, `None` where it has none."""

    parents: tuple[int, ...]
    tokens: list[list[int | None]]


def merged(
    rows: Sequence[dict[TokenPath, float]],
    most: Budget,
    promise: Callable[[int, float], float],
    branches: bool,
    under: Sequence[dict[TokenPath, int]] = (),
) -> Merged:
    """Merge the offers to each row, as `Trust.reach` returns them, into the tree that promises most for its cost.

    Rows share the tree's shape, not its tokens: a node is its parent's first, second, ... likeliest child. The tree
    takes the nodes reached most often over all rows; without `branches` it is a chain. `promise` gives a tree's worth
    by its nodes and expected committed tokens; the empty tree may be worth most. `under` holds a draft's nodes in each
    row by the tokens of their paths, numbered alike in all rows; the tree's own numbers follow.
    """
    drawn = under or [{}] * len(rows)
    ranked = [_by_rank(*each, most, branches) for each in zip(rows, drawn, strict=True)]
    reached: dict[TokenPath, float] = {}
    for reach, row in zip(rows, ranked, strict=True):
        for place, path in row.items():
            reached[place] = reached.get(place, 0.0) + reach[path] / len(rows)
    # A node is reached no more often than its parent and its likelier siblings, and comes after them.
    chosen = sorted(reached, key=lambda place: (-reached[place], len(place), place))
    sizes = [size for size in sizes_within(most.nodes) if size <= len(chosen)]
    taken = chosen[: max(sizes, key=lambda size: promise(size, sum(reached[place] for place in chosen[:size])))]
    first = len(drawn[0])
    # Nodes that a draft has already have places below 0, where no rank is.
    numbers: dict[TokenPath, int] = {(): -1} | {(-1 - node,): node for node in range(first)}
    numbers |= {place: number for number, place in enumerate(taken, first)}
    tokens = [[row[place][-1] if place in row else None for place in taken] for row in ranked]
    return Merged(tuple(numbers[place[:-1]] for place in taken), tokens)


def _by_rank(
    reach: dict[TokenPath, float], drawn: dict[TokenPath, int], most: Budget, branches: bool
) -> dict[TokenPath, TokenPath]:
    """Return a row's likeliest paths, by the ranks of their tokens among siblings."""
    likeliest = sorted(reach, key=lambda path: (-reach[path], len(path)))
    ranks: dict[TokenPath, TokenPath] = {(): ()} | {path: (-1 - node,) for path, node in drawn.items()}
    children: dict[TokenPath, int] = {}
    found: dict[TokenPath, TokenPath] = {}
    for path in likeliest:
        before, rank = ranks.get(path[:-1]), children.get(path[:-1], 0)
        if path in drawn or before is None or (rank and not branches) or len(path) > most.depth:
            continue
        children[path[:-1]] = rank + 1
        ranks[path] = (*before, rank)
        found[ranks[path]] = path
        if len(found) == most.nodes:
            break
    return found
