"""Weights that are streamed: read when a pass needs them, the next ones while it computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.errors import UnsupportedModelError
from selfspec.model.view import copied
from selfspec.placement.weight_files import ReadBuffer, StoredWeight, WeightFiles

# A pass that asks for nothing so long, in seconds, was abandoned, or leaves the network early.
_PAUSE = 0.5


class _Slot:
    """Memory for one weight.

    Attributes:
        holds: number of the weight that is there, or on its way; None: none.
        read: its read.
    """

    def __init__(self, size: int) -> None:
        self.buffer = ReadBuffer(size)
        self.holds: int | None = None
        self.read: Future[Tensor] = Future()


class WeightStream:
    """Streams weights from files into a few slots of memory, in the order in which passes use them.

    Passes of several threads take turns: each moves all the weights that it uses. A pass that fails or is interrupted
    leaves nothing behind.

    Args:
        weights: what is streamed, in the order in which a pass is likely to use it. The order in which passes do is
            learnt.
        slots: weights in memory at once, at least 2 more than one module uses.
        dtype: of the model.
        files: to read from.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self, weights: Sequence[StoredWeight], slots: int, dtype: torch.dtype, files: WeightFiles) -> None:
        self._weights, self._dtype, self._files = list(weights), dtype, files
        self._slots = [_Slot(max(weight.nbytes for weight in weights)) for _ in range(slots)]
        self._next = {number: (number + 1) % len(weights) for number in range(len(weights))}
        self._last: int | None = None
        self._reader = ThreadPoolExecutor(1, "selfspec-weights")
        self._turn = threading.Condition()
        self._owner: int | None = None
        self._lent = False
        self._since = 0.0
        self.bytes_read = 0

    @contextmanager
    def lend(self, numbers: Sequence[int]) -> Iterator[list[Tensor]]:
        """Lend weights for as long as a module uses them.

        Args:
            numbers: of the weights.

        Raises:
            StorageError: the disk does not give them.
        """
        self._take_turn()
        try:
            yield self._lent_weights(numbers)
        finally:
            with self._turn:
                self._lent, self._since = False, time.monotonic()
                if self._last == len(self._weights) - 1:
                    self._owner = None
                self._turn.notify_all()

    def _take_turn(self) -> None:
        me = threading.get_ident()
        with self._turn:
            while self._lent or self._owner not in (None, me):
                if not self._lent and time.monotonic() - self._since > _PAUSE:
                    break
                self._turn.wait(_PAUSE)
            self._owner, self._lent = me, True

    def _lent_weights(self, numbers: Sequence[int]) -> list[Tensor]:
        for number in numbers:
            if self._last is not None:
                self._next[self._last] = number
            self._last = number
        slots = [self._slot(number, numbers) for number in numbers]
        wanted = [*numbers]
        while len(wanted) < len(self._slots):
            following = self._next[wanted[-1]]
            if following in wanted:
                break
            wanted.append(following)
            self._slot(following, wanted)
        try:
            return [slot.read.result().to(self._dtype) for slot in slots]
        except BaseException:
            # The next pass reads them again, and those that were on their way.
            for slot in self._slots:
                slot.holds = None
            raise

    def _slot(self, number: int, wanted: Sequence[int]) -> _Slot:
        """The slot that holds a weight, or will; what other slots of `wanted` hold stays there."""
        for slot in self._slots:
            if slot.holds == number:
                return slot
        slot = next(slot for slot in self._slots if slot.holds is None or slot.holds not in wanted)
        # A read that nobody waits for any more must not write into memory that another one fills: one thread reads.
        slot.read.cancel()
        slot.holds = number
        slot.read = self._reader.submit(self._read, slot.buffer, self._weights[number])
        return slot

    def _read(self, buffer: ReadBuffer, weight: StoredWeight) -> Tensor:
        self.bytes_read += weight.nbytes
        return buffer.read(self._files, weight)


def stream_module(module: nn.Module, names: Sequence[str], numbers: Sequence[int], stream: WeightStream) -> None:
    """Let a module take weights from a stream whenever it runs.

    Args:
        module: its weights are on the meta device.
        names: of the weights in the module.
        numbers: of the weights in the stream.
        stream: lends them.
    """
    kind = type(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with stream.lend(numbers) as weights:
            lent = copied(module)
            del lent.__dict__["forward"]
            parameters = {name: nn.Parameter(weight, False) for name, weight in zip(names, weights, strict=True)}
            lent.__dict__["_parameters"] = {**module._parameters, **parameters}
            return kind.forward(lent, *args, **kwargs)

    module.__dict__["forward"] = forward
    # Says that its weights, though on the meta device, have values.
    module.__dict__["streams"] = True


def check_in_memory(model: nn.Module, what: str) -> None:
    """Refuse what needs all weights of a model.

    Raises:
        UnsupportedModelError: some are streamed.
    """
    if any(module.__dict__.get("streams") for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} streams its weights, so it cannot be {what}; load it whole with from_pretrained"
        )
