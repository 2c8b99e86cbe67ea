"""Ways to run a pass: the stock modules, or a program recorded from them that computes the same without Python."""

from enum import StrEnum

import torch

from selfspec.device import has_graphs
from selfspec.runtime.batch_invariant import BatchInvariant
from selfspec.runtime.cuda_graphs import CudaGraphs
from selfspec.runtime.native.program import Native
from selfspec.runtime.runtime import Eager, Runtime

__all__ = ["BatchInvariant", "CudaGraphs", "Eager", "Native", "Runtime"]


class RuntimeName(StrEnum):
    """Names of the runtimes."""

    EAGER = "eager"
    NATIVE = "native"
    GRAPHS = "graphs"
    INVARIANT = "batch-invariant"


_WITHOUT_PROGRAMS: dict[RuntimeName, type[Runtime]] = {
    RuntimeName.EAGER: Eager,
    RuntimeName.INVARIANT: BatchInvariant,
}
_MAKING_PROGRAMS: dict[RuntimeName, type[Native] | type[CudaGraphs]] = {
    RuntimeName.NATIVE: Native,
    RuntimeName.GRAPHS: CudaGraphs,
}


def usual_runtime(device: torch.device) -> RuntimeName:
    """Return the runtime that benchmarks take where nobody names one."""
    return RuntimeName.GRAPHS if has_graphs(device) else RuntimeName.NATIVE


def runtime_named(name: RuntimeName, after: int | None = None) -> Runtime:
    """Make a runtime; `after` None: its default number of passes of a kind before a program is made."""
    if name in _WITHOUT_PROGRAMS:
        return _WITHOUT_PROGRAMS[name]()
    return _MAKING_PROGRAMS[name]() if after is None else _MAKING_PROGRAMS[name](after=after)
