"""What a draft step costs by the sublayers it runs, and what a round makes of it: predicted tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from selfspec.control.costs import Costs, share_read
from selfspec.draft.along_path import PathDrafter
from selfspec.draft.named import PLAIN
from selfspec.measure.costs import MeasuredCosts
from selfspec.model.adapter import Adapter
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers


@dataclass(frozen=True)
class Prices:
    """The terms of the speed-up formula for any draft path. The unit is one step of plain decoding.

    Attributes:
        fixed: of a draft step that runs no layer: head, embedding and what else there is.
        sublayers: what each sublayer adds to it.
        target: V and o of a draft that is verified from tokens on.
        known: measured costs of drafts, by name.
        step_seconds: one step of plain decoding; None where nothing was measured.
    """

    fixed: float
    sublayers: Mapping[Sublayer, float]
    target: Costs
    known: Mapping[str, Costs] = field(default_factory=dict)
    step_seconds: float | None = None

    def draft(self, path: LayerPath) -> float:
        """The draft cost ratio c of a path."""
        return self.fixed + sum(price for each, price in self.sublayers.items() if path.runs(each))

    def costs(self, path: LayerPath, name: str | None = None) -> Costs:
        """The costs of a draft: as measured, where it was; else put together from its sublayers.

        What is exact of a draft is not computed again: its further tokens widen only the rest of the target pass.

        Args:
            path: what a draft step runs.
            name: of the draft.
        """
        if name is not None and name in self.known:
            return self.known[name]
        resumed = path.resume_point
        exact = 0.0 if resumed is None else sum(self.sublayers[each] for each in self.sublayers if each < resumed)
        return replace(self.target, draft=self.draft(path), widening=self.target.widening * (1 - min(exact, 1.0)))

    def of_part(self, part: Part) -> float:
        """Mean price of a sublayer of one kind."""
        found = [price for each, price in self.sublayers.items() if each.part == part]
        return sum(found) / len(found)

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "fixed": self.fixed,
            "attention": [price for each, price in sorted(self.sublayers.items()) if each.part == Part.ATTENTION],
            "mlp": [price for each, price in sorted(self.sublayers.items()) if each.part == Part.MLP],
            "target": asdict(self.target),
            "known": {name: asdict(costs) for name, costs in self.known.items()},
            "step_seconds": self.step_seconds,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Prices:
        """From what `to_dict` gave."""
        attention = {Sublayer(layer, Part.ATTENTION): price for layer, price in enumerate(content["attention"])}
        mlp = {Sublayer(layer, Part.MLP): price for layer, price in enumerate(content["mlp"])}
        known = {name: Costs(**costs) for name, costs in content["known"].items()}
        return cls(content["fixed"], {**attention, **mlp}, Costs(**content["target"]), known, content["step_seconds"])


def prices_by_weights(model: PreTrainedModel, adapter: Adapter) -> Prices:
    """Prices by the weights that a step reads: what is known without measuring anything."""
    depth = len(adapter.decoder_layers(model))
    full = LayerPath.full(depth)
    shares = {
        each: share_read(model, adapter, full) - share_read(model, adapter, LayerPath.without(depth, [each]))
        for each in sublayers(depth)
    }
    return Prices(1.0 - sum(shares.values()), shares, Costs.assumed(0.0, model.device))


def prices_by_measurement(measured: MeasuredCosts, drafters: Mapping[str, PathDrafter], depth: int) -> Prices:
    """Prices from timed drafts: each by itself, and what an attention and an MLP cost by least squares over all.

    Args:
        measured: costs of some drafts, of different numbers of attentions and MLPs.
        drafters: the same by name.
        depth: layers of the network.
    """
    runs = {
        name: [each for each in sublayers(depth) if drafter.path(depth).runs(each)]
        for name, drafter in drafters.items()
    }
    # A plain step is the path that runs everything; it is timed as a whole round.
    rows = [[1.0, depth, depth]]
    costs = [1.0]
    for name, ran in runs.items():
        attentions = sum(each.part == Part.ATTENTION for each in ran)
        rows.append([1.0, attentions, len(ran) - attentions])
        costs.append(measured.draft[name].value)
    fixed, attention, mlp = _non_negative(np.array(rows), np.array(costs))
    each_costs = {Part.ATTENTION: attention, Part.MLP: mlp}
    return Prices(
        fixed,
        {each: each_costs[each.part] for each in sublayers(depth)},
        measured.of(PLAIN),
        {name: measured.of(name) for name in drafters},
        measured.step_seconds.value,
    )


def _non_negative(rows: NDArray[np.float64], costs: NDArray[np.float64]) -> tuple[float, float, float]:
    """The least-squares solution without negative prices, which would only be noise."""
    from scipy.optimize import nnls

    fixed, attention, mlp = nnls(rows, costs)[0]
    return float(fixed), float(attention), float(mlp)


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


def predict(tokens_per_round: Mapping[int, float], costs: Costs, step_seconds: float | None) -> Prediction:
    """Choose the draft length that promises most.

    The speed-up is tokens per round by cost per round, after Leviathan et al. (2023), whose (1 - alpha^(gamma+1)) /
    (1 - alpha) tokens are here counted rather than derived from a single alpha.

    Args:
        tokens_per_round: expected tokens of a round, the target's own included, by draft length.
        costs: of the draft.
        step_seconds: one step of plain decoding, if it was measured.
    """
    speedups = {length: tokens / costs.of_round(length, length) for length, tokens in tokens_per_round.items()}
    best = max(speedups, key=lambda length: (speedups[length], -length))
    speed = None if step_seconds is None else speedups[best] / step_seconds
    return Prediction(best, speedups[best], speed)
