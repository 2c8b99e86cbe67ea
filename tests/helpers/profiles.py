"""Profiles for tests, without measuring anything."""

from __future__ import annotations

from dataclasses import asdict, replace

from transformers import PreTrainedModel

from selfspec.control.costs import BatchCosts, Costs
from selfspec.control.profile import Chosen, Profile, Setting
from selfspec.measure.acceptance import Acceptance, ExitFigures
from selfspec.measure.costs import MeasuredCosts
from selfspec.measure.estimate import Estimate
from selfspec.tools.calibrate.confirm import Confirmed

COSTS = Costs(draft=0.25, verify=1.1, widening=0.02, overhead=-0.01)
GREEDY = Chosen("lookup+exit:2", 5, BatchCosts((COSTS, replace(COSTS, widening=0.2, rows=4))), 0.0, (1.5, 1.4, 1.6), 4)
SAMPLED = Chosen("exit:1", 3, BatchCosts((replace(COSTS, draft=0.125),)), 0.8, (1.2, 1.1, 1.3))


def profile_of(model: PreTrainedModel, greedy: Chosen = GREEDY, sampled: Chosen = SAMPLED) -> Profile:
    """A profile that fits the model here and now."""
    return Profile(Setting.of(model), greedy, sampled, {"settings": {"prompts": 1}})


def calibrated(model: PreTrainedModel) -> Profile:
    """A calibration with one exit, of which greedy decoding made use and sampling did not."""
    estimate = Estimate(1.25, 1.0, 1.5)
    costs = MeasuredCosts(
        step_seconds=estimate,
        draft={"exit:2": estimate, "none": estimate},
        verify={"exit:2": {2: estimate, 4: estimate}, "none": {1: estimate, 2: estimate, 4: estimate}},
        overhead={"exit:2": estimate, "none": estimate},
        context=8,
        batch=1,
        lengths=(1, 4),
    )
    confirmed = [Confirmed("lookup+exit:2", estimate, 0.625, 2.5, 3), Confirmed("lookup", estimate, None, 1.0, 1)]
    kind = {
        "temperature": 0.0,
        "acceptance": {"exit:2": Acceptance([ExitFigures(4, {0.0: 3.0, 0.8: 3.0})]).to_dict()},
        "predictions": {"exit:2": {"draft_length": 3, "speedup": 1.375}},
        "confirmed": [asdict(each) for each in confirmed],
    }
    lost = replace(confirmed[0], speedup=Estimate(0.75, 0.5, 1.0))
    report = {
        "doubts": ["the machine was busy"],
        "costs": costs.to_dict(),
        "in_batches": [replace(costs, batch=4, out_of_step=estimate).to_dict()],
        "greedy": {**kind, "in_batches": {"4": asdict(confirmed[0]), "16": asdict(lost)}},
        "sampled": {**kind, "temperature": 0.8, "in_batches": {}},
    }
    return Profile(Setting.of(model), GREEDY, Chosen("none", 5, None, 0.8, (1.0, 1.0, 1.0)), report)
