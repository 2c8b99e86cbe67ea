"""Controls, which decide how long drafts are and whether to draft at all: their base, and the simple ones.

A control is configuration; its controller decides for one generation. It reads the draft's scores up to the last token
drafted, and earlier rounds, but neither the verdict on the current draft nor a clock. So the output stays exact, and a
seed gives the same tokens again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.arguments import is_whole, shown
from selfspec.cache.tree import Tree
from selfspec.control.costs import Costs, CostsByRows
from selfspec.draft.draft import Budget, Draft, RowVerdict
from selfspec.draft.drafter import PREDICTED
from selfspec.draft.rows_view import DraftController
from selfspec.draft.tree_growth import largest_products
from selfspec.errors import DraftConfigError

MOST_NODES = 1024
"""The most nodes that a tree may have: far more than ever pay."""

LONG_MATCH = 12
"""Look-up matches of this length or longer count as one source of drafts."""


class Controller(DraftController):
    """Decides for one generation. This base class lets every draft take all it may; subclasses override decisions.

    Costs of a round are estimates; None: the costs of a draft are not known.
    """

    def __init__(self, most: Budget, costs: Costs | None = None) -> None:
        self.most = most  # largest budget that it gives; the cache keeps slots for its nodes. Depth 0: plain decoding
        self._assumed = costs
        self._gains: dict[int, LossBudget] = {}
        self._unfinished: Sequence[bool] = ()

    def budget(self, remaining: int, unfinished: Sequence[bool]) -> Budget:
        """Choose the budget of the next round's draft, given the tokens still wanted, at least 1.

        One token of every round is the target's own, so a depth above `remaining` - 1 is never useful. `unfinished`
        says which of the running rows are unfinished.
        """
        self._unfinished = unfinished
        return self.most.within(remaining - 1)

    def tries(self, match: int) -> bool:
        return True

    def prefers(self, match: int, behind: Sequence[int]) -> bool:
        # A source on trial is preferred, too.
        gain = self._gain(match)
        return match == PREDICTED or gain.is_new or gain.rate >= max([1.0, *(self._gain(each).rate for each in behind)])

    def round_cost(self, steps: int, nodes: int) -> float:
        return 1.0

    def shape(self, chances: tuple[float, ...], budget: Budget) -> Tree:
        return largest_products(chances, budget.nodes, budget.depth).tree

    def look_up_length(self, share: float) -> int:
        return self.most.depth

    def predicted_length(self, share: float, longest: int) -> int:
        return min(self.most.depth, longest)

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        return True

    def keeps_lockstep(self) -> bool:
        """Return whether rows stay in lockstep in this round: all then commit as many tokens as the slowest.

        The answer must not depend on the current draft or on its verdict.
        """
        return False

    def learn(self, draft: Draft, rows: Sequence[RowVerdict | None]) -> None:
        """Learn from a round's draft and the verdict on each running row; None for a finished row.

        Tokens that lockstep dropped count: other rows cause the drop, and their places are drawn again.
        """
        runs = [row.run_length for row in rows if row is not None]
        if draft.length and runs:
            cost = 1.0 if self._assumed is None else self._assumed.of_round(draft.steps, len(draft.tree))
            self._gain(draft.match_length).count(sum(runs) / len(runs), cost)

    def _gain(self, match: int) -> LossBudget:
        return self._gains.setdefault(match if match == PREDICTED else min(match, LONG_MATCH), LossBudget())


class Control(ABC):
    """Chooses draft lengths; it is configuration."""

    # True if measured times may stop drafts where rows come and go: see `selfspec.serve.by_load`.
    yields_to_load = False

    @abstractmethod
    def begin(self, costs: CostsByRows) -> Controller:
        """Make the controller of one generation, given costs measured or estimated for model and draft."""

    def begin_by_load(self, costs: CostsByRows) -> Controller:
        """Make the controller of a batch whose rows come and go: none is kept in lockstep."""
        return self.begin(costs)


def check_length(length: int) -> None:
    """Refuse a draft length that is not an integer of at least 1."""
    if not is_whole(length) or length < 1:
        raise DraftConfigError(f"draft length must be an integer of at least 1, got {shown(length)}")


def check_nodes(nodes: int, length: int) -> None:
    """Refuse a number of nodes that no tree of that depth has, or above `MOST_NODES`."""
    if not is_whole(nodes) or not length <= nodes <= max(length, MOST_NODES):
        raise DraftConfigError(
            f"nodes of a draft are an integer of at least its length, {length}, and at most {MOST_NODES}, got "
            f"{shown(nodes)}; leave them out for chains"
        )


@dataclass(frozen=True)
class FixedLength(Control):
    """Drafts with the same length every round.

    Attributes:
        length: tokens to draft, at least 1; levels of a tree.
        nodes: tokens to draft in all, at least `length`; more make a tree with at most six children per node. None: a
            chain.
    """

    length: int
    nodes: int | None = None

    def __post_init__(self) -> None:
        check_length(self.length)
        if self.nodes is not None:
            check_nodes(self.nodes, self.length)

    def begin(self, costs: CostsByRows) -> Controller:
        return Controller(Budget(self.length, self.nodes or self.length), costs.in_batch(1))


MAY_LOSE = 3.0
"""Plain steps that drafting may lose at once."""

_PER_ROUND = 0.005  # further plain steps for each round of the generation
# A rarely tried draft loses this many times what the formula says: its weights and programs have left the processor's
# caches, and its passes may not be recorded yet.
_SELDOM = 2.0


def may_lose(at_once: float, rounds: int) -> float:
    """Return the plain steps that drafting may lose in `rounds` rounds, `at_once` of them from the start."""
    return at_once + _PER_ROUND * rounds


class LossBudget:
    """Bounds the plain steps that a source of drafts may lose: a few from the start, and 0.005 more each round.

    So a draft has time to show its worth, a useless one is tried again now and then, and the cost is about one percent.
    It measures what the source's recent drafts committed for their cost.
    """

    _TRIALS = 4
    _MEMORY = 0.9  # weight of a round relative to the next

    def __init__(self) -> None:
        self._tokens = self._cost = self._lost = self.paid = 0.0
        self.rounds = self._asked = 0

    @property
    def rate(self) -> float:
        """Committed tokens per plain step in recent rounds; 1 before the first."""
        return self._tokens / self._cost if self._cost else 1.0

    @property
    def is_new(self) -> bool:
        """True if the rounds are too few to judge by."""
        return self.rounds < self._TRIALS

    def count(self, tokens: float, cost: float) -> None:
        """Count a round: the tokens that a row committed, and its cost in plain steps."""
        self._tokens = self._MEMORY * self._tokens + tokens
        self._cost = self._MEMORY * self._cost + cost
        self.rounds += 1

    def opens(self, at_once: float, at_risk: float) -> bool:
        """Return whether this round may draft, if `at_once` plain steps may be lost from the start; call once a round.

        What a round of an unpromising draft may lose, `at_risk`, is saved up first; 0 for a promising draft.
        """
        self._asked += 1
        if at_risk > 0 and not self.gains:
            return _SELDOM * (self._lost + at_risk) <= may_lose(0.0, self._asked)
        return self._lost <= may_lose(at_once, self._asked)

    @property
    def gains(self) -> bool:
        """True if its drafts gained at least what they cost; losses of the trial do not count."""
        return self.rounds > 0 and self._lost <= 0

    def count_dropped(self, committed: float, dropped: float, cost: float) -> None:
        """Count a round with a draft: committed and dropped tokens of a row, and the cost in plain steps."""
        # Dropped tokens are the price of a trial. Counted as losses, they would rule out good drafts of large batches,
        # whose slowest row commits almost nothing at first.
        gained = committed + dropped if self.is_new else committed
        # Old gains must not pay for endless losses.
        self._lost = max(self._lost + cost - gained, -MAY_LOSE)
        self.paid = max(self.paid + cost - committed, -MAY_LOSE)
        self.count(committed + dropped, cost)


class Progress:
    """Counts how far drafts advance rows that come and go: each by the tokens that it gains."""

    def after(self, tokens: Sequence[int | None]) -> float:
        """Count the tokens that each row gained, None for a finished row; return the tokens gained on average."""
        gained = [count for count in tokens if count is not None]
        return sum(gained) / len(gained)


class BatchProgress(Progress):
    """Counts how far drafts advance a batch, which ends when its slowest row ends.

    If rows are alike, a slow row catches up; if other rows loop and it does not, it falls behind for good. So the
    slowest row's progress is shrunk towards the mean, less with more rounds.
    """

    _PRIOR = 8.0  # rounds

    def __init__(self) -> None:
        self._gained: list[int] = []
        self._rounds = 0

    def after(self, tokens: Sequence[int | None]) -> float:
        if len(tokens) != len(self._gained):
            self._gained, self._rounds = [0] * len(tokens), 0
        going = [index for index, count in enumerate(tokens) if count is not None]
        before = self._place(going)
        self._rounds += 1
        self._gained = [gained + (count or 0) for gained, count in zip(self._gained, tokens, strict=True)]
        return self._place(going) - before

    def _place(self, going: Sequence[int]) -> float:
        gained = [self._gained[index] for index in going]
        mean = sum(gained) / len(gained)
        return mean - (mean - min(gained)) * self._rounds / (self._rounds + self._PRIOR)
