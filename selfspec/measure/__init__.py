"""Measuring what drafts cost on this machine and how often they are accepted: what speed-ups are predicted from."""

from selfspec.measure.acceptance import Acceptance, teacher_forced
from selfspec.measure.continuation import Continuation
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.estimate import Estimate
from selfspec.measure.own_text import continued

__all__ = [
    "Acceptance",
    "Continuation",
    "Estimate",
    "MeasuredCosts",
    "continued",
    "measure_costs",
    "teacher_forced",
]
