"""Runtimes by name, for the command line, other processes and records."""

from __future__ import annotations

from enum import StrEnum

import torch

from selfspec.runtime.compiled import Compiled
from selfspec.runtime.cuda_graphs import CudaGraphs
from selfspec.runtime.runtime import AnyLength, Eager, Runtime
from selfspec.runtime.traced import Traced


class RuntimeName(StrEnum):
    """Names of the runtimes."""

    EAGER = "eager"
    TRACED = "traced"
    COMPILED = "compiled"
    GRAPHS = "graphs"


_MAKING_PROGRAMS: dict[RuntimeName, type[AnyLength] | type[CudaGraphs]] = {
    RuntimeName.TRACED: Traced,
    RuntimeName.COMPILED: Compiled,
    RuntimeName.GRAPHS: CudaGraphs,
}


def usual_runtime(device: torch.device) -> RuntimeName:
    """Return the runtime that benchmarks take where nobody names one."""
    return RuntimeName.GRAPHS if device.type == "cuda" else RuntimeName.TRACED


def runtime_named(name: RuntimeName, after: int | None = None) -> Runtime:
    """Make a runtime, with its default for the passes of a kind before a program is made where `after` is None."""
    if name is RuntimeName.EAGER:
        return Eager()
    return _MAKING_PROGRAMS[name]() if after is None else _MAKING_PROGRAMS[name](after=after)
