"""What drafts of a model cost: timed on this machine, or by the weights that a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec.api import wrap
from selfspec.draft import LayerSkip
from selfspec.draft.along_path import PathDrafter
from selfspec.draft.named import draft_name
from selfspec.measure.costs import measure_costs
from selfspec.measure.stock import bare
from selfspec.runtime import Eager
from selfspec.tools.studies.drafts import draft_of
from selfspec.tools.studies.point import Point
from selfspec.tools.studies.search.prices import Prices, prices_by_measurement, prices_by_weights
from selfspec.tools.studies.study import Pricing
from selfspec.tools.studies.subject import Subject

# Drafts timed one by one; what others cost follows from theirs.
_MOST_TIMED = 12
_WIDTHS, _LENGTHS, _REPEATS = (1, 2, 3, 5, 7), (1, 3), 7


def costs_point(subject: Subject, drafts: Sequence[str], pricing: Pricing) -> Point:
    """The point of finding them out.

    Args:
        subject: the model.
        drafts: of the study. Exits are timed by themselves, skip sets by their sublayers.
        pricing: how.
    """
    timed = [name for name in drafts if not name.startswith("skip")] if pricing == "measured" else []
    content = {
        "base": subject.base,
        "dtype": subject.dtype,
        "device": subject.model.device.type,
        "threads": torch.get_num_threads(),
        "pricing": pricing,
        "runtime": "eager",
        "timed": _spread(timed),
    }
    return Point("costs", content, {"model": subject.name})


def find_costs(subject: Subject, point: Point) -> dict[str, Any]:
    """Prices, and what was timed."""
    if point.content["pricing"] == "weights":
        return {"prices": prices_by_weights(subject.model, subject.adapter).to_dict()}
    drafters = {name: draft_of(name) for name in point.content["timed"]} | _telling(subject.depth)
    measured = measure_costs(
        subject.model,
        subject.adapter,
        list(drafters.values()),
        widths=_WIDTHS,
        context=64,
        repeats=_REPEATS,
        lengths=_LENGTHS,
        # As drafts are confirmed.
        base=wrap(bare(subject.model), adapter=subject.adapter, runtime=Eager()),
    )
    # They are measured by the names they give themselves.
    by_name = {draft_name(drafter): drafter for drafter in drafters.values()}
    prices = prices_by_measurement(measured, by_name, subject.depth)
    own = {name: prices.known[draft_name(drafter)] for name, drafter in drafters.items()}
    known = Prices(prices.fixed, prices.sublayers, prices.target, own, prices.step_seconds)
    return {"prices": known.to_dict(), "measured": measured.to_dict()}


def prices_of(found: dict[str, Any]) -> Prices:
    """The prices that were found."""
    return Prices.from_dict(found["prices"])


def _telling(depth: int) -> dict[str, PathDrafter]:
    """Skip sets that tell attention and MLP apart, at two sizes each."""
    half, few = range(depth // 2, depth), range(depth - max(1, depth // 4), depth)
    sets = [LayerSkip(attention=half), LayerSkip(mlp=half), LayerSkip(layers=half), LayerSkip(layers=few)]
    return {draft_name(each): each for each in sets}


def _spread(names: Sequence[str]) -> list[str]:
    count = min(len(names), _MOST_TIMED)
    return [names[index * len(names) // count] for index in range(count)]
