"""How long to draft, and whether to draft at all: controls, what they are made of, costs, and calibrated profiles."""

from selfspec.control.base import Control, Controller, Evidence, NoDraft, RowOutcome
from selfspec.control.confidence import ConfidenceStop
from selfspec.control.cost_aware import CostAware
from selfspec.control.fixed import FixedLength

__all__ = ["ConfidenceStop", "Control", "Controller", "CostAware", "Evidence", "FixedLength", "NoDraft", "RowOutcome"]
