"""Choose the drafts worth confirming, by the formula from measured costs and acceptance."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.control.costs import Costs, Forecast, forecast
from selfspec.draft import Cascade, Drafter, LowPrecision, Recycling, Suffixes
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name, kinds
from selfspec.errors import DraftConfigError, HeadError
from selfspec.formats.format import copies
from selfspec.measure.costs import MeasuredCosts
from selfspec.tools.lab.drafts import path_of

# Acceptance while generating may be better than the formula's, which takes one rate for all positions.
_WORTH_CONFIRMING = 0.9
_MOST_PATHS = 2
_MOST_MEASURED = 6


@dataclass(frozen=True)
class Candidate:
    """A draft worth confirming: chains, or trees of at most `nodes` tokens.

    `step` is its own account of what its draft steps cost, in plain steps, where they run no path of the model.
    """

    draft: Drafter
    nodes: int | None = None
    step: float = 0.0

    @property
    def name(self) -> str:
        """Name in reports."""
        return draft_name(self.draft) + ("" if self.nodes is None else f", {self.nodes} nodes")

    def levels(self, longest: int) -> int:
        """Return the most tokens on one path of a draft, where chains have at most `longest`."""
        return longest if self.nodes is None else min(longest, self.nodes)


def considered(depth: int, drafters: Sequence[Drafter] | None, context: int = 0) -> dict[str, Drafter]:
    """Return the drafts to consider by name: those given, else what drafters declare.

    Drafts that need no training are always tried: formats of fewer bits, and heads of the checkpoint. Over texts of
    many tokens, `context`, drafts that read less of the cache are tried behind these. A DraftConfigError says which
    draft cannot be.
    """
    declared = [each for each in _declared(depth) if each.runs != "nothing"]
    rounded = [LowPrecision(format=kind()) for kind in copies().values()]
    behind = [each for kind in _kinds() for each in kind.variants_behind(rounded[0], context)]
    untrained = [*rounded, *behind, *(each for each in declared if each.runs == "model")]
    spelled = {getattr(each, "spelling", None) for each in drafters or ()}
    usual = (
        [*declared, *behind]
        if drafters is None
        else [*drafters, *(each for each in untrained if each.spelling not in spelled)]
    )
    named: dict[str, Drafter] = {}
    for draft in usual:
        if not isinstance(draft, Drafter):
            raise DraftConfigError(
                f"draft {shown(draft)} cannot be considered; plain decoding is what all are compared with, so name "
                "drafts alone, such as exit:E or lookup+int8"
            )
        if draft.spelling is None:
            raise DraftConfigError(
                f"draft {shown(draft)} has no name that a profile could hold; put its class into a module "
                "(docs/your_own_drafter.md)"
            )
        if draft.spelling in named:
            raise DraftConfigError(f"draft {draft.spelling} is named more than once; name each draft once")
        draft.check(depth)
        named[draft.spelling] = draft
    return named


def _declared(depth: int) -> Iterator[Drafter]:
    """Return what the drafters, those of other packages too, say is worth trying."""
    for kind in _kinds():
        yield from kind.variants(depth)


def _kinds() -> list[type[Drafter]]:
    return list(dict.fromkeys(kinds().values()))


def fitting(drafters: Mapping[str, Drafter], model: PreTrainedModel, adapter: Adapter) -> dict[str, Drafter]:
    """Return the drafts that the model does not refuse: a quantised one has no use for fewer bits, few have a head."""
    fit: dict[str, Drafter] = {}
    for name, draft in drafters.items():
        with suppress(DraftConfigError, HeadError):
            draft.check_model(model, adapter)
            fit[name] = draft
    return fit


def to_measure(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: Mapping[str, LayerPathDrafter],
    acceptances: Sequence[Mapping[str, float]],
    wanted: Collection[str] = (),
) -> list[LayerPathDrafter]:
    """Return the paths whose costs are worth measuring: all, or where they are many, those with the best estimates.

    The acceptance rates are by name, one mapping for each kind of decoding; `wanted` are measured in any case.
    """
    if len(drafters) <= _MOST_MEASURED:
        return list(drafters.values())
    costs = {name: Costs(draft.cost(model, adapter)) for name, draft in drafters.items()}

    def promise(name: str) -> float:
        return max(forecast(rates[name], costs[name]).speedup for rates in acceptances)

    best = sorted(drafters, key=promise, reverse=True)[:_MOST_MEASURED]
    return [draft for name, draft in drafters.items() if name in best or name in wanted]


def predicted(rates: Mapping[str, float], costs: MeasuredCosts, longest: int) -> dict[str, Forecast]:
    """Predict the speed-up of each measured draft, up to a length of `longest`, the highest first."""
    found = {name: forecast(rates[name], costs.of(name), longest) for name in costs.draft if name != PLAIN}
    return dict(sorted(found.items(), key=lambda each: each[1].speedup, reverse=True))


def to_confirm(
    predictions: Mapping[str, Forecast],
    drafters: Mapping[str, LayerPathDrafter],
    nodes: int = 0,
    others: Sequence[Candidate] = (),
) -> dict[str, Candidate]:
    """Return candidates by name: what runs no model, the best paths alone and behind it; recycling, and trees.

    `predictions` has the best first. `nodes` are those of the largest trees; a smaller budget has half as many, 0 is
    none. `others` are no path of the model; those that run a head, and suffix trees, grow as trees too.
    """
    look_ups = [each for each in _declared(depth=1) if each.runs == "nothing"]
    worth = [drafters[name] for name, best in predictions.items() if best.speedup >= _WORTH_CONFIRMING]
    candidates = [Candidate(look_up) for look_up in look_ups]
    for path in worth[:_MOST_PATHS]:
        candidates += [Candidate(path), *(Candidate(Cascade(look_up, path)) for look_up in look_ups)]
    budgets = [budget for budget in (nodes // 2, nodes) if budget > 1]
    candidates += [Candidate(path, budget) for path in worth[:1] for budget in budgets]
    if budgets:
        candidates += [Candidate(Recycling(), budget) for budget in budgets]
    branching = [each for each in others if each.draft.runs == "model" or isinstance(each.draft, Suffixes)]
    grown = [replace(each, nodes=nodes) for each in branching if nodes > 1]
    return {each.name: each for each in [*others, *grown, *candidates]}


def costs_of(candidate: Candidate, measured: MeasuredCosts) -> Costs:
    """Return the measured costs of a candidate's rounds."""
    path = path_of(candidate.draft)
    return replace(measured.of(PLAIN), draft=candidate.step) if path is None else measured.of(draft_name(path))
