"""The ways to run passes that are compared, and one that selfspec has not yet: compiled passes inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from selfspec.model.adapter import Adapter
from selfspec.model.gated_view import GatedModel
from selfspec.runtime import Compiled, CudaGraphs, Runtime
from selfspec.runtime.layer_calls import LayerCall
from selfspec.runtime.named import RuntimeName, runtime_named
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.runtime import Function

BOTH = "compiled graphs"
RUNTIMES = (RuntimeName.EAGER, RuntimeName.TRACED, RuntimeName.GRAPHS, RuntimeName.COMPILED, BOTH)
"""Names of what is compared."""


@dataclass(frozen=True)
class CompiledGraphs(Runtime):
    """Passes compiled by inductor, their kernels captured in CUDA graphs. Equal to the stock modules up to rounding.

    Attributes:
        compiled: compiles.
        graphs: captures.
    """

    compiled: Compiled = field(default_factory=Compiled)
    graphs: CudaGraphs = field(default_factory=CudaGraphs)

    @property
    def after(self) -> int:
        return self.graphs.after

    @property
    def bucket(self) -> int:
        return self.graphs.bucket

    def check(self, device: torch.device) -> None:
        self.graphs.check(device)
        self.compiled.check(device)

    def put_calls(self, view: GatedModel, model: nn.Module, adapter: Adapter) -> tuple[LayerCall, ...]:
        return self.compiled.put_calls(view, model, adapter)

    def is_tried(self, lengths: Sequence[int]) -> bool:
        return self.graphs.is_tried(lengths)

    def agree(self, given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
        return self.compiled.agree(given, expected)

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        return self.graphs.program(self.compiled.program(function, example), example)


def runtime(name: str) -> Runtime:
    """The runtime of a name, which makes programs as soon as it can.

    Args:
        name: one of `RUNTIMES`.
    """
    if name == BOTH:
        compiled, graphs = (runtime_named(each, after=0) for each in (RuntimeName.COMPILED, RuntimeName.GRAPHS))
        assert isinstance(compiled, Compiled)
        assert isinstance(graphs, CudaGraphs)
        return CompiledGraphs(compiled, graphs)
    return runtime_named(RuntimeName(name), after=0)
