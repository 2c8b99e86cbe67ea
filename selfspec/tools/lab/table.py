"""A study as a table: one row for each draft, workload, temperature and draft length; and prices of drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.architecture import Adapter
from selfspec.control.costs import Costs, speedup
from selfspec.draft import EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name, parse_draft
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import bare
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.model.sizes import share_read, widening
from selfspec.runtime import Eager
from selfspec.tools.lab.drafts import content, draft_kind, skip_set
from selfspec.tools.lab.runs import Asked, Run
from selfspec.tools.lab.study import Pricing, StudiedModel

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
class Prices:
    """Terms of the speed-up formula for any draft path. The unit is one step of plain decoding.

    Attributes:
        sublayers: prices of a draft step; `low` and `high` the same by the ends of the intervals.
        target: V and o of a draft that is verified from tokens on.
        known: costs of paths that were timed for themselves, by name; `known_draft` their c, with its interval.
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
        """Number of layers of the network."""
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

        Exact states of a draft are not computed again: its further tokens widen only the rest of the target pass.
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
    """Return the paths to time for every model, the same in studies and searches, so that their costs agree.

    Skip sets of two sizes each give the costs of attention and of MLPs, and exits give the cost of a layer.
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


Row = dict[str, Any]
"""One row; what is not known is None."""

# As of `Costs.of_round`: no round takes less than a plain one.
_LEAST = 1.0
_BY_TEXT = ("judged_by_text", "accepted_by_text", "tokens_by_text", "rounds_by_text")
_ENDS = {"": "value", "_low": "low", "_high": "high"}


def speedups(estimated: Run, prices: Prices) -> dict[int, Estimate]:
    """Return the speed-up that an estimated draft promises, by draft length: tokens per round by cost per round.

    After Leviathan et al. (2023), whose (1 - alpha^(gamma+1)) / (1 - alpha) tokens are here counted rather than derived
    from a single alpha. Intervals have tokens at one end and c at the other.
    """
    costs, c = prices.of_draft(estimated), prices.draft(estimated)
    found = {}
    for length in sorted(map(int, estimated.found["lengths"])):
        at = estimated.found["lengths"][str(length)]
        tokens = Estimate(**at["mean_accepted_length"])
        # Of teacher forcing every round drafts as much as it may; generations have counted what theirs did.
        shapes = at.get("rounds") or [[length, length, 1]]
        rounds = sum(number for *_, number in shapes)
        steps = sum(steps * number for _, steps, number in shapes) / rounds
        # A round without a draft is a plain one.
        more = sum(number * (costs.of_round(0, drafted) if drafted else 1.0) for drafted, _, number in shapes) / rounds
        found[length] = Estimate(
            tokens.value / max(steps * c.value + more, _LEAST),
            tokens.low / max(steps * c.high + more, _LEAST),
            tokens.high / max(steps * c.low + more, _LEAST),
            c.confidence,
        )
    return found


def best_length(promised: Mapping[int, Estimate]) -> int:
    """Return the draft length that promises most."""
    return max(promised, key=lambda length: promised[length].value)


def pareto_front(drafts: Iterable[Row]) -> list[Row]:
    """Return the drafts that no other beats in both acceptance and cost, cheapest first."""
    front: list[Row] = []
    for row in sorted(drafts, key=lambda row: (row["c"], -row["alpha"])):
        if not front or row["alpha"] > front[-1]["alpha"]:
            front.append(row)
    return front


def alpha(found: Mapping[str, Any], what: str = "overlap") -> Estimate | None:
    """Return the acceptance, or agreement, at a draft's first position, with an interval over texts; None: unknown."""
    pairs = [pair for pair in zip(found.get(what, ()), found["tokens"], strict=False) if pair[1]]
    return Estimate.of_ratio([part for part, _ in pairs], [whole for _, whole in pairs]) if pairs else None


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return the table of a study from everything that was found."""
    prices: dict[str, Prices] = {}
    texts: dict[str, Run] = {}
    measured: dict[str, list[Run]] = {}
    for run in runs:
        under = run.asked.under
        if run.asked.kind == "costs" and run.error is None:
            prices[under["setting"]] = Prices.of(run)
        elif run.asked.kind == "texts":
            texts[run.asked.key] = run
        elif run.asked.kind == "confirm":
            measured.setdefault(under["draft"] + under["texts"], []).append(run)
    table: list[Row] = []
    for run in runs:
        if run.asked.kind == "estimate":
            under = run.asked.under
            setting = texts[under["texts"]].asked.under["setting"]
            table += _rows_of(run, prices.get(setting), measured.get(under["draft"] + under["texts"], []))
    return table


def _rows_of(estimated: Run, prices: Prices | None, confirmed: Sequence[Run]) -> Iterator[Row]:
    """Return the rows of one draft on one text; without prices nothing is promised."""
    found, draft = estimated.found, estimated.asked.under["draft"]
    kind = draft_kind(draft)
    place: Row = {
        **{name: estimated.asked.place[name] for name in ("model", "weights", "workload", "temperature", "draft")},
        "kind": kind,
        "judged_by": estimated.asked.under["by"],
        "skipped": len(skip_set(draft)) if kind in ("skip", "skip-file") else None,
    }
    if estimated.error is not None:
        yield {**place, "error": estimated.error}
        return
    promised = {} if prices is None else speedups(estimated, prices)
    best = best_length(promised) if promised else None
    by_length = {each.asked.under["draft_length"]: each for each in confirmed}
    rate, agreement = alpha(found), alpha(found, "agreed")
    for length in map(int, found["lengths"]):
        yield {
            **place,
            "draft_length": length,
            "best_length": None if best is None else length == best,
            **_spread("agreement", agreement),
            **_spread("alpha", rate),
            "first_judged_by_text": found["tokens"],
            "first_accepted_by_text": found["overlap"],
            **_shares(found["lengths"][str(length)]),
            **_accepted("", found["lengths"][str(length)]),
            **({} if prices is None else _priced(estimated, length, rate, promised[length], prices)),
            **(_measured(by_length[length]) if length in by_length else {}),
        }


def _shares(found: Mapping[str, Any]) -> Row:
    """Return the share of rounds that had a draft, and of draft tokens that took a step: of teacher forcing all."""
    shapes = found.get("rounds", [[1, 1, 1]])
    drafted, steps = (sum(shape[place] * shape[2] for shape in shapes) for place in (0, 1))
    return {
        "drafting_share": sum(shape[2] for shape in shapes if shape[0]) / sum(shape[2] for shape in shapes),
        "stepped_share": steps / drafted if drafted else 0.0,
    }


def _priced(estimated: Run, length: int, rate: Estimate | None, promised: Estimate, prices: Prices) -> Row:
    costs = prices.of_draft(estimated)
    return {
        **_spread("c", prices.draft(estimated)),
        "V": costs.verify + length * costs.widening,
        "o": costs.overhead,
        **_spread("predicted_speedup", promised),
        "predicted_tokens_per_second": None if prices.step_seconds is None else promised.value / prices.step_seconds,
        "formula_speedup": None if rate is None else speedup(rate.value, length, costs),
    }


def _measured(confirmed: Run) -> Row:
    if confirmed.error is not None:
        return {"error": confirmed.error}
    found = confirmed.found
    names = ["speedup_median", "tokens_per_second", "cache_bytes"]
    return {
        **_accepted("measured_", found),
        **_spread("measured_speedup", Estimate(**found["speedup"])),
        **{f"measured_{name}": found[name] for name in names},
        "exact": found["exact"],
    }


def _accepted(prefix: str, found: Mapping[str, Any]) -> Row:
    """Return the acceptance rate, the mean accepted length and the counts by position and by text."""
    accepted, judged = found["accepted"], found["judged"]
    counted = [name for name in found if name in _BY_TEXT]
    return {
        **{prefix + name: list(found[name]) for name in counted},
        **_spread(f"{prefix}acceptance_rate", Estimate.of_share(sum(accepted), sum(judged))),
        **_spread(f"{prefix}mean_accepted_length", Estimate(**found["mean_accepted_length"])),
        f"{prefix}judged_by_position": list(judged),
        f"{prefix}accepted_by_position": list(accepted),
    }


def estimate_in(row: Row, name: str) -> Estimate:
    """Return a figure of a row with its interval."""
    return Estimate(*(float(row[f"{name}{end}"]) for end in _ENDS))


def _spread(name: str, estimate: Estimate | None) -> Row:
    return {name + end: estimate and getattr(estimate, part) for end, part in _ENDS.items()}
