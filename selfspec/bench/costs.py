"""What the passes of a round cost, timed alone: the c and V of the speed-up formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class PassCosts:
    """Passes of one draft, timed alone, in steps of plain decoding timed alone.

    Attributes:
        step_seconds: a step of plain decoding: a pass over one token, head included, and the choice of a token.
        draft: c, a draft step, head included; None for a look-up.
        verify: V(m), a target pass over m tokens, by m.
        resumed: the same where the pass goes on from what m - 1 draft steps left, by m; empty where it cannot.
    """

    step_seconds: float
    draft: float | None = None
    verify: dict[int, float] = field(default_factory=dict)
    resumed: dict[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> PassCosts:
        """Read back from JSON, whose keys are strings."""
        verify, resumed = ({int(m): cost for m, cost in found[name].items()} for name in ("verify", "resumed"))
        return cls(found["step_seconds"], found["draft"], verify, resumed)
