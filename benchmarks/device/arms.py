"""Ways to decode, as `selfspec bench` has them, each made where it can be, with the reason where it cannot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from device.figure import Figure, lacking
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench.arms import Arm, ArmSpec, make_arm
from selfspec.tools.bench.cell import Cell


@dataclass
class Ready:
    """Arms that have decoded once, and what became of the others.

    Attributes:
        arms: that work.
        others: by name, why they do not.
    """

    arms: list[Arm] = field(default_factory=list)
    others: dict[str, Figure] = field(default_factory=dict)


def plain(*runtimes: RuntimeName) -> list[ArmSpec]:
    """Plain decoding by each runtime."""
    return [ArmSpec("plain", runtime=runtime) for runtime in runtimes]


def drafting(drafts: Iterable[str], runtime: RuntimeName) -> list[ArmSpec]:
    """Each draft, as long as the default control has it."""
    return [ArmSpec("draft", draft, runtime=runtime) for draft in drafts]


def ready(specs: Iterable[ArmSpec], model: PreTrainedModel, cell: Cell, prompts: Tensor) -> Ready:
    """Make arms, and let each decode once.

    Args:
        specs: what is wanted.
        model: stock.
        cell: how to decode.
        prompts: `[batch, context]`.
    """
    found = Ready()
    for spec in specs:
        try:
            arm = make_arm(spec, model)
            absence = arm.absence(cell)
            if absence is None:
                arm.decode(prompts, cell, seed=0)
                found.arms.append(arm)
            else:
                found.others[spec.name] = Figure(cannot=absence)
        except Exception as error:
            found.others[spec.name] = lacking(error)
    return found
