"""What drafts of a model cost, by the sublayers a step runs: timed on this machine, or by the weights a step reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.architecture import Adapter
from selfspec.control.costs import Costs
from selfspec.draft import EarlyExit, LayerSkip, SkipFile
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name, parse_draft
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import bare
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.model.weights_read import share_read, widening
from selfspec.runtime import Eager
from selfspec.tools.lab.drafts import content
from selfspec.tools.lab.runs import Asked, Run
from selfspec.tools.lab.studied import StudiedModel
from selfspec.tools.lab.study import Pricing

_WIDTHS, _LENGTHS, _REPEATS = (1, 2, 3, 5, 7), (1, 3), 15
# Kinds of drafts whose cost follows from their sublayers.
_BY_SUBLAYERS = (EarlyExit, LayerSkip, SkipFile)


@dataclass(frozen=True)
class SublayerPrices:
    """What a draft step takes, in steps of plain decoding.

    Attributes:
        fixed: of one that runs no layer: head, embedding and what else there is.
        attention: what the attention of each layer adds to it.
        mlp: what the MLP of each layer adds.
    """

    fixed: float
    attention: Sequence[float]
    mlp: Sequence[float]

    def of(self, ran: Sequence[Sublayer]) -> float:
        """Add up what some sublayers take."""
        return float(sum((self.attention if each.part == Part.ATTENTION else self.mlp)[each.layer] for each in ran))


@dataclass(frozen=True)
class Prices:
    """The terms of the speed-up formula for any draft path. The unit is one step of plain decoding.

    Attributes:
        sublayers: what a draft step takes.
        low: the same by the lower ends of what was timed.
        high: by the upper ends.
        target: V and o of a draft that is verified from tokens on.
        known: costs of paths that were timed for themselves, by name.
        known_draft: c of these, with its interval.
        step_seconds: one step of plain decoding; None where nothing was measured.
    """

    sublayers: SublayerPrices
    low: SublayerPrices
    high: SublayerPrices
    target: Costs
    known: Mapping[str, Costs] = field(default_factory=dict)
    known_draft: Mapping[str, Estimate] = field(default_factory=dict)
    step_seconds: float | None = None

    @classmethod
    def of(cls, found: Run) -> Prices:
        """Return the prices that `find_costs` found."""
        return TypeAdapter(cls).validate_python(found.found["prices"])

    @property
    def depth(self) -> int:
        """Layers of the network."""
        return len(self.sublayers.attention)

    def of_draft(self, judged: Run) -> Costs:
        """Return the costs of a judged draft: as timed if its path was, else put together from its sublayers.

        Drafts that run no layers of the model cost what they say themselves.
        """
        path = self._path(judged)
        if path is None:
            return replace(self.target, draft=judged.found["cost"])
        return self.known[path] if path in self.known else self.costs(self._parsed(path))

    def draft(self, judged: Run) -> Estimate:
        """Return c of a judged draft with the interval that follows from those of what was timed."""
        c, path = self.of_draft(judged).draft, self._path(judged)
        if path is None:
            return Estimate(c, c, c)
        if path in self.known:
            return self.known_draft[path]
        ran = self._ran(self._parsed(path))
        ends = [prices.fixed + prices.of(ran) for prices in (self.low, self.high)]
        return Estimate(c, min(c, *ends), max(c, *ends), 0.9)

    def costs(self, path: LayerPath) -> Costs:
        """Put the costs of a path together from those of its sublayers.

        What is exact of a draft is not computed again: its further tokens widen only the rest of the target pass.
        """
        ran = self._ran(path)
        exact = [] if path.resume_point is None else [each for each in ran if each < path.resume_point]
        rest = 1 - min(self.sublayers.of(exact), 1.0)
        draft = self.sublayers.fixed + self.sublayers.of(ran)
        return replace(self.target, draft=draft, widening=self.target.widening * rest)

    def of_part(self, part: Part) -> float:
        """Return the mean price of a sublayer of one kind."""
        return float(np.mean(self.sublayers.attention if part == Part.ATTENTION else self.sublayers.mlp))

    @staticmethod
    def _path(judged: Run) -> str | None:
        """Return the name of the path of the model that a draft runs; None: it runs none."""
        draft: str = judged.asked.under["draft"]
        path: str | None = judged.found.get("path", draft)
        return path

    def _parsed(self, name: str) -> LayerPath:
        drafter = parse_draft(name)
        assert isinstance(drafter, LayerPathDrafter)
        return drafter.path(self.depth)

    def _ran(self, path: LayerPath) -> list[Sublayer]:
        return [each for each in sublayers(self.depth) if path.runs(each)]


def prices_by_weights(model: PreTrainedModel, adapter: Adapter) -> Prices:
    """Price sublayers by the weights that a step reads: what is known without measuring anything."""
    depth = len(adapter.decoder_layers(model))
    full = share_read(model, adapter, LayerPath.full(depth))
    attention, mlp = (
        [full - share_read(model, adapter, LayerPath.without(depth, [Sublayer(layer, part)])) for layer in range(depth)]
        for part in Part
    )
    known = SublayerPrices(1.0 - sum(attention) - sum(mlp), attention, mlp)
    return Prices(known, known, known, Costs.assumed(0.0, model.device, widening(model, adapter)))


def prices_by_measurement(measured: MeasuredCosts, drafters: Mapping[str, LayerPathDrafter], depth: int) -> Prices:
    """Price an attention and an MLP by least squares over timed drafts, of different numbers of both, by name."""
    value, low, high = (_fitted(measured, drafters, depth, end) for end in ("value", "low", "high"))
    return Prices(value, low, high, measured.of(PLAIN), step_seconds=measured.step_seconds.value)


def _fitted(measured: MeasuredCosts, drafters: Mapping[str, LayerPathDrafter], depth: int, end: str) -> SublayerPrices:
    from scipy.optimize import nnls

    # A plain step is the path that runs everything; it is timed as a whole round.
    rows, costs = [[1.0, depth, depth]], [1.0]
    for name, drafter in drafters.items():
        if drafter.head is None:
            path = drafter.path(depth)
            rows.append([1.0, *(sum(path.runs(Sublayer(layer, part)) for layer in range(depth)) for part in Part)])
            costs.append(float(getattr(measured.draft[name], end)))
    # Negative prices would only be noise.
    fixed, attention, mlp = map(float, nnls(np.array(rows), np.array(costs))[0])
    return SublayerPrices(fixed, [attention] * depth, [mlp] * depth)


def timed_paths(depth: int) -> dict[str, LayerPathDrafter]:
    """Return what is timed of every model, whatever a study or a search asks for, so that costs of the two agree.

    Skip sets tell attention and MLP apart, at two sizes each, and exits what a layer costs.
    """
    half, few = range(depth // 2, depth), range(depth - max(1, depth // 4), depth)
    skips = [LayerSkip(attention=half), LayerSkip(mlp=half), LayerSkip(layers=half), LayerSkip(layers=few)]
    exits = [EarlyExit(layer) for layer in sorted({max(1, depth * share // 4) for share in (1, 2, 3)}) if layer < depth]
    return {draft_name(each): each for each in (*skips, *exits)}


def costs_asked(studied: StudiedModel, drafts: Iterable[str], pricing: Pricing) -> Asked:
    """Ask for what drafts cost: exits and skip sets by their sublayers, all other paths by themselves."""
    under = {
        **asdict(studied.origin),
        "pricing": pricing,
        "runtime": "eager",
        "alone": {name: content(path) for name, path in _alone(studied, drafts).items()},
    }
    return Asked("costs", under, studied.place)


def _alone(studied: StudiedModel, drafts: Iterable[str]) -> dict[str, LayerPathDrafter]:
    """Return the paths that drafts run and that are not priced by their sublayers, by name."""
    paths = [studied.given.drafter(name).last for name in drafts]
    return {
        draft_name(each): each
        for each in paths
        if isinstance(each, LayerPathDrafter) and not isinstance(each, _BY_SUBLAYERS)
    }


def find_costs(studied: StudiedModel, drafts: Iterable[str], asked: Asked) -> dict[str, Any]:
    """Find prices, and keep what was timed."""
    model, adapter, depth = studied.model, studied.adapter, studied.depth
    alone = _alone(studied, drafts)
    if asked.under["pricing"] == "weights":
        prices = prices_by_weights(model, adapter)
        known = {
            name: replace(prices.costs(each.path(depth)), draft=each.cost(model, adapter))
            for name, each in alone.items()
        }
        read = {name: Estimate(each.draft, each.draft, each.draft) for name, each in known.items()}
        return {"prices": asdict(replace(prices, known=known, known_draft=read))}
    paths = timed_paths(depth)
    drafters = {**alone, **paths}
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
    known = {name: measured.of(name) for name in alone}
    spread = {name: measured.draft[name] for name in alone}
    prices = replace(prices_by_measurement(measured, paths, depth), known=known, known_draft=spread)
    return {"prices": asdict(prices), "measured": measured.to_dict()}
