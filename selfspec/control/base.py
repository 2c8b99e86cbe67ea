"""What a control is: it says how long drafts are, and whether to draft at all.

A control is configuration. What it begins decides for one generation, from what the draft itself shows (its scores up
to the last token drafted) and from rounds that are over, never from the verdict on the draft in hand and never from a
clock: so the output stays exact, and a seed gives the same tokens again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.arguments import shown
from selfspec.control.costs import CostsByRows
from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from selfspec.decode.evidence import Evidence
    from selfspec.draft.draft import Draft


@dataclass(frozen=True)
class RowOutcome:
    """The outcome of a round for one unfinished row.

    Attributes:
        judged: draft tokens the target judged.
        accepted: draft tokens accepted, committed or not.
        committed: tokens committed, the bonus or recovered token included.
        dropped: tokens accepted and then dropped to keep rows in lockstep.
    """

    judged: int
    accepted: int
    committed: int
    dropped: int = 0


class Controller(ABC):
    """Decides for one generation.

    Attributes:
        longest: the most tokens that are ever drafted in a round; slots of the cache are kept for them.
        judges_prompt: whether it wants to know what the draft is worth on the prompt.
    """

    longest: int
    judges_prompt = False

    @abstractmethod
    def choose(self, remaining: int, live: Sequence[bool]) -> int:
        """The most tokens to draft in the round that begins; 0: none.

        One token of every round is the target's own, so more than `remaining` - 1 are never of use.

        Args:
            remaining: tokens still wanted, at least 1.
            live: of each row that runs, whether it goes on.
        """

    def tries(self, match: int) -> bool:
        """Whether a draft of some source is worth a round.

        Args:
            match: 0: the model drafts; else a look-up does, with a match of so many tokens.
        """
        return True

    def prefers(self, match: int) -> bool:
        """Whether a look-up with a match of so many tokens promises more than drafting with the model."""
        return True

    def look_up_length(self, share: float) -> int:
        """The most tokens worth looking up at once in the round that begins; 0: none.

        Args:
            share: of the rows that are furthest behind, that has a match.
        """
        return self.longest

    def goes_on(self, scores: Tensor) -> bool:
        """Whether to draft another token after the one just drafted, which is kept in any case.

        Dropping a token for what it is would bias the output; deciding after it whether to draft on does not.

        Args:
            scores: what that token was drawn from, `[rows, 1, vocab]`.
        """
        return True

    def keeps_step(self) -> bool:
        """Whether rows that stand alike are to stay so in the round at hand: all then commit as many as the worst.

        Asked in every round whose rows stand alike, before its verdict is told: the answer must depend neither on that
        nor on the draft in hand.
        """
        return False

    def learn_prompt(self, evidence: Evidence) -> None:
        """Take in what the draft is worth on the prompt, before the first round."""
        return

    def learn(self, draft: Draft, rows: Sequence[RowOutcome | None]) -> None:
        """Take in what became of a round.

        Args:
            draft: of the round.
            rows: what became of it in each row that ran; None for a row that had ended.
        """
        return


class Control(ABC):
    """How draft lengths are chosen."""

    @abstractmethod
    def begin(self, costs: CostsByRows) -> Controller:
        """The controller of one generation.

        Args:
            costs: measured or estimated for model and draft.
        """


def check_length(length: int) -> None:
    """Refuse a draft length that is no integer of at least 1.

    Raises:
        DraftConfigError: naming it.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise DraftConfigError(f"draft length must be an integer of at least 1, got {shown(length)}")


class NoDraft(Controller):
    """Plain decoding."""

    longest = 0

    def choose(self, remaining: int, live: Sequence[bool]) -> int:
        return 0
