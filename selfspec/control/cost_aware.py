"""Default control: draft as long as one more token promises more than it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from selfspec.arguments import check_kind
from selfspec.cache.tree import Tree
from selfspec.control.controller import (
    MAY_LOSE,
    BatchProgress,
    Control,
    Controller,
    Progress,
    check_length,
    check_nodes,
    may_lose,
)
from selfspec.control.costs import Costs, CostsByRows, Prospects, RaggedCosts
from selfspec.draft.draft import Budget, Draft, RowVerdict
from selfspec.draft.drafter import MODEL, PREDICTED
from selfspec.draft.tree_growth import Confidences, Shape, largest_products, sizes_within

# The share of a short text's plain steps that drafts may lose.
_SHARE_AT_RISK = 0.04


@dataclass(frozen=True)
class CostAware(Control):
    """Drafts as long as one more token promises more than it costs, and not at all where drafting does not pay.

    It learns the acceptance rate at each confidence of the draft, and drafts on while the chance that the whole draft
    and the next token are accepted is worth more than a draft step at the speed so far.

    A loss budget bounds what drafting may cost: a few plain steps at once (at most 4 % of a short text), and one more
    for every two hundred rounds. When it is spent, the draft length is 0 until there is budget again. An unpromising
    draft waits until twice the possible loss of a round is saved up.

    A batch ends when its slowest row ends, so only a draft's gain for that row counts. Rows start in lockstep, since
    passes over rows at different places take longer, and advance alone once drafts gain enough to pay for that.

    If more nodes than levels are allowed, the model drafts the tree that promises most for its cost, or a chain if that
    promises as much.

    Attributes:
        longest: the most tokens of a draft, or levels of a tree.
        nodes: the most tokens of a draft, siblings included, and so also the most levels. None: drafts are chains.
        costs: `Costs` or `BatchCosts` of a round; None: measured costs, else an estimate from the weights that a step
            reads.
    """

    yields_to_load = True

    longest: int = 7
    costs: CostsByRows | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        check_length(self.longest)
        if self.nodes is not None:
            check_nodes(self.nodes, 1)
        check_kind("costs", self.costs, CostsByRows, "write Costs(draft=0.3), or leave them out")

    def begin(self, costs: CostsByRows) -> Controller:
        return CostAwareController(self._most, self.costs or costs, BatchProgress)

    def begin_by_load(self, costs: CostsByRows) -> Controller:
        return CostAwareController(self._most, RaggedCosts(self.costs or costs), Progress)

    @property
    def _most(self) -> Budget:
        nodes = self.nodes or self.longest
        return Budget(min(self.longest, nodes), nodes)


class CostAwareController(Controller):
    """Decides for `CostAware`; `progress` makes the object that says how far a round advances the rows."""

    def __init__(self, most: Budget, costs: CostsByRows, progress: Callable[[], Progress]) -> None:
        super().__init__(most)
        self._by_rows, self._costs = costs, costs.in_batch(1)
        self._prospects = Prospects(self._costs, most.depth)
        self._acceptance = AcceptanceModel()
        self._model = self._gain(MODEL)
        self._in_step = progress is BatchProgress
        self._committed, self._with_dropped = progress(), progress()
        self._rounds = 0
        self._at_once = 0.0
        self._reached: list[float] = []
        self._confidences: list[Confidences | list[float]] = []
        self._branches = False
        # Steps after which the device is waited for, once a round, and after which the draft ends.
        self._asks_at, self._ends_at = 1, math.inf

    def budget(self, remaining: int, unfinished: Sequence[bool]) -> Budget:
        if len(unfinished) != self._costs.rows:
            self._costs = self._by_rows.in_batch(len(unfinished))
            self._prospects = Prospects(self._costs, self.most.depth)
        if not self._rounds:
            self._at_once = min(MAY_LOSE, _SHARE_AT_RISK * remaining)
        self._rounds += 1
        self._reached = [1.0] * len(unfinished)
        self._confidences, self._branches = [], False
        # Half of the way that a draft goes by the rates so far.
        self._asks_at, self._ends_at = 1 + self._further(self._acceptance.mean**2) // 2, math.inf
        return super().budget(remaining, unfinished)

    def tries(self, match: int) -> bool:
        if match == PREDICTED:
            # A prediction that fails is drafted from ever more seldom.
            return True
        loss_budget = self._gain(match)
        # Always ask: each loss budget counts how often it is asked.
        opens = loss_budget.opens(self._at_once, self._prospects.of_look_up if match else self._prospects.of_model)
        # Together, all sources of drafts may lose no more plain steps than one source alone.
        paid = sum(max(source.paid, 0.0) for match, source in self._gains.items() if match != PREDICTED)
        return opens and (loss_budget.gains or paid <= may_lose(self._at_once, self._rounds))

    def round_cost(self, steps: int, nodes: int) -> float:
        return self._costs.of_round(steps, nodes)

    def shape(self, chances: tuple[float, ...], budget: Budget) -> Tree:
        tree = _best_shape(chances, budget, self._costs).tree
        self._branches = not tree.is_chain
        return tree

    def look_up_length(self, share: float) -> int:
        return self._prospects.look_up_length(share)

    def predicted_length(self, share: float, longest: int) -> int:
        return self._prospects.predicted_length(share, longest)

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        if self._branches:
            return True
        steps = len(self._confidences) + 1
        waits = isinstance(confidences, Confidences) and confidences.waits
        if isinstance(confidences, Confidences) and waits and steps != self._asks_at:
            confidences.start()
            self._confidences.append(confidences)
            return steps < self._ends_at
        self._confidences.append(confidences())
        for found in map(_values, self._confidences if waits else self._confidences[-1:]):
            self._reached = [
                reached * self._acceptance.chance(confidence)
                for reached, confidence in zip(self._reached, found, strict=True)
            ]
        standing = [reached for reached, unfinished in zip(self._reached, self._unfinished, strict=True) if unfinished]
        further = self._further(self._acceptance.mean * sum(standing) / len(standing))
        self._ends_at = steps + further
        return further > 0

    def _further(self, promised: float) -> int:
        """Return how many steps pay, of which the first promises so many tokens."""
        # Compare with what would be committed in the time of a draft step, at the speed of the rounds so far.
        least, steps = max(1.0, self._model.rate) * (self._costs.draft + self._costs.widening), 0
        while promised > least and steps < self.most.depth:
            promised *= self._acceptance.mean
            steps += 1
        return steps

    def keeps_lockstep(self) -> bool:
        return self._in_step

    def learn(self, draft: Draft, rows: Sequence[RowVerdict | None]) -> None:
        if not draft.length or all(row is None for row in rows):
            return
        for position, confidences in enumerate(map(_values, self._confidences)):
            for row, confidence in zip(rows, confidences, strict=True):
                # Trees are drafted without asking, so the draft is a chain.
                if row is not None and position < row.judged_of(row.run_length):
                    self._acceptance.count(confidence, position < row.accepted_of(row.run_length))
        committed = self._committed.after([None if row is None else len(row.tokens) for row in rows])
        with_dropped = self._with_dropped.after([None if row is None else row.run_length for row in rows])
        loss_budget = self._gain(draft.match_length)
        loss_budget.count_dropped(
            committed, with_dropped - committed, self._costs.of_round(draft.steps, len(draft.tree))
        )
        if not loss_budget.is_new and loss_budget.rate > self._costs.out_of_step:
            self._in_step = False


def _values(confidences: Confidences | list[float]) -> list[float]:
    return confidences() if isinstance(confidences, Confidences) else confidences


@lru_cache(maxsize=64)
def _best_shape(chances: tuple[float, ...], most: Budget, costs: Costs) -> Shape:
    """Return the tree that commits most for its cost, or the longest chain if a chain does: it may end early."""

    def promise(shape: Shape) -> float:
        steps = shape.tree.depth
        # Each node that a draft step reads, except the first, widens that step as it would widen a target pass.
        beside = len(set(shape.tree.parents)) - steps
        return (1 + shape.expected) / (costs.of_round(steps, len(shape.tree)) + beside * costs.draft * costs.widening)

    depths = range(1, most.depth + 1)
    chains = [largest_products(chances[:1], depth, depth) for depth in depths]
    trees = [largest_products(chances, nodes, depth) for depth in depths for nodes in sizes_within(most.nodes) if nodes]
    best = max(trees, key=promise)
    return best if promise(best) > max(map(promise, chains)) else chains[-1]


class AcceptanceModel:
    """Learns the acceptance rate of tokens by the draft's confidence, starting with the rates of a fair draft.

    These exceed low confidences, as two flat distributions overlap. A draft that is accepted more or less often than a
    fair one shifts the rates of all confidences by the same log-odds; tokens seen at a confidence count besides.
    """

    _BINS = 10
    _PRIOR = 4.0  # tokens
    _UNSURE, _SURE = 0.35, 0.95

    def __init__(self) -> None:
        width = (self._SURE - self._UNSURE) / self._BINS
        self._fair = [self._UNSURE + (index + 0.5) * width for index in range(self._BINS)]
        self._accepted = [0.0] * self._BINS
        self._judged = [0.0] * self._BINS
        self._shift = 0.0

    @property
    def mean(self) -> float:
        """Acceptance rate of a token of unknown confidence."""
        return drawn_to_fair(sum(self._accepted), sum(self._judged))

    def chance(self, confidence: float) -> float:
        """Return the acceptance rate of a token by the draft's confidence in it."""
        bin_ = self._bin(confidence)
        shifted = 1 / (1 + math.exp(-_log_odds(self._fair[bin_]) - self._shift))
        return (self._PRIOR * shifted + self._accepted[bin_]) / (self._PRIOR + self._judged[bin_])

    def count(self, confidence: float, accepted: bool) -> None:
        """Count a judged token."""
        bin_ = self._bin(confidence)
        self._judged[bin_] += 1
        self._accepted[bin_] += accepted
        of_fair = sum(fair * judged for fair, judged in zip(self._fair, self._judged, strict=True))
        self._shift = _log_odds(self.mean) - _log_odds(drawn_to_fair(of_fair, sum(self._judged)))

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * self._BINS), self._BINS - 1)


def drawn_to_fair(accepted: float, judged: float) -> float:
    """Return the acceptance rate, shrunk towards a fair draft's, 0.6, with the weight of two tokens."""
    return (accepted + 2 * 0.6) / (judged + 2)


def _log_odds(chance: float) -> float:
    return math.log(chance / (1 - chance))
