"""A stand-in for CUDA graphs on a CPU: operations are noted with the very tensors they ran on, and run on those again.

What makes graphs hard to use is true of it too: a replay reads and writes where the capture did, whatever came since;
numbers that were read from tensors, and decisions taken on them, are those of the capture; the capture itself leaves
nothing behind; and it fails where the host would wait for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.formats import int4, int8, planes, rounding
from selfspec.formats.rounding import Kernels
from selfspec.kernels import native
from selfspec.runtime import CudaGraphs, Runtime, cuda_graphs, few_rows
from selfspec.runtime.cuda_graphs import Launch, Recorder, Recording, SharedPlaces
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.runtime import Function

DRAFTS: dict[str, selfspec.drafts.Drafter | None] = {
    "plain": None,
    "exit": selfspec.drafts.EarlyExit(1),
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "look-up": selfspec.drafts.PromptLookup(),
    "int8": selfspec.drafts.LowPrecision(),
}
"""Drafts whose passes are of unlike kinds."""


class _Noted(TorchDispatchMode):
    """Notes every operation, and what stood in the memory that it wrote to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            raise RuntimeError("operation not permitted when stream is capturing: numbers go to the device")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before.append((value, value.clone()))
        outputs = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]))
        return outputs

    def undo(self) -> None:
        """Leave the memory as it was before."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before = []

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for old, new in zip(outputs, again, strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


class Operations(TorchDispatchMode):
    """Tells `note` every operation that torch runs inside, and what it gives."""

    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._note(func, output)
        return output


class StandInRecorder(Recorder):
    def __init__(self) -> None:
        self.captured, self.places = 0, SharedPlaces()

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def warmed(self, launch: Launch) -> tuple[Tensor, ...]:
        return launch()

    def record(self, launch: Launch) -> Recording:
        self.captured += 1
        noted = _Noted()
        with noted:
            outputs = launch()
        noted.undo()
        for output in outputs:
            output.fill_(-1)
        return Recording(noted.replay, outputs)


@dataclass(frozen=True)
class StandIn(CudaGraphs):
    recorders: list[StandInRecorder] = field(default_factory=list, compare=False)

    def check(self, device: torch.device) -> None:
        return

    def recorder(self, device: torch.device) -> Recorder:
        self.recorders.append(StandInRecorder())
        return self.recorders[-1]


@contextmanager
def as_with_triton() -> Iterator[None]:
    """Let passes on a CPU be noted, captured and rounded as on a device that runs Triton, not by kernels for CPUs."""
    with ExitStack() as inside:
        for module in (int4, int8, planes, rounding):
            inside.enter_context(mock.patch.object(module, "kernels_of", return_value=Kernels.TRITON))
        inside.enter_context(mock.patch.object(cuda_graphs, "runs_triton", return_value=True))
        inside.enter_context(mock.patch.object(few_rows, "is_plain", return_value=False))
        inside.enter_context(mock.patch.object(native, "available", return_value=False))
        yield


@dataclass(frozen=True)
class Again(Runtime):
    """Programs that run the view they were made of once more, over any number of slots."""

    after: int = 0

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        return function


def ticking() -> Callable[[], float]:
    """A clock by which all things take the same time, and each reading a little less than the one before.

    So a program, timed after the stock modules, always takes less.
    """
    ticks = threading.local()

    def now() -> float:
        # Threads beside each other must not take each other's time.
        passed: int = getattr(ticks, "passed", 0) + 1
        ticks.passed = passed
        return 1.0 - 1.0 / passed

    return now


def wrapped(
    model: PreTrainedModel, runtime: Runtime, draft: selfspec.drafts.Drafter | None = None
) -> selfspec.SelfSpeculative:
    """Wrap a model so that every program proves itself, by a clock that is `ticking`."""
    spec = selfspec.wrap(model, draft, draft_length=3, runtime=runtime)
    spec.programs = GraphCache(runtime, ticking())
    return spec


def assert_stock(spec: selfspec.SelfSpeculative, ids: Tensor, max_new_tokens: int) -> None:
    found = spec.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).sequences
    assert found.tolist() == spec.model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).tolist()


def ragged_samples(spec: selfspec.SelfSpeculative, prompt: int, max_new_tokens: int) -> list[list[int]]:
    """Samples of three rows of different lengths, `prompt` tokens the longest."""
    prompts = torch.cat([tiny.prompt(prompt, seed=seed) for seed in range(3)])
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    mask[2, :1] = 0
    output = spec.generate(prompts, mask, max_new_tokens=max_new_tokens, do_sample=True, seed=1)
    tokens: list[list[int]] = output.sequences.tolist()
    return tokens
