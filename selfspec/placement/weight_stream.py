"""Stream weights: fetch them when a pass needs them, and the next ones while it computes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from selfspec.errors import UnsupportedModelError
from selfspec.model.view import copied, is_streamed

# A pass that requests nothing for this time, in seconds, was abandoned, or leaves the network early.
_PAUSE = 0.5


class Slot(ABC):
    """Memory for one weight at a time, where modules compute.

    Attributes:
        holds: number of the weight that is there or being fetched; None: there is none.
    """

    holds: int | None = None

    def bring(self, number: int) -> None:
        """Begin to fetch a weight in place of the present one. Does not wait for it."""
        self.holds = number
        self._fetch(number)

    @abstractmethod
    def _fetch(self, number: int) -> None:
        """Begin to fetch a weight."""

    @abstractmethod
    def arrived(self) -> Tensor:
        """Return the weight, ready for later computations.

        Raises:
            StorageError: the weight cannot be read.
        """

    @abstractmethod
    def used(self) -> None:
        """Note that all uses of the weight so far have been requested; they may still be computing."""


class WeightStream:
    """A stream of weights into a few slots of memory, in the order in which passes use them.

    Passes of several threads take turns: each moves all the weights that it uses. A pass that fails or is interrupted
    leaves nothing behind.

    Args:
        sizes: bytes of each weight, in the likely order of use. The order of the passes is learnt.
        slots: at least 2 more than one module uses.

    Attributes:
        bytes_moved: bytes moved so far.
    """

    def __init__(self, sizes: Sequence[int], slots: Sequence[Slot]) -> None:
        self._sizes, self._slots = list(sizes), list(slots)
        self._next = {number: (number + 1) % len(sizes) for number in range(len(sizes))}
        self._last: int | None = None
        self._turn = threading.Condition()
        self._owner: int | None = None
        self._lent = False
        self._since = 0.0
        self.bytes_moved = 0

    @contextmanager
    def lend(self, numbers: Sequence[int]) -> Iterator[list[Tensor]]:
        """Lend weights, by number, while a module uses them.

        Raises:
            StorageError: the weights cannot be read.
        """
        self._take_turn()
        try:
            yield self._lent_weights(numbers)
        finally:
            try:
                for slot in self._slots:
                    if slot.holds in numbers:
                        slot.used()
            finally:
                with self._turn:
                    self._lent, self._since = False, time.monotonic()
                    if self._last == len(self._sizes) - 1:
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
        try:
            slots = [self._slot(number, numbers) for number in numbers]
            wanted = [*numbers]
            while len(wanted) < len(self._slots):
                following = self._next[wanted[-1]]
                if following in wanted:
                    break
                wanted.append(following)
                self._slot(following, wanted)
            return [slot.arrived() for slot in slots]
        except BaseException:
            # The next pass fetches these weights again, and those that were being fetched.
            for slot in self._slots:
                slot.holds = None
            raise

    def _slot(self, number: int, wanted: Sequence[int]) -> Slot:
        """Return the slot that holds a weight, or begin to fetch it; weights in `wanted` stay in their slots."""
        for slot in self._slots:
            if slot.holds == number:
                return slot
        slot = next(slot for slot in self._slots if slot.holds is None or slot.holds not in wanted)
        slot.bring(number)
        self.bytes_moved += self._sizes[number]
        return slot


def stream_module(module: nn.Module, names: Sequence[str], numbers: Sequence[int], stream: WeightStream) -> None:
    """Make a module take weights from a stream whenever it runs: their names in it, and their numbers there."""
    kind = type(module)

    @contextmanager
    def streams() -> Iterator[dict[str, Tensor]]:
        with stream.lend(numbers) as weights:
            yield dict(zip(names, weights, strict=True))

    def forward(*args: Any, **kwargs: Any) -> Any:
        with streams() as weights:
            lent = copied(module)
            del lent.__dict__["forward"]
            parameters = {name: nn.Parameter(weight, False) for name, weight in weights.items()}
            lent.__dict__["_parameters"] = {**module._parameters, **parameters}
            return kind.forward(lent, *args, **kwargs)

    module.__dict__["forward"] = forward
    # See `is_streamed`. Callers that need the weights themselves get them here, by name.
    module.__dict__["streams"] = streams


def check_in_memory(model: nn.Module, what: str) -> None:
    """Refuse an operation that needs all weights of a model in memory.

    Raises:
        UnsupportedModelError: some weights are streamed.
    """
    if any(map(is_streamed, model.modules())):
        raise UnsupportedModelError(
            f"{type(model).__name__} streams its weights, so it cannot be {what}; load it whole with from_pretrained"
        )
