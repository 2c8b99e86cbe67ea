"""Passes compiled by torch's inductor: fused kernels for any number of slots, which round differently."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from selfspec.errors import UnsupportedOptionError
from selfspec.runtime.held_weights import HeldWeights
from selfspec.runtime.layer_calls import LayerCall, alike
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.runtime import RECORDING, AnyLength, Function, OtherSizesError, RecordingError, close

# The compiler treats smaller sizes as special cases.
_SMALLEST = 2
_COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True)
class Compiled(AnyLength):
    """Passes compiled by inductor, the compiler behind `torch.compile`.

    Its kernels are fused, so a pass is faster than a traced one and equal up to rounding. A compiled pass is used only
    after it has agreed with the stock modules to half the digits. Compiling takes about ten seconds for each kind of
    pass the first time on a machine and a few seconds later; torch keeps its results in `TORCHINDUCTOR_CACHE_DIR`. So
    use it for models that decode for a while.
    """

    def check(self, device: torch.device) -> None:
        missing = no_compiler(device)
        if missing is not None:
            raise UnsupportedOptionError(f"{missing}; install one, or leave the runtime out")

    def agree(self, kind: PassKind, given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
        return close(given, expected)

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        if example.packed:
            raise RecordingError(
                "packed weights are not compiled; selfspec.runtime.unpack the model, or leave the runtime out"
            )
        with RECORDING, torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            # Torch warns about its own internals.
            warnings.simplefilter("ignore")
            return _Compiled(function, example, self)

    def lowered(self, graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """Lower a graph of operators to something faster to call.

        Args:
            graph: takes tensors like those of the example, and writes to some of them.
            example: fake tensors; some of their sizes are symbols.
        """
        # All sizes but the symbols are equal in every call.
        patches = {"size_asserts": False, "alignment_asserts": False}
        compiled: Callable[..., tuple[Tensor, ...]] = torch._inductor.standalone_compile(
            graph, list(example), dynamic_shapes="from_graph", options={"config_patches": patches}
        )
        return compiled


class _Compiled:
    """A compiled pass, called like the pass. Weights are arguments, so it holds no copy of them."""

    def __init__(self, function: PassFunction, example: PassTensors, runtime: Compiled) -> None:
        roots = (function.view.module, *(call.layer for call in function.layers))
        held = HeldWeights.of(module for root in roots for module in root.modules())
        flat = example.flat()
        self._visible = next(index for index, tensor in enumerate(flat) if tensor is example.slots.visible)
        shapes = ShapeEnv(duck_shape=False)
        fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        inputs = _symbolic(example, fake)
        weights = _blanks(held.tensors, fake)

        def whole(*tensors: Tensor) -> tuple[Tensor, ...]:
            with held.replaced(tensors[len(flat) :]):
                return function(tensors[: len(flat)])

        with tracing(TracingContext(fake)), _shared(function.layers):
            graph = make_fx(whole, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs, *weights)
            self._lowered = runtime.lowered(graph, (*inputs, *weights))
        free: list[Any] = [inputs[self._visible].shape[0], inputs[-1].shape[2]]
        self._shapes = shapes
        guards = shapes.produce_guards_expression(free)
        self._guards = None if guards is None else compile(guards, "<guards>", "eval")
        self._weights = held.tensors

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._holds_for(tensors):
            raise OtherSizesError
        return tuple(self._lowered(*tensors, *self._weights))

    def _holds_for(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the sizes meet every assumption that compiling made."""
        sizes = (tensors[self._visible].shape[0], tensors[-1].shape[2])
        if min(sizes) < _SMALLEST:
            return False
        # `eval` of compiled code is faster than of text.
        guards: Any = self._guards
        return guards is None or self._shapes.evaluate_guards_expression(guards, sizes)


def _symbolic(example: PassTensors, fake: FakeTensorMode) -> list[Tensor]:
    """Fake tensors of a pass; the numbers of visible slots and of all slots are symbols."""
    slots = example.slots
    visible = _with_symbol(slots.visible, 0, fake, "visible")
    capacity = _with_symbol(slots.buffers[0], 2, fake, "capacity").shape[2]
    made = {id(slots.visible): visible}
    with fake:
        for buffer in slots.buffers:
            rows, heads, _, width = buffer.shape
            made[id(buffer)] = torch.empty(rows, heads, capacity, width, dtype=buffer.dtype, device=buffer.device)
    flat = example.flat()
    return [made.get(id(each), blank) for each, blank in zip(flat, _blanks(flat, fake), strict=True)]


def _with_symbol(tensor: Tensor, dim: int, fake: FakeTensorMode, name: str) -> Tensor:
    # The compiler would specialise on a size of 1.
    sizes = [max(size, _SMALLEST) if index == dim else size for index, size in enumerate(tensor.shape)]
    kinds = [DimDynamic.DYNAMIC if index == dim else DimDynamic.STATIC for index in range(tensor.dim())]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
    return fake.from_tensor(tensor.new_empty(sizes), symbolic_context=context, source=ConstantSource(name))


def _blanks(tensors: Sequence[Tensor], fake: FakeTensorMode) -> list[Tensor]:
    """Fake tensors like these."""
    with fake:
        return [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device) for each in tensors
        ]


@contextmanager
def _shared(layers: Sequence[LayerCall]) -> Iterator[None]:
    """Make equal layers calls of one graph, which is compiled once."""
    try:
        for number, group in enumerate(alike(layers)):
            # Layers may differ in more than can be compared from outside.
            first, last = (
                make_fx(_called(call))(*_blanks(call.example, FakeTensorMode(allow_non_fake_inputs=True)))
                for call in (group[0], group[-1])
            )
            if first.code == last.code:
                shared = _SharedGraph(group[0], f"layer{number}")
                for call in group:
                    call.function = shared
        yield
    finally:
        for call in layers:
            call.function = None


class _SharedGraph:
    """Runs one layer's graph with the weights it is given."""

    def __init__(self, call: LayerCall, name: str) -> None:
        self._call = call
        self._name = name
        self._graph: GraphModule | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._graph is None:
            with disable_proxy_modes_tracing():
                self._graph = make_fx(_called(self._call), tracing_mode="symbolic")(*tensors)
        outputs: tuple[Tensor, ...] = invoke_subgraph(self._graph, self._name, *tensors)
        return outputs


def _called(call: LayerCall) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *tensors: call.run(tensors)


def no_compiler(device: torch.device) -> str | None:
    """Say why nothing can be compiled for a device; None: it can be."""
    if device.type == "cuda" or any(map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))):
        return None
    return f"torch.compile needs a C++ compiler on a CPU, and none of {', '.join(_COMPILERS)} is there"
