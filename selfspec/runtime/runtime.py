"""Say how passes are run. A runtime is configuration; it changes the time of a pass, never its result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.process import ProcessLock
from selfspec.runtime.few_rows import for_few_rows, for_grouped_queries, for_norms
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.request import Chain, Draws, Races

_Module = TypeVar("_Module", bound=nn.Module)

Function = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A pass as a function of tensors alone."""

TRIALS = 3
"""Comparisons in which a program must agree with the stock modules."""

LATER = 32
"""Further passes of a kind after which what had no memory is made again."""

RECORDING = ProcessLock()
"""Held while recording: warning filters and graph captures belong to the whole process."""


class RecordingError(RuntimeError):
    """Says that a pass cannot be recorded, or no longer. The stock modules run it."""


class OtherSizesError(RuntimeError):
    """Says that a program does not fit the number of slots of this pass. The stock modules run it."""


class Runtime(ABC):
    """Runs passes, by programs or by the stock modules.

    Attributes:
        after: passes of a kind that the stock modules run before a program replaces them; None: all.
        making_seconds: the same in seconds; infinite if passes run asynchronously.
        bucket: passes read a multiple of this number of slots.
        widths: tokens of each row that programs read for chains, in rising order.
        captures: whether programs repeat launches of any modules on the memory of slots, which then outlives its text.
    """

    after: int | None = None
    making_seconds: float = math.inf
    bucket: int = 1
    widths: tuple[int, ...] = ()
    captures: bool = False

    def check(self, device: torch.device) -> None:  # noqa: B027 - some run anywhere
        """Refuse a device that this runtime cannot run on."""

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:  # noqa: B027 - most run any
        """Refuse a model that this runtime cannot run."""

    def viewed(self, module: _Module) -> _Module:
        """Return the view of a model, or of a part of one, that the stock modules' passes run: here a faster one."""
        return with_kernels(module)

    def takes(self, example: PassTensors) -> bool:
        """Return whether it makes programs of passes like this one."""
        return True

    def width(self, tokens: int) -> int:
        """Return how many tokens of each row a program reads for a chain of `tokens`; tokens after it are scrap."""
        return next((width for width in self.widths if width >= tokens), tokens)

    def of_one_model(self) -> Runtime:
        """Return the runtime whose programs are of one model, and may share what they need."""
        return self

    def chain(self, program: Function, first: PassTensors, draws: Draws | Races) -> Chain | None:
        """Take draft steps in one go by `program`, the first of them `first`; None: it takes them one by one."""
        return None

    def repeated(self, function: Function, device: torch.device) -> Function:
        """Return a function of tensors of a device that does in one launch what `function` does in many: here, none."""
        return function

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the view of a model that programs are made of; here the model itself."""
        return model

    def is_tried(self, lengths: Sequence[int]) -> bool:
        """Return whether a program has agreed with the stock modules often enough: here, over three slot counts."""
        return len(set(lengths)) >= TRIALS

    def agree(self, kind: PassKind, given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
        """Return whether a program agrees with the stock modules on the same tensors: here, bit for bit."""
        return equal(given, expected)

    @abstractmethod
    def program(self, function: PassFunction, example: PassTensors) -> Function:
        """Make a faster equivalent of `function` for tensors that differ from `example` only in numbers of slots.

        Keys and values of `example` are read and written in place. It raises RecordingError if there is none; the
        program may raise that too, or OtherSizesError.
        """


@dataclass(frozen=True)
class Eager(Runtime):
    """Runs the stock modules, always."""

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        return function


def with_kernels(module: _Module) -> _Module:
    """Make a view of a model, or of a part of one, that gives the same in less time."""
    return cast(_Module, for_norms(for_few_rows(for_grouped_queries(module))))


def equal(given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Return whether two passes gave the same bits."""
    # NaN differs from itself, but both may give it.
    return len(given) == len(expected) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(given, expected, strict=True)
    )


def close(given: tuple[Tensor, ...], expected: tuple[Tensor, ...], most: float | None = None) -> bool:
    """Return whether two passes agree up to an error of `most` times the norm; None: to half of their digits."""

    def is_close(one: Tensor, other: Tensor) -> bool:
        finite = other.isfinite()
        if one.shape != other.shape or one.dtype != other.dtype or not torch.equal(one.isfinite(), finite):
            return False
        zero = torch.zeros((), dtype=torch.float64, device=one.device)
        error, size = (torch.where(finite, each.double(), zero).norm() for each in (one - other, other))
        # Many models compute norms in float32 in any dtype.
        half = max(torch.finfo(dtype).eps for dtype in (other.dtype, torch.float32)) ** 0.5
        return bool(error <= (half if most is None else most) * size)

    return len(given) == len(expected) and all(map(is_close, given, expected))
