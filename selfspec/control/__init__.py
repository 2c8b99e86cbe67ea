"""Controls decide how long to draft, and whether to draft at all, by costs and calibrated profiles."""

from selfspec.control.controller import Control, Controller, FixedLength
from selfspec.control.cost_aware import CostAware

__all__ = ["Control", "Controller", "CostAware", "FixedLength"]
