"""Ways to run a pass: the stock modules, or a program recorded from them that computes the same without Python."""

from collections.abc import Iterable

import torch

from selfspec.device import has_graphs
from selfspec.runtime.batch_invariant import BatchInvariant
from selfspec.runtime.cuda_graphs import CudaGraphs
from selfspec.runtime.native.program import Native
from selfspec.runtime.runtime import Eager, Runtime

__all__ = ["BatchInvariant", "CudaGraphs", "Eager", "Native", "Runtime", "usual_runtime"]


def usual_runtime(devices: Iterable[torch.device], streams_from_disk: bool = False) -> Runtime:
    """Return the runtime for a model with weights on `devices`, where nobody names one."""
    found = set(devices) - {torch.device("meta")}
    # On a GPU most of a pass over a few tokens is the launching of its kernels, which a graph does at once.
    if len(found) == 1 and has_graphs(*found):
        return CudaGraphs()
    # A recording takes memory, which a budget with reads from the disk has better uses for.
    return Eager() if streams_from_disk else Native()
