"""How passes are run. A runtime is configuration; it changes how long a pass takes, never what it gives."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.errors import UnsupportedOptionError

Function = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A pass as a function of tensors alone."""

# Warnings are filtered for a whole process: one recording at a time may do that.
_RECORDING = threading.Lock()


class Runtime(ABC):
    """How passes are run."""

    @property
    @abstractmethod
    def after(self) -> int | None:
        """Passes of a kind that the stock modules run before a program takes over; None: all."""

    @abstractmethod
    def program(self, function: Function, example: tuple[Tensor, ...]) -> Function:
        """What computes the same as `function`, for other tensors of the same shapes, and faster.

        Shapes may differ where the number of visible slots enters.

        Args:
            function: the pass.
            example: what it may be run on.
        """


@dataclass(frozen=True)
class Eager(Runtime):
    """The stock modules, always."""

    @property
    def after(self) -> int | None:
        return None

    def program(self, function: Function, example: tuple[Tensor, ...]) -> Function:
        return function


@dataclass(frozen=True)
class Traced(Runtime):
    """Programs traced from the stock modules: the same kernels in the same order, called from C++.

    What Python does between two kernels takes as long as the kernels themselves where layers are small. A traced
    program has none of it. It is made once for every kind of pass, after some passes of that kind, since making one
    takes as long as some dozens of passes; and it is used where it gave, bit by bit, what the stock modules gave, in
    less time.

    Attributes:
        after: passes of a kind that run without a program first.
    """

    after: int = 12

    def __post_init__(self) -> None:
        if isinstance(self.after, bool) or not isinstance(self.after, int) or self.after < 0:
            raise UnsupportedOptionError(f"after must be an integer of at least 0, got {self.after!r}")

    def program(self, function: Function, example: tuple[Tensor, ...]) -> Function:
        names = [f"tensor{number}" for number in range(len(example))]
        # Of its own: what torch.jit.trace makes stays in a unit of the process, and every weight with it, for good.
        unit = torch._C.CompilationUnit()
        with _RECORDING, warnings.catch_warnings():
            # It warns of every decision taken on a shape; the shapes are the same next time.
            warnings.simplefilter("ignore")
            graph, _ = torch._C._create_graph_by_tracing(
                lambda *tensors: function(tensors), example, lambda _: "", True, False, None, names
            )
        traced = unit.create_function("program", graph, True)

        def run(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # Without its own optimiser, which would fuse kernels on some devices, and so round differently.
            try:
                with torch.jit.optimized_execution(False):
                    outputs: tuple[Tensor, ...] = traced(*tensors)
            except RuntimeError as error:
                # All errors of kernels come out as this one.
                if "out of memory" in str(error):
                    raise torch.OutOfMemoryError(str(error)) from error
                raise
            return outputs

        return run
