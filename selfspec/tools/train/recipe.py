"""The LayerSkip recipe in formulas (Elhoushi et al., 2024, arXiv 2404.16710): no model, no data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from selfspec.errors import TrainingError

Curriculum = Literal["rotational", "gradual", "all"]
"""Which exits take part in a step: a rotating part of them, ever earlier ones as training goes on, or all."""

Weighting = Literal["depth", "even"]
"""How exits weigh: more with depth, as in the paper, or all the same."""

ExitTarget = Literal["text", "model"]
"""What exits learn: the text's next token, as in the paper, or the full model's distribution of it."""


@dataclass(frozen=True)
class Recipe:
    """How a model is taught to leave early. An exit at E leaves after layers [0, E), the paper's layer E - 1.

    Attributes:
        exits: exit layers that are taught, in 1..N-1; empty: all of them.
        dropout: chance p_max that a sample skips the last layer; earlier layers are skipped less.
        dropout_curriculum: whether that chance is there from the start or rises exponentially from 0 as training goes.
        curriculum: which exits take part in a step.
        rotation: R of the rotational curriculum: every R-th exit takes part, another set each step.
        exit_scale: e_scale, how much exits weigh against the full model.
        weighting: how exits weigh among each other.
        exit_target: what exits learn.
    """

    exits: tuple[int, ...] = ()
    dropout: float = 0.1
    dropout_curriculum: Literal["constant", "exponential"] = "constant"
    curriculum: Curriculum = "rotational"
    rotation: int = 4
    exit_scale: float = 0.2
    weighting: Weighting = "depth"
    exit_target: ExitTarget = "text"

    def exits_of(self, depth: int) -> tuple[int, ...]:
        """The exits taught in a network of `depth` layers, first to last.

        Raises:
            TrainingError: an exit or another setting is out of range.
        """
        for exit_layer in self.exits:
            if type(exit_layer) is not int or not 1 <= exit_layer < depth:
                raise TrainingError(f"exit {exit_layer!r} is out of range: this model has {depth} layers")
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"layer dropout {self.dropout} is no chance in 0..1 (1 excluded)")
        if self.rotation < 1 or not 0 <= self.exit_scale < math.inf:
            raise TrainingError(f"rotation {self.rotation} or exit scale {self.exit_scale} is out of range")
        return tuple(sorted(set(self.exits))) or tuple(range(1, depth))

    def dropout_rates(self, depth: int, step: int, steps: int) -> list[float]:
        """Chance that a sample skips each layer in a step: p_l = S(t) (exp(l ln 2 / (N - 1)) - 1) p_max.

        Args:
            depth: N, layers of the network.
            step: t, from 0.
            steps: T of the whole training.
        """
        scale = 1.0 if self.dropout_curriculum == "constant" else _rising(step, steps)
        return [scale * _rising(layer, depth) * self.dropout for layer in range(depth)]

    def active(self, depth: int, step: int, steps: int) -> list[int]:
        """The exits that take part in a step. The full model always does."""
        exits = self.exits_of(depth)
        match self.curriculum:
            case "rotational":
                return [exit_layer for place, exit_layer in enumerate(exits) if (place - step) % self.rotation == 0]
            case "gradual":
                # One exit more, from the last to the first, every T / 2n steps: all of n are there at half time.
                joined = min(len(exits), 1 + 2 * len(exits) * step // steps)
                return list(exits[len(exits) - joined :])
            case "all":
                return list(exits)

    def weights(self, depth: int, active: list[int]) -> list[float]:
        """Share of the loss of each active exit and, last, of the full model. They sum to 1."""
        if self.weighting == "depth":
            raw = [self.exit_scale * _sum_below(exit_layer) for exit_layer in active]
            raw.append(depth - 1 + self.exit_scale * _sum_below(depth - 1))
        else:
            raw = [self.exit_scale for _ in active] + [1.0]
        return [weight / sum(raw) for weight in raw]


def _rising(place: int, places: int) -> float:
    """From 0 at the first place to 1 at the last, exponentially."""
    return math.expm1(place * math.log(2) / (places - 1)) if places > 1 else 0.0


def _sum_below(count: int) -> int:
    """0 + 1 + ... + (count - 1): the paper's weight of layer count - 1."""
    return count * (count - 1) // 2
