"""What a draft step costs by the sublayers it runs, and what a round makes of it: predicted tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from selfspec.adapter import Adapter
from selfspec.costs import share_read
from selfspec.path import Part, Path, Sublayer, sublayers

# What a round costs besides, in plain steps, where nobody measured it.
_WIDENING, _OVERHEAD = 0.03, 0.05


@dataclass(frozen=True)
class Prices:
    """The terms of the speed-up formula for any skip set. The unit is one step of plain decoding.

    Attributes:
        fixed: of a draft step that runs no layer: head, embedding and what else there is.
        sublayers: what each sublayer adds to it.
        verify: V(m) of a target pass over m tokens, by m - 1; longer passes go on in a straight line.
        overhead: o, all else in a round that drafts.
        step_seconds: one step of plain decoding; None where nothing was measured.
    """

    fixed: float
    sublayers: Mapping[Sublayer, float]
    verify: tuple[float, ...]
    overhead: float
    step_seconds: float | None = None

    def draft(self, path: Path) -> float:
        """The draft cost ratio c of a path."""
        return self.fixed + sum(price for each, price in self.sublayers.items() if path.runs(each))

    def of_round(self, cost: float, draft_length: int) -> float:
        """The cost of a round of `draft_length` steps that cost `cost` each."""
        return draft_length * cost + self.verify_over(draft_length + 1) + self.overhead

    def verify_over(self, tokens: int) -> float:
        """V(m) of `tokens` = m."""
        if tokens <= len(self.verify):
            return self.verify[tokens - 1]
        slope = (self.verify[-1] - self.verify[0]) / (len(self.verify) - 1) if len(self.verify) > 1 else 0.0
        return self.verify[-1] + slope * (tokens - len(self.verify))

    def of_part(self, part: Part) -> float:
        """Mean price of a sublayer of one kind."""
        found = [price for each, price in self.sublayers.items() if each.part == part]
        return sum(found) / len(found)


def prices_by_weights(model: PreTrainedModel, adapter: Adapter) -> Prices:
    """Prices by the weights that a step reads: what is known without measuring anything."""
    depth = len(adapter.decoder_layers(model))
    full = Path.full(depth)
    shares = {
        each: share_read(model, adapter, full) - share_read(model, adapter, Path.without(depth, [each]))
        for each in sublayers(depth)
    }
    return Prices(
        fixed=1.0 - sum(shares.values()),
        sublayers=shares,
        verify=(1.0, 1.0 + _WIDENING),
        overhead=_OVERHEAD,
    )


@dataclass(frozen=True)
class Prediction:
    """The best that can be expected of a draft.

    Attributes:
        draft_length: gamma that promises most.
        speedup: against plain decoding.
        tokens_per_second: the same with the measured step; None where none was measured.
    """

    draft_length: int
    speedup: float
    tokens_per_second: float | None


def predict(tokens_per_round: Mapping[int, float], cost: float, prices: Prices) -> Prediction:
    """Choose the draft length that promises most.

    The speed-up is tokens per round by cost per round, after Leviathan et al. (2023), whose (1 - alpha^(gamma+1)) /
    (1 - alpha) tokens are here counted rather than derived from a single alpha.

    Args:
        tokens_per_round: expected tokens of a round, the target's own included, by draft length.
        cost: c of the draft.
        prices: of the model.
    """
    speedups = {length: tokens / prices.of_round(cost, length) for length, tokens in tokens_per_round.items()}
    best = max(speedups, key=lambda length: (speedups[length], -length))
    speed = None if prices.step_seconds is None else speedups[best] / prices.step_seconds
    return Prediction(best, speedups[best], speed)
