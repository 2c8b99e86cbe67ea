"""Which drafts are worth confirming: what the formula makes of measured costs and acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedModel

from selfspec.control.costs import Costs
from selfspec.control.forecast import Forecast, forecast
from selfspec.draft import Cascade, Drafter, EarlyExit, LowPrecision, PromptLookup
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.named import PLAIN, draft_name
from selfspec.errors import DraftConfigError
from selfspec.measure.acceptance import Acceptance
from selfspec.measure.costs import MeasuredCosts
from selfspec.model.adapter import Adapter

# Acceptance while generating may be better than the formula's, which takes one rate for all positions.
_WORTH_CONFIRMING = 0.9
_MOST_PATHS = 2
_MOST_MEASURED = 6


@dataclass(frozen=True)
class Candidate:
    """A draft to confirm by generating with it.

    Attributes:
        name: of the draft.
        draft: proposes tokens.
        path: of the model that it drafts along; None: it looks up.
        costs: of its rounds.
    """

    name: str
    draft: Drafter
    path: LayerPathDrafter | None
    costs: Costs

    def costs_in(self, measured: MeasuredCosts) -> Costs:
        """What was measured of its rounds elsewhere, its path among the drafts there."""
        return measured.of(PLAIN if self.path is None else draft_name(self.path))


@dataclass(frozen=True)
class Prediction:
    """What the formula makes of a draft along a path of the model.

    Attributes:
        name: of the draft.
        alpha: acceptance rate, teacher-forced on the model's own text.
        costs: of its rounds.
        best: the draft length that promises most, and what it promises.
    """

    name: str
    alpha: float
    costs: Costs
    best: Forecast


def considered(depth: int, drafters: Sequence[LayerPathDrafter] | None) -> dict[str, LayerPathDrafter]:
    """Drafts along a path of the model, by name: those given, else every exit, exact and in 8 bits, and 8 and 4 bits.

    Args:
        depth: layers of the model.
        drafters: given; None: the usual ones.

    Raises:
        DraftConfigError: one is no draft along a path, does not fit the depth, or two have one name.
    """
    drafts = _usual(depth) if drafters is None else list(drafters)
    named: dict[str, LayerPathDrafter] = {}
    for draft in drafts:
        name = draft_name(draft)
        if not isinstance(draft, LayerPathDrafter):
            raise DraftConfigError(
                f"draft {name} is no path of the model; look-ups and plain decoding are always considered, so name the "
                "path alone: exit:E, head:FOLDER or skip:..."
            )
        if name in named:
            raise DraftConfigError(f"draft {name} is named more than once; name each draft once")
        draft.check(depth)
        named[name] = draft
    return named


def fitting(
    drafters: Mapping[str, LayerPathDrafter], model: PreTrainedModel, adapter: Adapter
) -> dict[str, LayerPathDrafter]:
    """Those of some drafts that the model does not refuse: a model that is quantised has no use for fewer bits."""
    fit: dict[str, LayerPathDrafter] = {}
    for name, draft in drafters.items():
        with suppress(DraftConfigError):
            draft.check_model(model, adapter)
            fit[name] = draft
    return fit


def _usual(depth: int) -> list[LayerPathDrafter]:
    exits = range(1, depth)
    return [
        *(EarlyExit(layer) for layer in exits),
        *(LowPrecision(bits) for bits in (8, 4)),
        *(LowPrecision(8, exit=layer) for layer in exits),
    ]


def to_measure(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: Mapping[str, LayerPathDrafter],
    acceptances: Sequence[Mapping[str, float]],
) -> list[LayerPathDrafter]:
    """The drafts whose costs are worth measuring: all, or where they are many, those with the best estimates.

    Args:
        model: the stock model.
        adapter: where its layers are.
        drafters: by name.
        acceptances: rates by name, one mapping for each kind of decoding.
    """
    if len(drafters) <= _MOST_MEASURED:
        return list(drafters.values())
    costs = {name: Costs(draft.cost(model, adapter)) for name, draft in drafters.items()}

    def promise(name: str) -> float:
        return max(forecast(rates[name], costs[name]).speedup for rates in acceptances)

    best = sorted(drafters, key=promise, reverse=True)[:_MOST_MEASURED]
    return [draft for name, draft in drafters.items() if name in best]


def predicted(rates: Mapping[str, float], costs: MeasuredCosts, longest: int) -> list[Prediction]:
    """What the formula promises of each draft that was measured, most first.

    Args:
        rates: acceptance by name.
        costs: measured.
        longest: draft length up to which to look.
    """
    predictions = [
        Prediction(name, rates[name], costs.of(name), forecast(rates[name], costs.of(name), longest))
        for name in costs.draft
        if name != PLAIN
    ]
    return sorted(predictions, key=lambda each: each.best.speedup, reverse=True)


def to_confirm(
    predictions: Iterable[Prediction], drafters: Mapping[str, LayerPathDrafter], costs: MeasuredCosts
) -> list[Candidate]:
    """Look-ups alone, and the best paths alone and behind look-ups.

    Args:
        predictions: most promising first.
        drafters: by name.
        costs: measured.
    """
    look_up = PromptLookup()
    candidates = [Candidate(draft_name(look_up), look_up, None, costs.of(PLAIN))]
    worth = [each for each in predictions if each.best.speedup >= _WORTH_CONFIRMING]
    for each in worth[:_MOST_PATHS]:
        path = drafters[each.name]
        cascade = Cascade(look_up, path)
        candidates += [
            Candidate(each.name, path, path, each.costs),
            Candidate(draft_name(cascade), cascade, path, each.costs),
        ]
    return candidates


def rates_of(acceptance: Mapping[str, Acceptance], temperature: float) -> dict[str, float]:
    """Acceptance rates at a temperature by name."""
    return {name: each.alpha(temperature).value for name, each in acceptance.items()}
