"""How passes are run. A runtime is configuration; it changes how long a pass takes, never what it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.errors import UnsupportedOptionError
from selfspec.model.adapter import Adapter
from selfspec.model.gated_view import GatedModel
from selfspec.runtime.layer_calls import LayerCall, put_calls
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.process_lock import ProcessLock

Function = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A pass as a function of tensors alone."""

# Numbers of slots over which one program for all has to give what the stock modules give.
_TRIALS = 3
RECORDING = ProcessLock()
"""Held while something is recorded: a whole process filters warnings at once, and captures one graph at a time."""


class RecordingError(RuntimeError):
    """A pass cannot be recorded, or not any more. The stock modules run it."""


class OtherSizesError(RuntimeError):
    """A program is not for as many slots as this pass has. The stock modules run this one."""


class Runtime(ABC):
    """How passes are run."""

    @property
    @abstractmethod
    def after(self) -> int | None:
        """Passes of a kind that the stock modules run before a program takes over; None: all."""

    @property
    def bucket(self) -> int:
        """Passes of a round look at a multiple of so many slots."""
        return 1

    def check(self, device: torch.device) -> None:  # noqa: B027 - some run anywhere
        """Refuse a device that passes cannot be run on so.

        Raises:
            UnsupportedOptionError: naming the remedy.
        """

    def put_calls(self, view: GatedModel, model: nn.Module, adapter: Adapter) -> tuple[LayerCall, ...]:
        """Let calls stand in for layers of a view, where programs can make something of that.

        Args:
            view: of a model.
            model: which; its weights are looked at by this view alone.
            adapter: where its layers are.
        """
        return ()

    @abstractmethod
    def is_tried(self, lengths: Sequence[int]) -> bool:
        """Whether a program has been compared with the stock modules often enough.

        Args:
            lengths: the number of visible slots in each comparison.
        """

    def agree(self, given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
        """Whether a program gave what the stock modules gave: here, the same bits.

        Args:
            given: by the program.
            expected: by the modules, from the same tensors.
        """
        return equal(given, expected)

    @abstractmethod
    def program(self, function: PassFunction, example: PassTensors) -> Function:
        """What computes the same as `function`, for other tensors of the same shapes, and faster.

        Shapes may differ where the number of visible slots, or of those there are, enters.

        Args:
            function: the pass. Its layers have noted what they were called with when it was run on the example.
            example: what it takes; keys and values are to be read and written where they are.

        Raises:
            RecordingError: it cannot be made; what was made may raise it as well, or `OtherSizesError`.
        """


@dataclass(frozen=True)
class Eager(Runtime):
    """The stock modules, always."""

    @property
    def after(self) -> int | None:
        return None

    def is_tried(self, lengths: Sequence[int]) -> bool:
        return True

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        return function


@dataclass(frozen=True)
class AnyLength(Runtime):
    """Makes one program of a kind of pass for any number of slots, and holds layers that are alike once in it.

    Attributes:
        after: passes of a kind that run without a program first.
    """

    after: int = 24

    def __post_init__(self) -> None:
        if isinstance(self.after, bool) or not isinstance(self.after, int) or self.after < 0:
            raise UnsupportedOptionError(f"after must be an integer of at least 0, got {self.after!r}")

    def put_calls(self, view: GatedModel, model: nn.Module, adapter: Adapter) -> tuple[LayerCall, ...]:
        return put_calls(view, model, adapter)

    def is_tried(self, lengths: Sequence[int]) -> bool:
        return len(set(lengths)) >= _TRIALS


def equal(given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether two passes gave the same bits."""
    # NaN is no number but may be what both give.
    return len(given) == len(expected) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(given, expected, strict=True)
    )
