"""Passes traced from the stock modules: the same kernels in the same order, called from C++."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.kernels import native
from selfspec.runtime import fusions
from selfspec.runtime.layer_calls import LayerCall, alike
from selfspec.runtime.native.program import Native
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.runtime import RECORDING, AnyLength, Function, Runtime


@dataclass(frozen=True)
class Traced(AnyLength):
    """Programs traced from the stock modules: the same kernels in the same order, called from C++.

    In small layers Python takes as long between two kernels as the kernels themselves. A traced program has no Python.
    It is made once for each kind of pass, after some passes of that kind, since making one takes as long as dozens of
    passes. It is used only if it gives the stock modules' result bit for bit, and faster.

    Where selfspec's kernels were built, a pass that a native program can run gets one in place of a trace: see
    `selfspec.runtime.native`. Its results are the modules' up to rounding.
    """

    @property
    def in_turn(self) -> tuple[Runtime, ...]:
        return (Native(self.after), self) if native.load_kernels() else (self,)

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        return traced(function, example.flat(), function.layers)


def traced(function: Function, example: tuple[Tensor, ...], layers: Sequence[LayerCall] = ()) -> Function:
    """Trace a function of tensors, to be called from C++; `layers` are calls in it, which kept what they were given."""
    # A separate unit: torch.jit.trace would keep its result, and every weight, in a unit of the process forever.
    unit = torch._C.CompilationUnit()
    with RECORDING, warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        # It warns about every decision on a shape; the shapes are the same next time.
        warnings.simplefilter("ignore")
        # Every node keeps its call stack, which is shortest in a new thread.
        inference = torch.is_inference_mode_enabled()
        program = thread.submit(_traced, unit, function, example, layers, inference).result()

    def run(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        try:
            with _as_written():
                outputs: tuple[Tensor, ...] = program(*tensors)
        except RuntimeError as error:
            # Every kernel error arrives as this one.
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return outputs

    return run


@contextmanager
def _as_written() -> Iterator[None]:
    """Disable the optimiser, which would fuse or exchange kernels and so round differently."""
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        yield


@torch.no_grad()
def _traced(
    unit: Any, function: Function, example: tuple[Tensor, ...], layers: Sequence[LayerCall], inference: bool
) -> Any:
    """The pass as a function of a unit; equal layers are calls of one more function."""
    with torch.inference_mode(inference), _as_written():
        try:
            for number, group in enumerate(alike(layers)):
                # Layers may differ in more than can be compared from outside.
                first, last = (_graph(call.run, call.example) for call in (group[0], group[-1]))
                if str(first) == str(last):
                    shared = unit.create_function(f"layer{number}", first, True)
                    for call in group:
                        call.function = shared
            return unit.create_function("program", _graph(function, example), True)
        finally:
            for call in layers:
                call.function = None


def _graph(function: Function, example: tuple[Tensor, ...]) -> Any:
    """Trace `function` for tensors like the example, without what no kernel needs."""
    names = [f"tensor{number}" for number in range(len(example))]
    graph, _ = torch._C._create_graph_by_tracing(
        lambda *tensors: function(tensors), example, lambda _: "", True, False, None, names
    )
    fusions.drop_conversions(graph)
    torch._C._jit_pass_erase_shape_information(graph)
    # Numbers only: results computed from weights must follow when weights are overwritten.
    torch._C._jit_pass_constant_propagation_immutable_types(graph)  # type: ignore[attr-defined]
    torch._C._jit_pass_cse(graph)
    torch._C._jit_pass_constant_pooling(graph)  # type: ignore[attr-defined]
    fusions.fuse(graph)
    torch._C._jit_pass_dce(graph)
    # Source locations take more memory than the rest of a node.
    nowhere: Any = torch._C.Graph()
    for node in graph.nodes():
        node.copyMetadata(nowhere.create("prim::Constant"))
    return graph
