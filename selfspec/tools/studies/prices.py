"""What drafts of a model cost, by the sublayers a step runs: timed on this machine, or by the weights a step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.control.costs import Costs, share_read
from selfspec.control.forecast import Forecast
from selfspec.draft import LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.named import PLAIN, draft_name
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.stock import bare
from selfspec.model.adapter import Adapter
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.runtime import Eager
from selfspec.tools.studies.drafts import draft_of
from selfspec.tools.studies.models import StudiedModel
from selfspec.tools.studies.points import Point
from selfspec.tools.studies.study import Pricing

# Drafts timed one by one; what others cost follows from theirs.
_MOST_TIMED = 12
_WIDTHS, _LENGTHS, _REPEATS = (1, 2, 3, 5, 7), (1, 3), 7


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
        """Return the draft cost ratio c of a path."""
        return self.fixed + sum(price for each, price in self.sublayers.items() if path.runs(each))

    def costs(self, path: LayerPath, name: str | None = None) -> Costs:
        """Return the costs of a draft: as measured if it was, else put together from its sublayers.

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
        """Return the mean price of a sublayer of one kind."""
        found = [price for each, price in self.sublayers.items() if each.part == part]
        return sum(found) / len(found)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
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
        """Read what `to_dict` returned."""
        attention = {Sublayer(layer, Part.ATTENTION): price for layer, price in enumerate(content["attention"])}
        mlp = {Sublayer(layer, Part.MLP): price for layer, price in enumerate(content["mlp"])}
        known = {name: Costs(**costs) for name, costs in content["known"].items()}
        return cls(content["fixed"], {**attention, **mlp}, Costs(**content["target"]), known, content["step_seconds"])


def prices_by_weights(model: PreTrainedModel, adapter: Adapter) -> Prices:
    """Price sublayers by the weights that a step reads: what is known without measuring anything."""
    depth = len(adapter.decoder_layers(model))
    full = LayerPath.full(depth)
    shares = {
        each: share_read(model, adapter, full) - share_read(model, adapter, LayerPath.without(depth, [each]))
        for each in sublayers(depth)
    }
    return Prices(1.0 - sum(shares.values()), shares, Costs.assumed(0.0, model.device))


def prices_by_measurement(measured: MeasuredCosts, drafters: Mapping[str, LayerPathDrafter], depth: int) -> Prices:
    """Price timed drafts by themselves, and an attention and an MLP by least squares over all of them.

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
    from scipy.optimize import nnls

    # Negative prices would only be noise.
    fixed, attention, mlp = map(float, nnls(np.array(rows), np.array(costs))[0])
    each_costs = {Part.ATTENTION: attention, Part.MLP: mlp}
    return Prices(
        fixed,
        {each: each_costs[each.part] for each in sublayers(depth)},
        measured.of(PLAIN),
        {name: measured.of(name) for name in drafters},
        measured.step_seconds.value,
    )


def best_length(tokens_per_round: Mapping[int, float], costs: Costs) -> Forecast:
    """Choose the draft length that promises most.

    The speed-up is tokens per round by cost per round, after Leviathan et al. (2023), whose (1 - alpha^(gamma+1)) /
    (1 - alpha) tokens are here counted rather than derived from a single alpha.

    Args:
        tokens_per_round: expected tokens of a round, bonus token included, by draft length.
        costs: of the draft.
    """
    speedups = {length: tokens / costs.of_round(length, length) for length, tokens in tokens_per_round.items()}
    best = max(speedups, key=lambda length: (speedups[length], -length))
    return Forecast(best, speedups[best])


def costs_point(studied: StudiedModel, drafts: Sequence[str], pricing: Pricing) -> Point:
    """Return the point of finding out what drafts of a model cost.

    Args:
        studied: the model.
        drafts: names of all drafts. Exits are timed themselves, skip sets by their sublayers.
        pricing: timed, or by weights.
    """
    timed = [name for name in drafts if not name.startswith("skip")] if pricing == "measured" else []
    content = {
        "base": studied.base,
        "dtype": studied.dtype,
        "device": studied.model.device.type,
        "threads": torch.get_num_threads(),
        "pricing": pricing,
        "runtime": "eager",
        "timed": _spread(timed),
    }
    return Point("costs", content, {"model": studied.name})


def find_costs(studied: StudiedModel, point: Point) -> dict[str, Any]:
    """Find prices, and keep what was timed."""
    if point.content["pricing"] == "weights":
        return {"prices": prices_by_weights(studied.model, studied.adapter).to_dict()}
    drafters = {name: draft_of(name) for name in point.content["timed"]} | _telling(studied.depth)
    measured = measure_costs(
        studied.model,
        studied.adapter,
        list(drafters.values()),
        widths=_WIDTHS,
        context=64,
        repeats=_REPEATS,
        lengths=_LENGTHS,
        # As drafts are confirmed.
        base=wrap(bare(studied.model), adapter=studied.adapter, runtime=Eager()),
    )
    # They are measured by the names they give themselves.
    by_name = {draft_name(drafter): drafter for drafter in drafters.values()}
    prices = prices_by_measurement(measured, by_name, studied.depth)
    own = {name: prices.known[draft_name(drafter)] for name, drafter in drafters.items()}
    known = Prices(prices.fixed, prices.sublayers, prices.target, own, prices.step_seconds)
    return {"prices": known.to_dict(), "measured": measured.to_dict()}


def prices_of(found: Mapping[str, Any]) -> Prices:
    """Return the prices that were found."""
    return Prices.from_dict(found["prices"])


def _telling(depth: int) -> dict[str, LayerPathDrafter]:
    """Return skip sets that tell attention and MLP apart, at two sizes each."""
    half, few = range(depth // 2, depth), range(depth - max(1, depth // 4), depth)
    sets = [LayerSkip(attention=half), LayerSkip(mlp=half), LayerSkip(layers=half), LayerSkip(layers=few)]
    return {draft_name(each): each for each in sets}


def _spread(names: Sequence[str]) -> list[str]:
    count = min(len(names), _MOST_TIMED)
    return [names[index * len(names) // count] for index in range(count)]
