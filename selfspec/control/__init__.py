"""Controls decide how long to draft, and whether to draft at all, by costs and calibrated profiles."""

from selfspec.control.controller import Control, Controller, Evidence
from selfspec.control.cost_aware import CostAware
from selfspec.control.fixed import ConfidenceStop, FixedLength

__all__ = ["ConfidenceStop", "Control", "Controller", "CostAware", "Evidence", "FixedLength"]
