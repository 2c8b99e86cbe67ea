"""How a search goes about it."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import DraftConfigError


@dataclass(frozen=True)
class SearchPlan:
    """The budget of a search.

    Attributes:
        evaluations: skip sets to evaluate, in all.
        fewest: sublayers of a set, at least.
        most: at most; None: half of the network.
        draft_lengths: those to choose from.
        reach: positions of a draft that are told apart.
        seed: of all that is drawn.
    """

    evaluations: int = 100
    fewest: int = 1
    most: int | None = None
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    reach: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.evaluations < 1:
            raise DraftConfigError(f"a search needs evaluations, at least 1; got {self.evaluations}")
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise DraftConfigError(f"draft lengths must be at least 1, got {list(self.draft_lengths)}")
        if self.reach < 1:
            raise DraftConfigError(f"reach must be at least 1, got {self.reach}")
