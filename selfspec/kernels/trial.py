"""Kernels in Triton beside torch's own paths: used where they can run, once they have given what torch gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from selfspec.device import HostCopy

_LOG = logging.getLogger(__name__)
# The oldest CUDA devices whose matrix units take what the kernels in Triton give them.
_LEAST_CAPABILITY = (8, 0)


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run on a device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


class Trial:
    """A kernel and whether it is trusted, by kind of call.

    It is tried with the first tensors of each kind that it meets, against torch's own path. Where it differs beyond
    rounding, or cannot be compiled, torch's path runs from there on, and a warning says so once.

    Args:
        name: what the kernel computes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._passed: dict[Hashable, bool] = {}

    def run(self, kind: Hashable, kernel: Callable[[], Tensor], stock: Callable[[], Tensor], most: float) -> Tensor:
        """Compute something by the kernel if it is trusted, else by torch.

        Args:
            kind: of call.
            kernel: computes it.
            stock: the same by torch.
            most: how far the largest difference may be off, of the largest number.
        """
        if kind not in self._passed:
            expected = stock()
            # A capture cannot wait; what it repeats was run before it, and so was tried, unless nothing was learned.
            if expected.is_cuda and torch.cuda.is_current_stream_capturing():
                return expected
            return kernel() if self.passes(kind, kernel, expected, most) else expected
        return kernel() if self._passed[kind] else stock()

    def known(self, kind: Hashable) -> bool | None:
        """Whether the kernel is trusted; None: it has not been tried."""
        return self._passed.get(kind)

    def passes(self, kind: Hashable, kernel: Callable[[], Tensor], expected: Tensor, most: float) -> bool:
        """Try the kernel for a kind, and note whether it gives what is expected. Waits for the device."""
        try:
            found = kernel()
            off = (found.double() - expected.double()).abs().amax() / expected.double().abs().amax().clamp(min=1e-30)
            value = _read(off)
            # Of numbers that are not finite nothing is learned.
            if value != value and not _read(expected.isfinite().all().double()):
                return False
            failure = None if value <= most else f"is off by {value:.2g}"
        # Compilers and drivers fail in ways of their own; whatever is wrong, torch's path is right.
        except Exception as error:
            failure = f"failed: {error}"
        self._passed[kind] = failure is None
        if failure is not None:
            _LOG.warning("%s in Triton %s; torch's own runs instead (%s)", self._name, failure, kind)
        return failure is None


def _read(number: Tensor) -> float:
    """Return the value of a tensor of one number."""
    copy = HostCopy(number)
    # Modes that forbid a pass to read values are of one thread, and this is no decision of the pass.
    with ThreadPoolExecutor(1) as other:
        return other.submit(lambda: float(copy.read())).result()
