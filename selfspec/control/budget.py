"""What a draft may take: its depth and its number of nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The most that a draft may take.

    Attributes:
        depth: draft tokens on one path; 0: no draft.
        nodes: draft tokens in all, siblings included, at least `depth`.
    """

    depth: int
    nodes: int

    @classmethod
    def chain(cls, length: int) -> Budget:
        """The budget of a draft without branches."""
        return cls(length, length)

    def within(self, tokens: int) -> Budget:
        """The budget of a draft of which a row can commit at most `tokens`: every level that is cut has a node."""
        depth = min(self.depth, tokens)
        return Budget(depth, self.nodes - (self.depth - depth)) if depth > 0 else Budget(0, 0)
