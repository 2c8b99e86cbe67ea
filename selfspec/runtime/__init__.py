"""Ways to run a pass: the stock modules, or a program recorded from them that computes the same without Python."""

from selfspec.runtime.cuda_graphs import CudaGraphs
from selfspec.runtime.runtime import Eager, Runtime, Traced

__all__ = ["CudaGraphs", "Eager", "Runtime", "Traced"]
