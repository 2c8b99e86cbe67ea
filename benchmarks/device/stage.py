"""A stage: a function that names its cases, each measured by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from device.figure import Rows
from device.models import Models


@dataclass(frozen=True)
class Bench:
    """Device and models of all stages.

    Attributes:
        device: where models run.
        miniature: whether everything is as small as it can be, to see that it runs.
        models: makes models.
    """

    device: torch.device
    miniature: bool
    models: Models


@dataclass(frozen=True)
class Case:
    """A measurement that is kept as one.

    Attributes:
        name: no other case of the stage has it.
        measure: gives its figures; what it raises is recorded in their place.
    """

    name: str
    measure: Callable[[], Rows]


@dataclass(frozen=True)
class Stage:
    """Cases that are measured one after the other.

    Attributes:
        name: on the command line, and of its file.
        about: what it measures, in a line.
        minutes: that it is expected to take on an H100.
        cases: names the cases, in order; nothing is measured or made before one is.
    """

    name: str
    about: str
    minutes: float
    cases: Callable[[Bench], Iterator[Case]]
