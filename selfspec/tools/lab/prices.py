"""What rounds cost: c, V and o of each draft, timed by themselves or by the weights that a step reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.architecture import Adapter
from selfspec.control.costs import Costs
from selfspec.draft import Drafter, EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import bare
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.model.sizes import share_read, widening
from selfspec.tools.lab.arms import runtime_named
from selfspec.tools.lab.drafts import content, path_of, paths_of
from selfspec.tools.lab.runs import Row, Run
from selfspec.tools.lab.study import Pricing, StudiedModel
from selfspec.tools.lab.table import spread

_WIDTHS, _LENGTHS, _REPEATS = (1, 2, 3, 5, 7), (1, 3), 15
# Kinds of drafts whose cost follows from their sublayers.
_BY_SUBLAYERS = (EarlyExit, LayerSkip)


@dataclass(frozen=True)
class SublayerPrices:
    """Prices of a draft step, in steps of plain decoding: a fixed part, and what each layer's sublayers add."""

    fixed: float
    attention: Sequence[float]
    mlp: Sequence[float]

    def of(self, ran: Sequence[Sublayer]) -> float:
        """Return the summed prices of some sublayers, without the fixed part."""
        return float(sum((self.attention if each.part == Part.ATTENTION else self.mlp)[each.layer] for each in ran))


@dataclass(frozen=True)
class RoundCosts:
    """Costs of a draft's rounds, in rounds of plain decoding: c, and V and o behind draft steps and behind look-ups."""

    c: Estimate
    stepped: Costs
    looked_up: Costs

    @classmethod
    def of(cls, measured: MeasuredCosts, name: str) -> RoundCosts:
        """Return the costs of a draft that was timed for itself."""
        return cls(measured.draft[name], measured.of(name), measured.of(PLAIN))

    def of_round(self, steps: float, drafted: float) -> Estimate:
        """Return the cost of a round; one without a draft is the unit. No round takes less."""
        if not drafted:
            return Estimate(1.0, 1.0, 1.0)
        costs = self.stepped if steps else self.looked_up
        rest = costs.verify + drafted * costs.widening + costs.overhead
        value, low, high = (max(steps * each + rest, 1.0) for each in (self.c.value, self.c.low, self.c.high))
        return Estimate(value, low, high, self.c.confidence)

    def priced(self, row: Row) -> Row:
        """Return the columns of costs for a text, by the rounds that it had."""
        found = {**spread("c", self.c), "V": self.stepped.verify, "widening": self.stepped.widening}
        rounds = [(self.of_round(steps, drafted), number) for drafted, steps, number in row["shapes"]]
        # Rounds are those of all rows of a batch together, and tokens are counted by row.
        share = row["rounds"] / max(sum(number for _, number in rounds), 1e-9)
        for end, name in (("", "value"), ("_low", "low"), ("_high", "high")):
            found[f"predicted_cost{end}"] = share * sum(getattr(cost, name) * number for cost, number in rounds)
        return {**row, **found, "o": self.stepped.overhead}


@dataclass(frozen=True)
class Prices:
    """Terms of the speed-up formula for any draft of a model. The unit is one step of plain decoding.

    Attributes:
        sublayers: prices of a draft step; `low` and `high` the same by the ends of the intervals.
        target: V and o of a draft that is verified from tokens on.
        known: costs of paths that are not priced by their sublayers, by name.
    """

    sublayers: SublayerPrices
    low: SublayerPrices
    high: SublayerPrices
    target: Costs
    known: Mapping[str, RoundCosts] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row) -> Prices:
        """Return the prices that `find_costs` found."""
        return TypeAdapter(cls).validate_python(row["prices"])

    def of_draft(self, drafter: Drafter, model: PreTrainedModel, adapter: Adapter) -> RoundCosts:
        """Return the costs of a draft: as timed if its path was, else put together from its sublayers.

        Drafts that run no layers of the model cost what they say themselves.
        """
        path = path_of(drafter)
        if path is None:
            own = drafter.cost(model, adapter)
            return RoundCosts(Estimate(own, own, own), self.target, self.target)
        name = draft_name(path)
        if name in self.known:
            return self.known[name]
        depth = len(self.sublayers.attention)
        ran = _ran(path.path(depth), depth)
        costs = self.costs(path.path(depth))
        ends = [prices.fixed + prices.of(ran) for prices in (self.low, self.high)]
        c = Estimate(costs.draft, min(costs.draft, *ends), max(costs.draft, *ends), 0.9)
        return RoundCosts(c, costs, self.target)

    def costs(self, path: LayerPath) -> Costs:
        """Put the costs of a path together from those of its sublayers.

        Exact states of a draft are not computed again: its further tokens widen only the rest of the target pass.
        """
        ran = _ran(path, len(self.sublayers.attention))
        exact = [] if path.resume_point is None else [each for each in ran if each < path.resume_point]
        rest = 1 - min(self.sublayers.of(exact), 1.0)
        draft = self.sublayers.fixed + self.sublayers.of(ran)
        return replace(self.target, draft=draft, widening=self.target.widening * rest)

    def of_part(self, part: Part) -> float:
        """Return the mean price of a sublayer of one kind."""
        return float(np.mean(self.sublayers.attention if part == Part.ATTENTION else self.sublayers.mlp))


def _ran(path: LayerPath, depth: int) -> list[Sublayer]:
    return [each for each in sublayers(depth) if path.runs(each)]


def prices_by_weights(model: PreTrainedModel, adapter: Adapter) -> Prices:
    """Price sublayers by the weights that a step reads, which is known without measuring anything."""
    depth = len(adapter.decoder_layers(model))
    full = share_read(model, adapter, LayerPath.full(depth))
    attention, mlp = (
        [full - share_read(model, adapter, LayerPath.without(depth, [Sublayer(layer, part)])) for layer in range(depth)]
        for part in Part
    )
    known = SublayerPrices(1.0 - sum(attention) - sum(mlp), attention, mlp)
    return Prices(known, known, known, Costs.assumed(0.0, model.device, widening(model, adapter)))


def prices_by_measurement(measured: MeasuredCosts, drafters: Mapping[str, LayerPathDrafter], depth: int) -> Prices:
    """Price an attention and an MLP by least squares over timed drafts, by name, with different numbers of both."""
    from scipy.optimize import nnls

    # A plain step is the path that runs everything; it is timed as a whole round.
    rows, timed = [[1.0, depth, depth]], []
    for name, drafter in drafters.items():
        if drafter.head is None:
            path = drafter.path(depth)
            rows.append([1.0, *(sum(path.runs(Sublayer(layer, part)) for layer in range(depth)) for part in Part)])
            timed.append(measured.draft[name])
    fitted = []
    for end in ("value", "low", "high"):
        # Negative prices would only be noise.
        costs = [1.0, *(getattr(each, end) for each in timed)]
        fixed, attention, mlp = map(float, nnls(np.array(rows), np.array(costs))[0])
        fitted.append(SublayerPrices(fixed, [attention] * depth, [mlp] * depth))
    value, low, high = fitted
    return Prices(value, low, high, measured.of(PLAIN))


def timed_paths(depth: int) -> dict[str, LayerPathDrafter]:
    """Return the paths to time for every model, the same in studies and searches, so that their costs agree.

    Skip sets of two sizes each give the costs of attention and of MLPs, and exits give the cost of a layer.
    """
    half, few = range(depth // 2, depth), range(depth - max(1, depth // 4), depth)
    skips = [LayerSkip(attention=half), LayerSkip(mlp=half), LayerSkip(layers=half), LayerSkip(layers=few)]
    exits = [EarlyExit(layer) for layer in sorted({max(1, depth * share // 4) for share in (1, 2, 3)}) if layer < depth]
    return {draft_name(each): each for each in (*skips, *exits)}


def costs_run(studied: StudiedModel, drafts: Iterable[str], pricing: Pricing, runtime: str) -> Run:
    """Return the run that finds what drafts cost: exits and skip sets by their sublayers, other paths by themselves."""
    alone = {name: content(path) for name, path in _alone(studied, drafts).items()}
    timed = {"runtime": runtime} if pricing == "measured" else {}
    return Run("costs", {**studied.origin, "pricing": pricing, **timed, "alone": alone}, {"model": studied.name})


def _alone(studied: StudiedModel, drafts: Iterable[str]) -> dict[str, LayerPathDrafter]:
    """Return the paths that drafts run and that are not priced by their sublayers, by name."""
    paths = paths_of(map(studied.given.drafter, drafts))
    return {name: each for name, each in paths.items() if not isinstance(each, _BY_SUBLAYERS)}


def find_costs(studied: StudiedModel, drafts: Iterable[str], run: Run) -> list[Row]:
    """Find prices, and keep what was timed."""
    model, adapter, depth = studied.model, studied.adapter, studied.depth
    alone = _alone(studied, drafts)
    if run.under["pricing"] == "weights":
        prices = prices_by_weights(model, adapter)
        known = {}
        for name, each in alone.items():
            own = each.cost(model, adapter)
            costs = replace(prices.costs(each.path(depth)), draft=own)
            known[name] = RoundCosts(Estimate(own, own, own), costs, prices.target)
        return [{"prices": asdict(replace(prices, known=known))}]
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
        base=wrap(bare(model), adapter=adapter, runtime=runtime_named(run.under["runtime"], after=0)),
    )
    known = {name: RoundCosts.of(measured, name) for name in alone}
    prices = replace(prices_by_measurement(measured, paths, depth), known=known)
    return [{"prices": asdict(prices), "timed": measured.to_dict()}]
