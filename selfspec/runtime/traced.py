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

from selfspec.runtime.layer_calls import LayerCall, alike
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.runtime import RECORDING, AnyLength, Function


@dataclass(frozen=True)
class Traced(AnyLength):
    """Programs traced from the stock modules: the same kernels in the same order, called from C++.

    What Python does between two kernels takes as long as the kernels themselves where layers are small. A traced
    program has none of it. It is made once for every kind of pass, after some passes of that kind, since making one
    takes as long as some dozens of passes; and it is used where it gave, bit by bit, what the stock modules gave, in
    less time.
    """

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        return traced(function, example.flat(), function.layers)


def traced(function: Function, example: tuple[Tensor, ...], layers: Sequence[LayerCall] = ()) -> Function:
    """What a function of tensors does, called from C++.

    Args:
        function: what to trace.
        example: what it was run on.
        layers: calls in it that may be given functions to run, each noted in that run.
    """
    # Of its own: what torch.jit.trace makes stays in a unit of the process, and every weight with it, for good.
    unit = torch._C.CompilationUnit()
    with RECORDING, warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        # It warns of every decision taken on a shape; the shapes are the same next time.
        warnings.simplefilter("ignore")
        # Every node notes the call stack it comes from, which is shortest in a thread of its own.
        inference = torch.is_inference_mode_enabled()
        program = thread.submit(_traced, unit, function, example, layers, inference).result()

    def run(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        try:
            with _as_written():
                outputs: tuple[Tensor, ...] = program(*tensors)
        except RuntimeError as error:
            # All errors of kernels come out as this one.
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return outputs

    return run


@contextmanager
def _as_written() -> Iterator[None]:
    """Without an optimiser, which would fuse kernels or exchange them, and so round differently."""
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        yield


@torch.no_grad()
def _traced(
    unit: Any, function: Function, example: tuple[Tensor, ...], layers: Sequence[LayerCall], inference: bool
) -> Any:
    """The pass as a function of a unit; layers that are alike are calls of one more function each."""
    with torch.inference_mode(inference), _as_written():
        try:
            for number, group in enumerate(alike(layers)):
                # What can be compared from outside is not all that a layer may do.
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
    """What `function` does with tensors like those of the example, less what no kernel needs."""
    names = [f"tensor{number}" for number in range(len(example))]
    graph, _ = torch._C._create_graph_by_tracing(
        lambda *tensors: function(tensors), example, lambda _: "", True, False, None, names
    )
    torch._C._jit_pass_erase_shape_information(graph)
    # Numbers alone: what is computed of weights must follow when these are written over.
    torch._C._jit_pass_constant_propagation_immutable_types(graph)  # type: ignore[attr-defined]
    torch._C._jit_pass_cse(graph)
    torch._C._jit_pass_constant_pooling(graph)  # type: ignore[attr-defined]
    torch._C._jit_pass_dce(graph)
    # Where nodes come from takes more memory than all else in them.
    nowhere: Any = torch._C.Graph()
    for node in graph.nodes():
        node.copyMetadata(nowhere.create("prim::Constant"))
    return graph
