"""A drafter whose drafts, or rounds, a test looks at or changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from selfspec.draft import Budget, Draft, Drafter, Proposer, RowsView
from selfspec.draft.drafter import Exit

Propose = Callable[[Any, Budget], Draft]
Altering = Callable[[Propose, Any, Budget], Draft]
"""Makes a draft: takes what another proposer does, the rows, and the budget."""


@dataclass(frozen=True, eq=False)
class Altered(Drafter):
    """Drafts as a function makes of another drafter's proposals.

    Attributes:
        drafter: the other one.
        alter: the function.
    """

    drafter: Drafter
    alter: Altering

    def begin(self, rows: RowsView) -> Proposer:
        return _Altered(self.drafter.begin(rows), self.alter)

    def check(self, depth: int) -> None:
        self.drafter.check(depth)

    def check_model(self, *given: Any) -> None:
        self.drafter.check_model(*given)

    def prepare(self, *given: Any) -> None:
        self.drafter.prepare(*given)

    def cost(self, *given: Any) -> float:
        return self.drafter.cost(*given)


class _Altered(Proposer):
    def __init__(self, inner: Proposer, alter: Altering) -> None:
        self._inner, self._alter = inner, alter

    @property
    def early_exit(self) -> Exit | None:
        return self._inner.early_exit

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return self._alter(self._inner.propose, rows, budget)

    def learn(self, *given: Any) -> None:
        self._inner.learn(*given)
