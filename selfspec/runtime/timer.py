"""A clock that waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from selfspec.device import wait_for


class Timer:
    """Times work to its end on the device.

    Args:
        clock: seconds.
        device: what to wait for.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self._clock = clock
        self._device = device

    def now(self) -> float:
        """Return the time after all work of the device is done."""
        wait_for(self._device)
        return self._clock()

    def of(self, work: Callable[[], object]) -> float:
        """Return the seconds that a piece of work takes."""
        began = self.now()
        work()
        return self.now() - began
