"""Ways to run a pass: the stock modules, or a program recorded from them that computes the same without Python."""

from selfspec.runtime.batch_invariant import BatchInvariant
from selfspec.runtime.cuda_graphs import CudaGraphs
from selfspec.runtime.native.program import Native
from selfspec.runtime.runtime import Eager, Runtime

__all__ = ["BatchInvariant", "CudaGraphs", "Eager", "Native", "Runtime"]
