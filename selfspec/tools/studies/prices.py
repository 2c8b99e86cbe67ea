"""What drafts of a model cost, by the sublayers a step runs: timed on this machine, or by the weights a step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.control.costs import Costs
from selfspec.draft import LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.stock import bare
from selfspec.model.adapter import Adapter
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.model.weights_read import share_read
from selfspec.runtime import Eager
from selfspec.tools.studies.drafts import draft_kind, draft_of
from selfspec.tools.studies.models import StudiedModel
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.study import Pricing

MOST_TIMED = 12
"""Plain exits timed one by one; what others cost follows from theirs."""

_WIDTHS, _LENGTHS, _REPEATS = (1, 2, 3, 5, 7), (1, 3), 7


@dataclass(frozen=True)
class Prices:
    """The terms of the speed-up formula for any draft path. The unit is one step of plain decoding.

    Attributes:
        fixed: of a draft step that runs no layer: head, embedding and what else there is.
        attention: what the attention of each layer adds to it.
        mlp: what the MLP of each layer adds.
        target: V and o of a draft that is verified from tokens on.
        known: costs of drafts that have them for themselves, by name.
        step_seconds: one step of plain decoding; None where nothing was measured.
    """

    fixed: float
    attention: Sequence[float]
    mlp: Sequence[float]
    target: Costs
    known: Mapping[str, Costs] = field(default_factory=dict)
    step_seconds: float | None = None

    @classmethod
    def of(cls, found: Result) -> Prices:
        """Return the prices that `find_costs` found."""
        return TypeAdapter(cls).validate_python(found.found["prices"])

    @property
    def depth(self) -> int:
        """Layers of the network."""
        return len(self.attention)

    def of_draft(self, name: str) -> Costs:
        """Return the costs of a draft: as measured if it was, else put together from its sublayers."""
        return self.known[name] if name in self.known else self.costs(draft_of(name).path(self.depth))

    def costs(self, path: LayerPath) -> Costs:
        """Put the costs of a path together from those of its sublayers.

        What is exact of a draft is not computed again: its further tokens widen only the rest of the target pass.
        """
        ran = [each for each in sublayers(self.depth) if path.runs(each)]
        exact = [] if path.resume_point is None else [each for each in ran if each < path.resume_point]
        rest = 1 - min(sum(map(self._of, exact)), 1.0)
        draft = self.fixed + sum(map(self._of, ran))
        return replace(self.target, draft=draft, widening=self.target.widening * rest)

    def of_part(self, part: Part) -> float:
        """Return the mean price of a sublayer of one kind."""
        return float(np.mean(self.attention if part == Part.ATTENTION else self.mlp))

    def _of(self, each: Sublayer) -> float:
        return (self.attention if each.part == Part.ATTENTION else self.mlp)[each.layer]


def prices_by_weights(model: PreTrainedModel, adapter: Adapter) -> Prices:
    """Price sublayers by the weights that a step reads: what is known without measuring anything."""
    depth = len(adapter.decoder_layers(model))
    full = share_read(model, adapter, LayerPath.full(depth))
    attention, mlp = (
        [full - share_read(model, adapter, LayerPath.without(depth, [Sublayer(layer, part)])) for layer in range(depth)]
        for part in Part
    )
    return Prices(1.0 - sum(attention) - sum(mlp), attention, mlp, Costs.assumed(0.0, model.device))


def prices_by_measurement(measured: MeasuredCosts, drafters: Mapping[str, LayerPathDrafter], depth: int) -> Prices:
    """Price an attention and an MLP by least squares over timed drafts, of different numbers of both, by name."""
    from scipy.optimize import nnls

    # A plain step is the path that runs everything; it is timed as a whole round.
    rows, costs = [[1.0, depth, depth]], [1.0]
    for name, drafter in drafters.items():
        if drafter.head is None:
            path = drafter.path(depth)
            rows.append([1.0, *(sum(path.runs(Sublayer(layer, part)) for layer in range(depth)) for part in Part)])
            costs.append(measured.draft[name].value)
    # Negative prices would only be noise.
    fixed, attention, mlp = map(float, nnls(np.array(rows), np.array(costs))[0])
    seconds = measured.step_seconds.value
    return Prices(fixed, [attention] * depth, [mlp] * depth, measured.of(PLAIN), step_seconds=seconds)


def costs_point(studied: StudiedModel, drafts: Mapping[str, str], pricing: Pricing) -> Point:
    """Return the point of finding out what drafts cost: skip sets by their sublayers, all else by itself."""
    exits = [name for name in drafts if draft_kind(name) == "exit"] if pricing == "measured" else []
    count = min(len(exits), MOST_TIMED)
    alone = [exits[index * len(exits) // count] for index in range(count)]
    alone += [name for name in drafts if draft_kind(name) not in ("exit", "skip", "skip-file")]
    content = {
        "base": studied.base,
        "dtype": studied.dtype,
        "device": studied.model.device.type,
        "threads": torch.get_num_threads(),
        "pricing": pricing,
        "runtime": "eager",
        "alone": {name: drafts[name] for name in alone},
    }
    return Point("costs", content, {"model": studied.name})


def find_costs(studied: StudiedModel, point: Point) -> dict[str, Any]:
    """Find prices, and keep what was timed."""
    model, adapter, depth = studied.model, studied.adapter, studied.depth
    alone = {name: draft_of(name) for name in point.content["alone"]}
    if point.content["pricing"] == "weights":
        prices = prices_by_weights(model, adapter)
        known = {
            name: replace(prices.costs(each.path(depth)), draft=each.cost(model, adapter))
            for name, each in alone.items()
        }
        return {"prices": asdict(replace(prices, known=known))}
    # Skip sets that tell attention and MLP apart, at two sizes each.
    half, few = range(depth // 2, depth), range(depth - max(1, depth // 4), depth)
    telling = [LayerSkip(attention=half), LayerSkip(mlp=half), LayerSkip(layers=half), LayerSkip(layers=few)]
    # Drafts are measured by the names they give themselves.
    drafters: dict[str, LayerPathDrafter] = {draft_name(each): each for each in (*alone.values(), *telling)}
    measured = measure_costs(
        model,
        adapter,
        list(drafters.values()),
        widths=_WIDTHS,
        context=64,
        repeats=_REPEATS,
        lengths=_LENGTHS,
        # As drafts are confirmed.
        base=wrap(bare(model), adapter=adapter, runtime=Eager()),
    )
    known = {name: measured.of(draft_name(drafter)) for name, drafter in alone.items()}
    prices = replace(prices_by_measurement(measured, drafters, depth), known=known)
    return {"prices": asdict(prices), "measured": measured.to_dict()}
