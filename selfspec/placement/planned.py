"""A checkpoint and the plan that loads it within a budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.draft import Drafter
from selfspec.errors import UnsupportedOptionError
from selfspec.placement.byte_size import parse_bytes, shown_bytes
from selfspec.placement.drafts import bits_of
from selfspec.placement.plan import Plan, plan_memory
from selfspec.placement.resident import machine_bytes
from selfspec.placement.survey import Survey, survey


@dataclass(frozen=True)
class PlannedCheckpoint:
    """What is known before weights are read.

    Attributes:
        survey: of the checkpoint.
        plan: what stays in memory.
    """

    survey: Survey
    plan: Plan


def plan_checkpoint(
    path: str, memory: str | int, dtype: torch.dtype | None, draft: bool | Drafter, context: int
) -> PlannedCheckpoint:
    """Plan how to load a checkpoint within a byte budget. Arguments and errors as in `selfspec.load`."""
    budget = parse_bytes("memory", memory)
    if type(context) is not int or context < 1:
        raise UnsupportedOptionError(f"context={context!r} is no number of tokens; pass e.g. context=4096")
    beside = bits_of(draft) if isinstance(draft, Drafter) else None
    bits = [8, 4] if draft is True else [] if beside is None else [beside]
    surveyed = survey(path, dtype, context)
    plan = plan_memory(surveyed.memory, budget, surveyed.bandwidth(), bits, beside)
    there = machine_bytes()
    if there is not None and plan.total > there:
        raise UnsupportedOptionError(
            f"memory={shown_bytes(budget)} is more than there is: the plan takes {shown_bytes(plan.total)}, and the "
            f"machine, or the control group of the process, has {shown_bytes(there)}; ask for less"
        )
    return PlannedCheckpoint(surveyed, plan)
