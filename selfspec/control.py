"""How long to draft, and when not to draft at all."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import DraftConfigError


@dataclass(frozen=True)
class FixedLength:
    """The same draft length every round.

    Attributes:
        length: tokens to draft; 0 is plain decoding.
    """

    length: int

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 0:
            raise DraftConfigError(f"draft length must be an integer of at least 1, got {self.length!r}")

    def choose(self, remaining: int) -> int:
        """Draft length of a round when `remaining` >= 1 tokens are still wanted.

        One token of every round is the target's own, so a draft longer than `remaining` - 1 is never of use.
        """
        return min(self.length, remaining - 1)
